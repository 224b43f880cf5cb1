"""`build_image`: the stages in order, readable from top to bottom."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ralbuild import __version__
from ralbuild.cache import Cache
from ralbuild.checking import LAYER_MTIME, Checks, verify_model
from ralbuild.compile.aot import compile_kernels
from ralbuild.compile.interpreted import with_sources
from ralbuild.compile.lint import lint_kernel
from ralbuild.compile.order import UserStep, step_order
from ralbuild.compile.spec import KernelSpec, builtin_specs
from ralbuild.compile.toolchain import find_toolchain
from ralbuild.compile.user_source import user_spec
from ralbuild.config.load import LoadedConfig, load_config
from ralbuild.config.model import ARCHITECTURES
from ralbuild.contract import bundle as contract
from ralbuild.contract.codec import canonical_json, sha256_hex, to_plain
from ralbuild.contract.families import SERVED_FAMILIES
from ralbuild.digests import default_cache
from ralbuild.errors import CacheError, CompileError, ConfigError, UsageError, WeightsError
from ralbuild.files import write_atomically
from ralbuild.fold.folding import Folded, fold
from ralbuild.fold.plan_text import overlap_lines, plan_text
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.base import build_base, ensure_base, interpreter_layer
from ralbuild.image.bases import BaseSource, LayoutBase, open_base
from ralbuild.image.context import write_context
from ralbuild.image.outputs import Output, RegistryOutput
from ralbuild.image.plan import ImagePlan
from ralbuild.image.planning import ImageParts, plan_image
from ralbuild.image.reader import open_image
from ralbuild.image.registry.connect import Registries, RegistryOptions, open_registries
from ralbuild.image.registry.profiles import check_limits, check_sizes
from ralbuild.image.registry.reference import Reference
from ralbuild.image.stored import stored_image
from ralbuild.image.write import WrittenImage, write_image
from ralbuild.pins import load_pins
from ralbuild.report import Report, format_bytes
from ralbuild.supply.attest import NOTHING, Wanted, attest_image, files_to_be
from ralbuild.supply.sbom import spdx_name
from ralbuild.supply.secrets import refuse_secrets
from ralbuild.weights.card import read_license
from ralbuild.weights.reshard import reshard
from ralbuild.weights.scan import ScannedModel
from ralbuild.weights.tokenizer import text_encoder

if TYPE_CHECKING:
    from ralbuild.proof import Sources

Target = Literal["cpu", "cuda"]

SHOWN_OVERLAPS = 10
"""Lines on overlapping routes that a build prints."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What one build is asked for.

    Attributes:
        model, config: the model folder and the config file.
        target: what the image runs on.
        archs: GPU architectures instead of the config's; None keeps the config's.
        cache_dir: `.ral_cache`.
        base: an image to build on; None takes the embedded base.
        registry: how to speak with registries.
        reshard: largest weight file of the image in bytes, header included; 0 takes the files as they are.
        checks: how strictly the model is checked.
        check_repro: compile every kernel twice and compare.
        attest: what to store beside the image.
        ignored_secrets: places (``file:line``) that look like a secret and are none.
        simulate: run every kernel before the image is written.
    """

    model: Path
    config: Path
    target: Target = "cpu"
    archs: tuple[str, ...] | None = None
    cache_dir: Path = Path(".ral_cache")
    base: BaseSource | None = None
    registry: RegistryOptions = field(default_factory=RegistryOptions)
    reshard: int = 0
    checks: Checks = field(default_factory=Checks)
    check_repro: bool = False
    attest: Wanted = NOTHING
    ignored_secrets: tuple[str, ...] = ()
    simulate: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of everything before the image: bundle bytes and the objects it names, by digest."""

    loaded: LoadedConfig
    model: ScannedModel
    folded: Folded
    bundle: contract.Bundle
    bundle_json: bytes
    objects: dict[str, bytes] = field(repr=False)

    @property
    def bundle_sha256(self) -> str:
        """The digest that the launcher logs."""
        return sha256_hex(self.bundle_json)


def build_image(
    request: BuildRequest, outputs: tuple[Output, ...], tag: str, report: Report
) -> tuple[Compiled, Image, WrittenImage]:
    """Verify, fold, compile, plan and write an image."""
    _refuse_target(request.target)
    request.attest.check_outputs(outputs)
    with open_registries(request.registry) as registries:
        _check_caps(request, outputs, registries)
        compiled = compile_model(request, report)
        plan, image = assemble(request, compiled, report, registries, _proof(request, compiled, report))
        image = _attest(image, tag, plan, request, report)
        written = _write(image, outputs, tag, report, registries)
    return compiled, image, written


