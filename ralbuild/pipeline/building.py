"""`build_image`: the stages in order, readable from top to bottom."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.checking import LAYER_MTIME
from ralbuild.digests import LayerCopies, default_cache
from ralbuild.errors import UsageError
from ralbuild.image.ahead import writing_ahead
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.bases import LayoutBase, open_base
from ralbuild.image.modelpack import modelpack
from ralbuild.image.outputs import Output, RegistryOutput, check_takes_companions
from ralbuild.image.plan import BaseImage, ImagePlan
from ralbuild.image.planning import ImageParts, check_base, plan_image
from ralbuild.image.registry.connect import Registries, open_registries
from ralbuild.image.registry.profiles import check_limits, check_sizes
from ralbuild.image.write import WrittenImage
from ralbuild.pipeline.checks import refuse_unservable
from ralbuild.pipeline.compiling import Compiled, compile_model
from ralbuild.pipeline.proving import prove_kernels
from ralbuild.pipeline.request import BuildRequest
from ralbuild.pipeline.writing import write_outputs
from ralbuild.report import Report, format_bytes
from ralbuild.supply.sbom import spdx_name
from ralbuild.supply.secrets import refuse_secrets
from ralbuild.weights.card import read_license
from ralbuild.weights.scan import ScannedModel

if TYPE_CHECKING:
    from ralbuild.image.base import Work


def build_image(
    request: BuildRequest, outputs: tuple[Output, ...], tag: str, report: Report
) -> tuple[Compiled, Image, WrittenImage]:
    """Verify, fold, compile, plan and write an image."""
    request.attest.check_outputs(outputs)
    if request.volume or request.modelpack:
        check_takes_companions(outputs)
    # What `--reshard` makes is no layer that the check of the model reads.
    early = writing_ahead(outputs if not request.reshard else ())
    with open_registries(request.registry) as registries, early as ahead:
        compiled, plan, image = _make(request, outputs, report, registries, ahead)
        image = _attest(image, tag, plan, compiled.model, request, report)
        image = ahead.hand_over(image) if ahead is not None else image
        written = write_outputs(image, outputs, tag, report, registries)
    return compiled, image, written


@dataclass(frozen=True, slots=True)
class Planned:
    """An image that is not written.

    Attributes:
        compiled, plan, image: as a build makes them.
        missing: what a build would make first and a dry run does not, in words. With any, the image's layers
            are right but for those, and its digest is not known.
    """

    compiled: Compiled
    plan: ImagePlan
    image: Image
    missing: tuple[str, ...]


def plan_only(request: BuildRequest, outputs: tuple[Output, ...], report: Report) -> Planned:
    """Do everything but write the image: for ``--dry-run`` and ``--check-repro``."""
    with open_registries(request.registry) as registries:
        compiled, plan, image = _make(request, outputs, report, registries)
        for output in outputs:
            if isinstance(output, RegistryOutput):
                check_limits(image, registries.repository(output.reference).registry.profile)
    return Planned(compiled, plan, image, missing_parts(request, compiled, plan) if request.dry_run else ())


def missing_parts(request: BuildRequest, compiled: Compiled, plan: ImagePlan) -> tuple[str, ...]:
    """Say what of an image's parts is not in the user's cache and would be made."""
    from ralbuild.image.base import base_work, find_interpreter, interpreter_work

    missing = []
    if plan.base is None:
        missing.append(_work(base_work(request.target)))
    if _is_interpreted(compiled) and find_interpreter() is None:
        missing.append(_work(interpreter_work()))
    return tuple(missing)


def _work(work: Work) -> str:
    size, room = format_bytes(work.download), format_bytes(work.room)
    return f"{work.part}: {work.packages} locked packages, {size}, {room} of disk meanwhile"


def _is_interpreted(compiled: Compiled) -> bool:
    return any(kernel.source is not None for kernel in compiled.bundle.kernels)


def _make(
    request: BuildRequest,
    outputs: tuple[Output, ...],
    report: Report,
    registries: Registries,
    copies: LayerCopies | None = None,
) -> tuple[Compiled, ImagePlan, Image]:
    """Verify, fold, compile, prove and plan: all that comes before writing."""
    _check_caps(request, outputs, registries)
    base = _chosen_base(request, registries)
    compiled = compile_model(request, report, copies)
    refuse_unservable(compiled.bundle, compiled.model)
    proof = prove_kernels(request, compiled, report)
    plan, image = assemble(request, compiled, base, report, registries, proof)
    return compiled, plan, image


def render_context(request: BuildRequest, out: Path, report: Report) -> Path:
    """Write a folder that ``docker build`` takes: Dockerfile, entrypoint, launcher, bundle, model.

    Weights are hard links, never copies. The folder appears when it is complete.

    Raises:
        UsageError: when ``out`` exists.
        HostError: when it cannot be written, or lies on another file system than the weights.
    """
    if os.path.lexists(out):
        raise UsageError("is already there", place=str(out), hint="name a new folder")
    with open_registries(request.registry) as registries:
        base = _chosen_base(request, registries)
        compiled = compile_model(request, report)
        refuse_unservable(compiled.bundle, compiled.model)
        plan, _ = assemble(request, compiled, base, report, registries)
    from ralbuild.image.context import write_context

    with report.stage("render") as stage:
        count = write_context(plan, out, default_cache())
        stage.summary = f"{count} files"
    return out


def _check_caps(request: BuildRequest, outputs: tuple[Output, ...], registries: Registries) -> None:
    """Refuse a weight file that a registry would refuse, before it is read; `check_limits` sees the rest."""
    for output in outputs:
        if isinstance(output, RegistryOutput):
            profile = registries.repository(output.reference).registry.profile
            if not request.reshard:
                files = (path for path in sorted(request.model.glob("*.safetensors")) if path.is_file())
                check_sizes(((path.name, path.stat().st_size) for path in files), profile)


def _chosen_base(request: BuildRequest, registries: Registries) -> BaseImage | None:
    """Open the base that was asked for, before anything is compiled for it; None where none was."""
    if request.base is None:
        return None
    base = open_base(request.base, registries)
    place = (
        f"--base oci:{request.base.path}" if isinstance(request.base, LayoutBase) else f"--base {base.name}"
    )
    check_base(base, request.target, place)
    return base


def _embedded_base(request: BuildRequest, report: Report, registries: Registries) -> BaseImage | None:
    from ralbuild.image.base import ensure_base, find_base  # needed only where no base was given

    layout = find_base(request.target) if request.dry_run else ensure_base(request.target, report)
    return open_base(LayoutBase(layout), registries) if layout is not None else None


def assemble(
    request: BuildRequest,
    compiled: Compiled,
    chosen: BaseImage | None,
    report: Report,
    registries: Registries,
    proof: str = "",
) -> tuple[ImagePlan, Image]:
    """Put the compiled parts on a base and compute every digest; nothing is written.

    Args:
        chosen: the base that was asked for; None takes the embedded one.
        proof: what was simulated, for the image's labels; empty for nothing.
    """
    config = (compiled.loaded.path.name, compiled.loaded.source)
    refuse_secrets((config, *compiled.model.files), request.ignored_secrets)
    with report.stage("base") as stage:
        base = chosen or _embedded_base(request, report, registries)
        stage.summary = "not made yet"
        if base is not None:
            size = sum(layer.size for layer in base.layers)
            stage.summary = f"{len(base.layers)} layers, {format_bytes(size)}, {base.digest[:19]}"
        interpreter = None
        if _is_interpreted(compiled):
            from ralbuild.image.base import find_interpreter, interpreter_layer

            interpreter = find_interpreter() if request.dry_run else interpreter_layer(report)
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
    below = open_base(request.weights_base, registries) if request.weights_base is not None else None
    plan = plan_image(base, parts, volume=request.volume, weights_base=below)
    image = assemble_image(plan)
    if request.modelpack:
        pack = modelpack(image, compiled.model.manifest, compiled.bundle.model, parts.license)
        image = replace(image, artifacts=(*image.artifacts, pack))
    return plan, image


def _attest(
    image: Image, tag: str, plan: ImagePlan, model: ScannedModel, request: BuildRequest, report: Report
) -> Image:
    """Return the image with the artifacts that were asked for beside it."""
    if not request.attest:
        return image
    from ralbuild.supply.attest import attest_image, files_to_be

    with report.stage("attest") as stage:
        place = plan.base.name if plan.base is not None else ""
        read_file = files_to_be(plan)
        image = attest_image(image, read_file, request.attest, place or "--base", model.weight_digests)
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
