"""Write an image to where it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.digests import DigestCache
from ralbuild.image.archive import write_archive
from ralbuild.image.assemble import Image
from ralbuild.image.disk import Note
from ralbuild.image.layers import Progress, WrongLayerError
from ralbuild.image.layout import SinkResult, write_layout
from ralbuild.image.outputs import LayoutOutput, Output


@dataclass(frozen=True, slots=True)
class WrittenLayer:
    """One layer of a written image; ``reused`` when every output already had it."""

    name: str
    kind: str
    digest: str
    size: int
    reused: bool


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """What was written: digests with ``sha256:``, layers from the lowest, bytes of blobs over all outputs."""

    manifest_digest: str
    config_digest: str
    layers: tuple[WrittenLayer, ...]
    bytes_written: int


def write_image(
    image: Image,
    outputs: Sequence[Output],
    *,
    tag: str = "",
    cache: DigestCache,
    progress: Progress | None = None,
    note: Note = lambda _: None,
) -> WrittenImage:
    """Write ``image`` to every output, one after the other.

    Args:
        image: from `ralbuild.image.assemble.assemble_image`.
        outputs: from `ralbuild.image.outputs.parse_output`.
        tag: name in the outputs, from `parse_tag`; empty for none.
        cache: remembers which blobs of a layout are right, so that they are not read again.
        progress: called with the number of bytes written or checked in each step.
        note: told when this build waits for another one.

    Raises:
        ImageError: when an output is something else, or a source file changed since it was scanned.
        HostError: when an output cannot be written or its disk is too small.
    """
    results = [_write_one(image, output, tag, cache, progress, note) for output in outputs]
    layers = tuple(
        WrittenLayer(
            layer.descriptor.name,
            layer.descriptor.kind,
            layer.descriptor.digest,
            layer.descriptor.size,
            all(layer.digest.sha256 in result.reused for result in results),
        )
        for layer in image.layers
    )
    return WrittenImage(image.digest, image.config_digest, layers, sum(result.written for result in results))


def _write_one(
    image: Image, output: Output, tag: str, cache: DigestCache, progress: Progress | None, note: Note
) -> SinkResult:
    try:
        if isinstance(output, LayoutOutput):
            return write_layout(output.path, image, tag, cache, progress, note)
        return write_archive(output.path, image, tag, progress, note)
    except WrongLayerError as error:
        for file in error.files:
            if file.purpose:
                cache.forget(file.path, file.purpose)  # so that the next build reads it again
        raise