def _check_caps(request: BuildRequest, outputs: tuple[Output, ...], registries: Registries) -> None:
    """Refuse a weight file that a registry would refuse, before it is read; `check_limits` sees the rest."""
    for output in outputs:
        if isinstance(output, RegistryOutput):
            profile = registries.repository(output.reference).registry.profile
            if not request.reshard:
                files = (path for path in sorted(request.model.glob("*.safetensors")) if path.is_file())
                check_sizes(((path.name, path.stat().st_size) for path in files), profile)


def push_image(
    folder: Path, name: str, target: Reference, options: RegistryOptions, report: Report
) -> WrittenImage:
    """Push an image of a layout folder, and what the folder holds about it, to a registry.

    Args:
        folder: the OCI layout.
        name: which of its images; may be empty where there is one.
        target: where to.
        options: how to speak with the registry.
        report: for progress.

    Raises:
        ImageError: when the layout has no such image or is damaged, or the registry refuses.
    """
    image = stored_image(folder, name)
    with open_registries(options) as registries:
        written = _write(image, (RegistryOutput(target),), "", report, registries)
    if image.artifacts:
        report.note(f"{len(image.artifacts)} signatures or documents pushed with it")
    return written


def _write(
    image: Image, outputs: tuple[Output, ...], tag: str, report: Report, registries: Registries
) -> WrittenImage:
    with report.stage("write") as stage:
        total = sum(layer.digest.size for layer in image.unique_layers) * len(outputs)
        written = write_image(
            image,
            outputs,
            tag=tag,
            cache=default_cache(),
            registries=registries,
            progress=_byte_counter(report, total),
            note=report.note,
        )
        reused = sum(layer.reused for layer in written.layers)
        stage.summary = (
            f"{format_bytes(written.bytes_written)} written, {reused} of {len(written.layers)} layers reused"
        )
    for place in written.names:
        report.note(f"available as {place}")
    return written


def plan_only(
    request: BuildRequest, outputs: tuple[Output, ...], report: Report
) -> tuple[Compiled, ImagePlan, Image]:
    """Do everything but write the image: for ``--dry-run`` and ``--check-repro``."""
    _refuse_target(request.target)
    with open_registries(request.registry) as registries:
        _check_caps(request, outputs, registries)
        compiled = compile_model(request, report)
        plan, image = assemble(request, compiled, report, registries, _proof(request, compiled, report))
        for output in outputs:
            if isinstance(output, RegistryOutput):
                check_limits(image, registries.repository(output.reference).registry.profile)
    return compiled, plan, image


def check_config(path: Path, model: ScannedModel | None = None) -> LoadedConfig:
    """Load a config and, given the model, check it against that.

    Raises:
        ConfigError: with every mistake.
    """
    loaded = load_config(path)
    if model is not None:
        _engine(loaded, model, "cpu")
    return loaded


def compile_model(request: BuildRequest, report: Report) -> Compiled:
    """Verify the model, fold the rules and compile the kernels into the cache."""
    loaded = load_config(request.config)
    _refuse_user_kernels(loaded, request.target)
    cache = Cache(request.cache_dir, report)
    model = verify_model(request.model, report, request.checks)
    if request.reshard:
        model = _reshard(model, request.reshard, report)
    engine = _engine(loaded, model, request.target)
    with report.stage("fold") as stage:
        folded = fold(loaded, model.vocabulary.tokens, strips=model.vocabulary.strips)
        size = folded.size
        stage.summary = (
            f"{len(folded.rule_set.rules)} rules, {size.states} states x {size.classes} classes, "
            f"{format_bytes(size.table_bytes + size.front_bytes)}, at most {size.max_held} bytes held back"
        )
    _note_overlaps(loaded, folded, report)
    with report.stage("compile") as stage:
        archs = request.archs if request.archs is not None else tuple(loaded.config.build.targets)
        users = _user_steps(loaded, model, engine.max_seq_len)
        _lint(users, report, strict=request.checks.strict)
        specs = (*builtin_specs(), *(step.spec for step in users))
        kernels = _with_data(_compile(request, specs, archs, cache, report), users, cache)
        if request.target == "cpu":
            kernels = with_sources(kernels, users, cache.add)
        stage.summary = _kernel_summary(kernels)
    steps = step_order(users, loaded.declarative_priorities)
    bundle = _link(loaded, model, folded, engine, kernels, steps, request.target, cache)
    objects = {ref.sha256: cache.read(ref) for ref in contract.object_refs(bundle)}
    return Compiled(loaded, model, folded, bundle, contract.write_bundle(bundle), objects)


