"""Images written to their outputs: a build's own, one of a layout, an embedded base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.digests import default_cache
from ralbuild.image.assemble import Image
from ralbuild.image.outputs import Output, RegistryOutput
from ralbuild.image.registry.connect import Registries, RegistryOptions, open_registries
from ralbuild.image.registry.reference import Reference
from ralbuild.image.stored import stored_image
from ralbuild.image.write import WrittenImage, write_image
from ralbuild.report import Report, byte_counter, format_bytes

if TYPE_CHECKING:
    from ralbuild.pipeline.request import Target


def write_outputs(
    image: Image, outputs: tuple[Output, ...], tag: str, report: Report, registries: Registries
) -> WrittenImage:
    """Write ``image`` to every output as a stage of the report; raises as `write_image`."""
    with report.stage("write") as stage:
        total = sum(layer.digest.size for layer in image.unique_layers) * len(outputs)
        written = write_image(
            image,
            outputs,
            tag=tag,
            cache=default_cache(),
            registries=registries,
            progress=byte_counter(report, total),
            note=report.note,
        )
        reused = sum(layer.reused for layer in written.layers)
        stage.summary = (
            f"{format_bytes(written.bytes_written)} written, {reused} of {len(written.layers)} layers reused"
        )
    for place in written.names:
        report.note(f"available as {place}")
    return written


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
        written = write_outputs(image, (RegistryOutput(target),), "", report, registries)
    if image.artifacts:
        report.note(f"{len(image.artifacts)} manifests beside it pushed: signatures, documents, companions")
    return written


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
    from ralbuild.image.base import build_base, ensure_base  # a push of an image does not wait for it

    with report.stage("base") as stage:
        layout = build_base(target, report, lock) if refresh else ensure_base(target, report, lock)
        image = stored_image(layout)
        stage.summary = f"{len(image.layers)} layers"
    with open_registries(options) as registries:
        written = write_outputs(image, (output,), tag, report, registries)
    return written.manifest_digest
