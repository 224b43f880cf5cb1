"""`report.txt`: what was compiled, for people who review it before it ships."""

from __future__ import annotations

from collections.abc import Sequence

from ralbuild.contract.bundle import (
    CHARACTERS,
    RUN,
    TOKENS,
    Bundle,
    InputLimit,
    Kernel,
    Profile,
    Route,
)
from ralbuild.fold.routes import Overlaps
from ralbuild.fold.transducer import TransducerSize


def plan_text(bundle: Bundle, bundle_sha256: str, size: TransducerSize) -> str:
    """Return the plan: order of work, rules by route, tables, kernels with registers and symbols."""
    lines = [
        f"bundle sha256:{bundle_sha256}",
        f"model {bundle.model}, target {bundle.target}, {bundle.engine.dtype}",
        f"{bundle.engine.max_batch_size} slots of {bundle.engine.max_seq_len} positions",
        "",
        f"Decode step: model, then {', then '.join(step.kernel for step in bundle.patch)}",
        f"Launches a step: {len(bundle.patch)}",
        "",
        "Routes, first match wins",
    ]
    lines += [f"  {route.priority:>6}  {route.match!r} -> {route.action}" for route in bundle.routes]
    lines.append("     any  default")
    lines += ["", "Rules"]
    for profile in bundle.profiles:
        lines += _profile_lines(bundle, profile)
    if bundle.input_limits:
        lines += ["", "Input limits: what is longer is refused"]
        lines += [f"  {limit.name}: {limit_text(limit)}" for limit in bundle.input_limits]
    lines += [
        "",
        "Transducer",
        f"  {size.states} states x {size.classes} byte classes, {size.table_bytes} bytes",
        f"  {size.programs} programs; markers and redactions {size.front_bytes} bytes",
        f"  longest hold-back {size.max_held} bytes; text that no rule can match is never held",
        "",
        "Kernels",
    ]
    for kernel in bundle.kernels:
        lines += _kernel_lines(kernel)
    if not bundle.kernels:
        lines.append("  none: no GPU architecture was asked for")
    return "\n".join(lines) + "\n"


def overlap_lines(file: str, routes: Sequence[Route], overlaps: Overlaps) -> list[str]:
    """Say which routing rules match the same names, hidden rules first; ``file`` is the config's name."""
    lines = []
    for item in sorted(overlaps.found, key=lambda item: not item.whole):
        first, second = routes[item.winner], routes[item.loser]
        places = f"{file}:{second.place} (priority {second.priority})", f"{first.place} ({first.priority})"
        if item.whole:
            lines.append(
                f"warning: {places[0]}: {second.match!r} can never win: {first.match!r} at {places[1]} is "
                f"tried before it and takes what it matches, such as {item.example!r}"
            )
        else:
            lines.append(
                f"{places[0]}: {second.match!r} overlaps {first.match!r} at {places[1]}, "
                f"which wins for such as {item.example!r}"
            )
    if not overlaps.complete:
        lines.append("the routes' automaton is large: not all names were compared")
    return lines


def limit_text(limit: InputLimit) -> str:
    """Say what an input limit accepts."""
    of = {RUN: "characters without a space", CHARACTERS: "characters", TOKENS: "tokens of prompt"}
    return f"at most {limit.max_length} {of[limit.unit]}"


def _profile_lines(bundle: Bundle, profile: Profile) -> list[str]:
    sampling = ", ".join(profile.sampling.lines())
    lines = [f"  {profile.name}" + (f" ({sampling})" if sampling else "")]
    for number in profile.rules:
        rule = bundle.rules[number]
        lines.append(f"    {rule.kind:<8} {rule.text!r}  {rule.source}, {rule.place}")
    return lines


def _kernel_lines(kernel: Kernel) -> list[str]:
    origin = "user" if kernel.user else "built-in"
    hidden = sum(param.hidden for param in kernel.params)
    head = f"  {kernel.name} ({origin}), entry {kernel.entry}, {kernel.num_warps} warps, "
    lines = [f"{head}{len(kernel.params) - hidden} + {hidden} parameters"]
    if kernel.source is not None:
        lines.append("    interpreted on the CPU from its source, by Triton in the image: slow")
    for item in kernel.objects:
        sizes = f"{item.registers} registers, {item.spill_bytes} B spilled, {item.shared_bytes} B shared"
        lines.append(
            f"    {item.arch}  {sizes}, cubin {item.cubin.size} B, symbols {', '.join(item.symbols)}"
        )
    return lines