def _note_overlaps(loaded: LoadedConfig, folded: Folded, report: Report) -> None:
    lines = overlap_lines(loaded.path.name, folded.rule_set.routes, folded.overlaps)
    for line in lines[:SHOWN_OVERLAPS]:
        report.note(line)
    if len(lines) > SHOWN_OVERLAPS:
        report.note(f"{len(lines) - SHOWN_OVERLAPS} more overlaps of routes; `ralbuild explain` lists them")


def _reshard(model: ScannedModel, limit: int, report: Report) -> ScannedModel:
    with report.stage("reshard") as stage:
        progress = _byte_counter(report, model.weight_bytes)
        fresh = reshard(model, limit, default_cache(), LAYER_MTIME, progress)
        stage.summary = f"{len(model.shards)} weight files become {len(fresh.shards)}"
    return fresh


def kernel_sources(request: BuildRequest, compiled: Compiled, report: Report) -> Sources:
    """Return where the source lines of the compiled kernels are found."""
    from ralbuild.proof import sources_of  # the simulator: a build without --simulate does not wait for it

    users = _user_steps(compiled.loaded, compiled.model, compiled.bundle.engine.max_seq_len)
    specs = (*builtin_specs(), *(step.spec for step in users))
    return sources_of(compiled.bundle, specs, Cache(request.cache_dir, report))


def _proof(request: BuildRequest, compiled: Compiled, report: Report) -> str:
    """Run the kernels when that is asked for; return what the image's label says of it."""
    if not request.simulate:
        return ""
    from ralbuild.proof import prove

    sources = kernel_sources(request, compiled, report)
    return prove(compiled.bundle, compiled.objects, sources, report)


def save_plan(compiled: Compiled, folder: Path) -> Path:
    """Write ``bundle.json`` and ``report.txt`` into the cache folder; return the report's path."""
    text = plan_text(compiled.bundle, compiled.bundle_sha256, compiled.folded.size)
    for name, data in (("bundle.json", compiled.bundle_json), ("report.txt", text.encode())):
        try:
            write_atomically(folder / name, data)
        except OSError as error:
            raise CacheError(f"cannot be written: {error.strerror}", place=str(folder / name)) from None
    return folder / "report.txt"


def write_base(
    target: Target,
    output: Output,
    tag: str,
    options: RegistryOptions,
    report: Report,
    *,
    refresh: bool,
    lock: Path | None = None,
) -> str:
    """Build the embedded base, or take the finished one, and write it; return its manifest digest.

    ``lock`` is used instead of the lock that ships with ralbuild.
    """
    with report.stage("base") as stage:
        layout = build_base(target, report, lock) if refresh else ensure_base(target, report, lock)
        image = stored_image(layout)
        stage.summary = f"{len(image.layers)} layers"
    with open_registries(options) as registries:
        written = _write(image, (output,), tag, report, registries)
    return written.manifest_digest


def assemble(
    request: BuildRequest, compiled: Compiled, report: Report, registries: Registries, proof: str = ""
) -> tuple[ImagePlan, Image]:
    """Put the compiled parts on a base and compute every digest; nothing is written.

    Args:
        proof: what was simulated, for the image's labels; empty for nothing.
    """
    config = (compiled.loaded.path.name, compiled.loaded.source)
    refuse_secrets((config, *compiled.model.files), request.ignored_secrets)
    with report.stage("base") as stage:
        source = request.base or LayoutBase(ensure_base(request.target, report))
        base = open_base(source, registries)
        size = sum(layer.size for layer in base.layers)
        stage.summary = f"{len(base.layers)} layers, {format_bytes(size)}, {base.digest[:19]}"
        interpreted = any(kernel.source is not None for kernel in compiled.bundle.kernels)
        interpreter = interpreter_layer(report) if interpreted else None
    parts = ImageParts(
        model=compiled.model,
        bundle=compiled.bundle,
        bundle_json=compiled.bundle_json,
        bundle_sha256=compiled.bundle_sha256,
        objects=compiled.objects,
        config_source=compiled.loaded.source,
        created=source_date(),
        mtime=LAYER_MTIME,
        license=spdx_name(read_license(request.model)),
        simulated=proof,
        interpreter=interpreter,
    )
    plan = plan_image(base, parts)
    return plan, assemble_image(plan)


