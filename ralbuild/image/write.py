"""Write an image to where it was asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ralbuild.digests import DigestCache
from ralbuild.image.assemble import Image
from ralbuild.image.disk import Note
from ralbuild.image.layers import Progress, WrongLayerError
from ralbuild.image.outputs import (
    ArchiveOutput,
    DockerOutput,
    LayoutOutput,
    Output,
    RegistryOutput,
    check_takes_companions,
)
from ralbuild.image.sink import Sink

if TYPE_CHECKING:
    from ralbuild.image.registry.connect import Registries


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
    """What was written.

    Attributes:
        manifest_digest, config_digest: with ``sha256:``.
        layers: from the lowest; those beside the image first.
        bytes_written: of blobs, over all outputs, sent ones included.
        names: how registries and engines call it.
    """

    manifest_digest: str
    config_digest: str
    layers: tuple[WrittenLayer, ...]
    bytes_written: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all outputs of one run share; see `write_image`."""

    cache: DigestCache
    registries: Registries | None
    progress: Progress | None
    note: Note


def write_image(
    image: Image,
    outputs: Sequence[Output],
    *,
    tag: str = "",
    cache: DigestCache,
    registries: Registries | None = None,
    progress: Progress | None = None,
    note: Note = lambda _: None,
) -> WrittenImage:
    """Write ``image`` to every output, layer by layer, so that all of them read a weight file at one time.

    All outputs are opened before the first byte is written: what one of them would refuse, and a disk
    that is too small, stops the run then. Folders and files come first, the registry's manifest last.

    Args:
        image: from `ralbuild.image.assemble.assemble_image`.
        outputs: from `ralbuild.image.outputs.parse_output`; the same one twice is written once.
        tag: name in the outputs, from `parse_tag`; empty for none. A registry's output has its own.
        cache: remembers which blobs of a layout are right, so that they are not read again.
        registries: for outputs in registries.
        progress: called with the number of bytes written, sent or checked in each step.
        note: told when this build waits for another one.

    Raises:
        ImageError: when an output is something else, or a source file changed since it was scanned.
        HostError: when an output cannot be written or its disk is too small.
    """
    # One order for everybody: two builds that lock the same outputs cannot wait for each other.
    if image.companions:
        check_takes_companions(outputs)
    ordered = sorted({_key(output): output for output in outputs}.items())
    shared = _Shared(cache, registries, progress, note)
    try:
        with contextlib.ExitStack() as stack:
            sinks = [stack.enter_context(_open(output, image, tag, shared)) for _, output in ordered]
            for layer in image.unique_layers:
                for sink in sinks:
                    sink.add(layer)
            results = [sink.finish() for sink in sinks]
    except WrongLayerError as error:
        for file in error.files:
            if file.purpose:
                cache.forget(file.path, file.purpose)  # so that the next build reads it again
        raise
    layers = tuple(
        WrittenLayer(
            layer.descriptor.name,
            layer.descriptor.kind,
            layer.descriptor.digest,
            layer.descriptor.size,
            all(layer.digest.sha256 in result.reused for result in results),
        )
        for layer in (*image.beside, *image.layers)
    )
    names = tuple(result.name for result in results if result.name)
    written = sum(result.written for result in results)
    return WrittenImage(image.digest, image.config_digest, layers, written, names)


def _key(output: Output) -> tuple[int, str]:
    """Return what tells one output from another, in the order of shared."""
    if isinstance(output, LayoutOutput):
        return 0, os.path.realpath(output.path)
    if isinstance(output, ArchiveOutput):
        return 1, os.path.realpath(output.path)
    if isinstance(output, DockerOutput):
        return 2, ""
    return 3, str(output.reference)


def _open(output: Output, image: Image, tag: str, shared: _Shared) -> contextlib.AbstractContextManager[Sink]:
    # Each kind of output is imported when it is asked for: a changed rule should not wait for HTTP and TLS.
    if isinstance(output, LayoutOutput):
        from ralbuild.image.layout import open_layout

        return open_layout(output.path, image, tag, shared.cache, shared.progress, shared.note)
    if isinstance(output, ArchiveOutput):
        from ralbuild.image.archive import open_archive

        return open_archive(output.path, image, tag, shared.progress, shared.note)
    if isinstance(output, RegistryOutput):
        assert shared.registries is not None
        from ralbuild.image.registry.sink import open_registry

        return open_registry(output.reference, image, shared.registries, shared.progress)
    from ralbuild.image.daemon import open_docker

    return open_docker(image, tag, shared.progress)
