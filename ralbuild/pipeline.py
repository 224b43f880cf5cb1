"""`build_image`: the stages in order, readable from top to bottom."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ralbuild import __version__
from ralbuild.cache import Cache
from ralbuild.compile.aot import compile_kernels
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
from ralbuild.fold.folding import Folded, fold
from ralbuild.fold.plan_text import overlap_lines, plan_text
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.base import build_base, ensure_base
from ralbuild.image.context import write_context
from ralbuild.image.outputs import Output
from ralbuild.image.plan import ImagePlan
from ralbuild.image.planning import ImageParts, plan_image
from ralbuild.image.reader import read_base
from ralbuild.image.stored import stored_image
from ralbuild.image.write import WrittenImage, write_image
from ralbuild.pins import load_pins
from ralbuild.report import Report, format_bytes
from ralbuild.weights.findings import FoundError
from ralbuild.weights.scan import ScannedModel, verify_folder
from ralbuild.weights.scan import Verdict as FolderVerdict
from ralbuild.weights.tokenizer import text_encoder

Target = Literal["cpu", "cuda"]

SHOWN_OVERLAPS = 10
"""Lines on overlapping routes that a build prints."""
LAYER_MTIME = 0
"""Seconds since 1970 of every entry: a commit date here would change every weight layer's digest."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What one build is asked for.

    Attributes:
        model, config: the model folder and the config file.
        target: what the image runs on.
        archs: GPU architectures instead of the config's; None keeps the config's.
        cache_dir: `.ral_cache`.
        base: an OCI layout to build on; None takes the embedded base.
        rehash: read every weight byte again.
        check_repro: compile every kernel twice and compare.
        strict: a warning of the kernel lint fails the build.
    """

    model: Path
    config: Path
    target: Target = "cpu"
    archs: tuple[str, ...] | None = None
    cache_dir: Path = Path(".ral_cache")
    base: Path | None = None
    rehash: bool = False
    check_repro: bool = False
    strict: bool = False


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
    compiled = compile_model(request, report)
    _, image = assemble(request, compiled, report)
    with report.stage("write") as stage:
        written = write_image(
            image,
            outputs,
            tag=tag,
            cache=default_cache(),
            progress=_byte_counter(report, sum(layer.digest.size for layer in image.unique_layers)),
            note=report.note,
        )
        reused = sum(layer.reused for layer in written.layers)
        stage.summary = (
            f"{format_bytes(written.bytes_written)} written, {reused} of {len(written.layers)} layers reused"
        )
    return compiled, image, written


def plan_only(request: BuildRequest, report: Report) -> tuple[Compiled, Image]:
    """Do everything but write the image: for ``--dry-run``."""
    _refuse_target(request.target)
    compiled = compile_model(request, report)
    _, image = assemble(request, compiled, report)
    return compiled, image


def verify_model(folder: Path, report: Report, *, rehash: bool = False) -> ScannedModel:
    """Check and hash a model folder.

    Raises:
        FoundError: with every finding, when there is an error. Weights are not read once one is known.
    """
    verdict = check_model(folder, report, rehash=rehash, fail_fast=True)
    if verdict.failed or verdict.model is None:
        raise FoundError(verdict.findings)
    for finding in verdict.findings:
        if finding.severity == "warning":
            report.note(str(finding.problem()))
    if verdict.model.left_out:
        report.note(f"left out of the image: {', '.join(verdict.model.left_out)}")
    return verdict.model


def check_model(
    folder: Path, report: Report, *, rehash: bool = False, fail_fast: bool = False
) -> FolderVerdict:
    """Run every check of a model folder; ``fail_fast`` stops before weights are read for nothing."""
    with report.stage("verify") as stage:
        verdict = verify_folder(
            folder,
            default_cache(),
            LAYER_MTIME,
            partial(report.progress, unit="B"),
            rehash=rehash,
            jobs=len(os.sched_getaffinity(0)),
            fail_fast=fail_fast,
        )
        model = verdict.model
        if model is None:
            stage.summary = f"{len(verdict.findings)} findings"
            return verdict
        known = all(shard.digests.cached for shard in model.shards)
        how = (
            "digests reused, no weight byte read"
            if known
            else f"{format_bytes(model.weight_bytes)} read and hashed"
        )
        stage.summary = f"{model.manifest.model_type}, {model.manifest.tensors} tensors, {how}"
    return verdict


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
    model = verify_model(request.model, report, rehash=request.rehash)
    engine = _engine(loaded, model, request.target)
    with report.stage("fold") as stage:
        folded = fold(loaded, model.vocabulary.tokens)
        size = folded.size
        stage.summary = (
            f"{len(folded.rule_set.rules)} rules, {size.states} states x {size.classes} classes, "
            f"{format_bytes(size.table_bytes)}, at most {size.max_held} bytes held back"
        )
    _note_overlaps(loaded, folded, report)
    with report.stage("compile") as stage:
        archs = request.archs if request.archs is not None else tuple(loaded.config.build.targets)
        users = _user_steps(loaded, model, engine.max_seq_len)
        _lint(users, report, strict=request.strict)
        specs = (*builtin_specs(), *(step.spec for step in users))
        kernels = _with_data(_compile(request, specs, archs, cache, report), users, cache)
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


def save_plan(compiled: Compiled, folder: Path) -> Path:
    """Write ``bundle.json`` and ``report.txt`` into the cache folder; return the report's path."""
    text = plan_text(compiled.bundle, compiled.bundle_sha256, compiled.folded.size)
    for name, data in (("bundle.json", compiled.bundle_json), ("report.txt", text.encode())):
        partial = folder / f".{name}.{os.getpid()}"
        try:
            partial.write_bytes(data)
            partial.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise CacheError(f"cannot be written: {error.strerror}", place=str(folder / name)) from None
    return folder / "report.txt"