def _attest(image: Image, tag: str, plan: ImagePlan, request: BuildRequest, report: Report) -> Image:
    """Return the image with the artifacts that were asked for beside it.

    Raises:
        UsageError: for a base in a registry, whose list of packages is not read.
    """
    if not request.attest:
        return image
    base = request.base or LayoutBase(ensure_base(request.target, report))
    if not isinstance(base, LayoutBase):
        hint = "copy the base to a layout: skopeo copy --preserve-digests, then --base oci:DIR"
        raise UsageError(
            "what is attested names the base's packages, and they are read in a layout", hint=hint
        )
    with report.stage("attest") as stage, open_image(base.path, digest=base.digest) as stored:
        image = attest_image(image, files_to_be(plan, stored), request.attest, str(base.path))
        stage.summary = str(request.attest)
    if not tag:
        report.note("skopeo and podman need a name to tell the image from what lies beside it: --tag")
    return image


def source_date() -> int:
    """Return ``SOURCE_DATE_EPOCH``, or 0: the image's date never comes from the clock.

    Raises:
        UsageError: when the variable is not a number.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "") or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > 0xFFFFFFFF:
        raise UsageError(f"needs seconds since 1970, found {text[:40]!r}", place="SOURCE_DATE_EPOCH")
    return int(text)


def _refuse_target(target: Target) -> None:
    if target == "cuda":
        raise UsageError(
            "images for cuda are not supported in this version: the engine runs on the CPU",
            place="--target",
            hint="`ralbuild compile --target cuda` compiles the kernels; `--target cpu` builds an image",
        )


def _refuse_user_kernels(loaded: LoadedConfig, target: Target) -> None:
    if target == "cpu" and loaded.kernels and loaded.config.runtime.cpu_user_kernels is None:
        kernel = loaded.kernels[0]
        raise ConfigError(
            f"{kernel.name!r} is a user kernel, and a CPU image has no GPU to run it on",
            place=kernel.place,
            hint="`runtime: {cpu_user_kernels: interpret}` puts Triton into the image and runs it, slowly; "
            "`ralbuild compile --target cuda` compiles it",
        )


def _engine(loaded: LoadedConfig, model: ScannedModel, target: Target) -> contract.Engine:
    config = loaded.config
    family = model.manifest.model_type
    if model.quantised:
        raise WeightsError(
            f"the engine serves unquantised weights only; these are {model.quantised}",
            place="config.json",
            hint="use the unquantised weights",
        )
    if target == "cpu" and family not in SERVED_FAMILIES:
        raise WeightsError(
            f"the engine does not serve model_type {family!r}: an image of it could not start",
            place="config.json",
            hint=f"served families: {', '.join(sorted(SERVED_FAMILIES))}",
        )
    limit = model.manifest.max_positions
    written = loaded.document.values.get(("max_seq_len",))
    if limit and config.max_seq_len > limit and written:
        raise ConfigError(
            f"max_seq_len is {config.max_seq_len}, but the model was made for {limit} positions",
            place=written,
            hint=f"use at most {limit}",
        )
    dtype = config.runtime.dtype
    if dtype == "auto":
        dtype = "float32" if target == "cpu" else "bfloat16"
    length = min(config.max_seq_len, limit) if limit else config.max_seq_len
    return contract.Engine(config.max_batch_size, length, dtype)


def _user_steps(loaded: LoadedConfig, model: ScannedModel, max_seq_len: int) -> tuple[UserStep, ...]:
    if not loaded.kernels:
        return ()
    encode = text_encoder(dict(model.files)["tokenizer.json"])
    return tuple(
        UserStep(
            user_spec(
                name=kernel.name,
                source=kernel.source,
                filename=str(kernel.path),
                settings=kernel.settings,
                max_seq_len=max_seq_len,
                encode=encode,
                place=kernel.place,
            ),
            kernel.priority,
            kernel.place,
        )
        for kernel in loaded.kernels
    )


def _lint(users: Sequence[UserStep], report: Report, *, strict: bool) -> None:
    """Report what is likely wrong with user kernels.

    Raises:
        CompileError: with every defect, when ``strict``.
    """
    problems = [defect.problem for step in users for defect in lint_kernel(step.spec)]
    if strict and problems:
        raise CompileError.of(problems)
    for problem in problems:
        report.note(f"warning: {problem}. {problem.hint[0].upper()}{problem.hint[1:]}")


def _with_data(
    kernels: tuple[contract.Kernel, ...], users: Sequence[UserStep], cache: Cache
) -> tuple[contract.Kernel, ...]:
    """Give each user kernel the object of its own config."""
    data = {step.spec.name: step.spec.data for step in users}
    return tuple(
        replace(kernel, data=cache.add(own)) if (own := data.get(kernel.name)) is not None else kernel
        for kernel in kernels
    )


def _compile(
    request: BuildRequest, specs: tuple[KernelSpec, ...], archs: tuple[str, ...], cache: Cache, report: Report
) -> tuple[contract.Kernel, ...]:
    unknown = sorted(set(archs) - set(ARCHITECTURES))
    if unknown:
        raise UsageError(
            f"unknown architecture {unknown[0]!r}", place="--arch", hint=", ".join(ARCHITECTURES)
        )
    if not archs:
        return ()
    toolchain = find_toolchain(load_pins())
    jobs = len(os.sched_getaffinity(0))
    return compile_kernels(
        specs, archs, toolchain, cache, jobs=jobs, report=report, check_repro=request.check_repro
    )


def _kernel_summary(kernels: tuple[contract.Kernel, ...]) -> str:
    archs = sorted({item.arch for kernel in kernels for item in kernel.objects})
    interpreted = [kernel.name for kernel in kernels if kernel.source is not None]
    if not archs:
        rest = f"; interpreted on the CPU: {', '.join(interpreted)}" if interpreted else ""
        return f"no GPU architecture asked for, no kernel compiled{rest}"
    size = sum(item.cubin.size + item.ptx.size for kernel in kernels for item in kernel.objects)
    return (
        f"{len(kernels)} kernels for {', '.join(archs)}, {len(kernels)} launches a step, {format_bytes(size)}"
    )


def _link(
    loaded: LoadedConfig,
    model: ScannedModel,
    folded: Folded,
    engine: contract.Engine,
    kernels: tuple[contract.Kernel, ...],
    steps: tuple[str, ...],
    target: Target,
    cache: Cache,
) -> contract.Bundle:
    """Name everything by digest; the tables join the kernels in the cache."""
    rules = folded.rule_set
    return contract.Bundle(
        schema=contract.SCHEMA,
        ralbuild=__version__,
        target=target,
        model=loaded.config.model,
        manifest=cache.add(canonical_json(to_plain(model.manifest))),
        engine=engine,
        routes=rules.routes,
        profiles=rules.profiles,
        input_profile=rules.input_profile,
        input_limits=folded.input_limits,
        rules=rules.rules,
        config_sha256=sha256_hex(loaded.source),
        transducer=cache.add(folded.transducer),
        route_table=cache.add(folded.route_table),
        bans=cache.add(folded.bans),
        vocab=cache.add(folded.vocab),
        kernels=kernels,
        patch=tuple(contract.PatchStep(name, "1" if name == "feedback" else "slots") for name in steps),
        self_tests=folded.self_tests,
    )


def _byte_counter(report: Report, total: int) -> Callable[[int], None]:
    """Return what adds up bytes for the report, whichever thread dealt with them."""
    done = 0
    lock = threading.Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            report.progress(min(done, total), total, "B")

    return count


def render_context(request: BuildRequest, out: Path, report: Report) -> Path:
    """Write a folder that ``docker build`` takes: Dockerfile, entrypoint, launcher, bundle, model.

    Weights are hard links, never copies. The folder appears when it is complete.

    Raises:
        UsageError: when ``out`` exists.
        HostError: when it cannot be written, or lies on another file system than the weights.
    """
    if os.path.lexists(out):
        raise UsageError("is already there", place=str(out), hint="name a new folder")
    compiled = compile_model(request, report)
    with open_registries(request.registry) as registries:
        plan, _ = assemble(request, compiled, report, registries)
    with report.stage("render") as stage:
        count = write_context(plan, out)
        stage.summary = f"{count} files"
    return out
