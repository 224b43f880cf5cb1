"""The trust boundary of an image: what it fixes for good, and what is left to whoever runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ralbuild.contract.places import MODEL_DIR, PORT, ROUTE_HEADER
from ralbuild.image.facts import ImageFacts
from ralbuild.image.plan import WEIGHTS_LABEL


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that is decided: by the ``image`` or on the ``serving`` side, what, and how."""

    by: Literal["image", "serving"]
    what: str
    detail: str


NO_RUNTIME_RULES = (
    "none shown; RAL_RUNTIME_RULES may name a signed file, applied after the image's rules, never instead"
)


def trust_boundary(facts: ImageFacts, runtime_rules: str = NO_RUNTIME_RULES) -> tuple[Decision, ...]:
    """Return what is compiled into an image, and what is not; ``runtime_rules`` tells of those."""
    return (*_compiled(facts), Decision("serving", "runtime rules", runtime_rules), *_left(facts))


def _compiled(facts: ImageFacts) -> list[Decision]:
    bundle, model = facts.bundle, facts.model
    counts = Counter(rule.kind for rule in bundle.rules)
    rules = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
    routes = f"{_count(len(bundle.routes), 'route')} to {_count(len(bundle.profiles), 'set')} of rules"
    archs = sorted({item.arch for kernel in bundle.kernels for item in kernel.objects})
    users = sum(kernel.user for kernel in bundle.kernels)
    kernels = (
        f"{len(bundle.kernels)}, {users} of them the user's, for {', '.join(archs)}" if archs else "none"
    )
    interpreted = [kernel.name for kernel in bundle.kernels if kernel.source is not None]
    if interpreted:
        kernels += f"; {', '.join(interpreted)} interpreted on the CPU from source, by Triton in the image"
    engine = bundle.engine
    weights = f"{model.parameters} parameters in {_count(len(model.weight_files), 'file')} by sha256"
    if WEIGHTS_LABEL in facts.labels:
        weights += ", in an image of their own"
    found = [
        ("rules", rules),
        ("routes", routes),
        ("kernels", kernels),
        ("weights", weights),
        ("tokenizer", f"with templates and settings: {_count(len(model.files), 'file')} by sha256"),
        ("engine", f"{engine.max_batch_size} slots, {engine.max_seq_len} positions, {engine.dtype}"),
        ("programs", f"{_count(len(facts.packages), 'package')} of the base; no compiler, no download"),
    ]
    return [Decision("image", what, detail) for what, detail in found]


def _left(facts: ImageFacts) -> list[Decision]:
    host = "kernel and engine"
    if facts.bundle.target == "cuda":
        driver = facts.labels.get("io.ralbuild.cuda.driver", "of any version")
        host = f"kernel, engine, GPU driver {driver} or newer"
        memory = facts.labels.get("io.ralbuild.cuda.memory", "")
        if memory.isascii() and memory.isdecimal():
            host += f", {int(memory) >> 20} MiB of the GPU's memory and more"
    imposed = sum(
        (profile.sampling.temperature, profile.sampling.top_p) != (None, None)
        for profile in facts.bundle.profiles
    )
    exception = f", but for {_count(imposed, 'set')} of rules that impose some" if imposed else ""
    weights = facts.labels.get(WEIGHTS_LABEL)
    mounted = [("weights", f"mount {MODEL_DIR} of {weights} at {MODEL_DIR}, read-only")] if weights else []
    found = [
        *mounted,
        ("route", f"of a request: header {ROUTE_HEADER} or the name after the model's; the sender chooses"),
        ("prompts", f"and sampling are the request's own{exception}"),
        ("access", f"port {PORT} speaks plain HTTP and asks for no key: put TLS and access control in front"),
        ("host", host),
        ("limits", "memory, processors, network and a read-only root are the container engine's to set"),
    ]
    return [Decision("serving", what, detail) for what, detail in found]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