def write_base(target: Target, output: Output, tag: str, report: Report, *, refresh: bool) -> str:
    """Build the embedded base, or take the finished one, and write it; return its manifest digest."""
    with report.stage("base") as stage:
        layout = build_base(target, report) if refresh else ensure_base(target, report)
        image = stored_image(layout)
        stage.summary = f"{len(image.layers)} layers"
    with report.stage("write") as stage:
        total = sum(layer.digest.size for layer in image.unique_layers)
        written = write_image(
            image,
            (output,),
            tag=tag,
            cache=default_cache(),
            progress=_byte_counter(report, total),
            note=report.note,
        )
        stage.summary = f"{format_bytes(written.bytes_written)} written"
    return written.manifest_digest


def assemble(request: BuildRequest, compiled: Compiled, report: Report) -> tuple[ImagePlan, Image]:
    """Put the compiled parts on a base and compute every digest; nothing is written."""
    with report.stage("base") as stage:
        layout = request.base or ensure_base(request.target, report)
        base = read_base(layout)
        size = sum(layer.size for layer in base.layers)
        stage.summary = f"{len(base.layers)} layers, {format_bytes(size)}, {base.digest[:19]}"
    parts = ImageParts(
        model=compiled.model,
        bundle=compiled.bundle,
        bundle_json=compiled.bundle_json,
        bundle_sha256=compiled.bundle_sha256,
        objects=compiled.objects,
        config_source=compiled.loaded.source,
        created=source_date(),
        mtime=LAYER_MTIME,
    )
    plan = plan_image(base, parts)
    return plan, assemble_image(plan)


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
    if target == "cpu" and loaded.kernels:
        kernel = loaded.kernels[0]
        raise ConfigError(
            f"{kernel.name!r} is a user kernel, and a CPU image has no GPU to run it on",
            place=kernel.place,
            hint="`ralbuild compile --target cuda` compiles it; a CPU image must do without",
        )


def _engine(loaded: LoadedConfig, model: ScannedModel, target: Target) -> contract.Engine:
    config = loaded.config
    family = model.manifest.model_type
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
    return contract.Engine(config.max_batch_size, length, dtype, config.runtime.idle_unload)


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
    if not kernels:
        return "no GPU architecture asked for, no kernel compiled"
    archs = sorted({item.arch for kernel in kernels for item in kernel.objects})
    size = sum(item.cubin.size + item.ptx.size for kernel in kernels for item in kernel.objects)
    return f"{len(kernels)} kernels for {', '.join(archs)}, {format_bytes(size)}"


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
        patch=tuple(contract.PatchStep(name, "slots") for name in steps),
        self_tests=folded.self_tests,
    )


def _byte_counter(report: Report, total: int) -> Callable[[int], None]:
    done = 0

    def count(size: int) -> None:
        nonlocal done
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
    plan, _ = assemble(request, compiled, report)
    with report.stage("render") as stage:
        count = write_context(plan, out)
        stage.summary = f"{count} files"
    return out
