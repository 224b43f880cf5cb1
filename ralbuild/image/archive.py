"""The sink `archive:FILE`: one tar that is an OCI layout and a `docker save` archive at once.

It has index.json for readers of OCI archives and manifest.json for `docker load`; both name the same
blobs. The small files come first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ralbuild.contract.codec import canonical_json, sha256_hex
from ralbuild.contract.tarball import (
    END,
    FILE_MODE,
    aligned_file_header,
    directory_header,
    file_header,
    padding,
)
from ralbuild.errors import ImageError
from ralbuild.image.artifacts import Artifact
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.blobs import BLOBS, PARTIAL
from ralbuild.image.disk import Note, check_room, clear_place, host_errors, locked
from ralbuild.image.layers import Progress, Recipe, append_layer, recipe_chunks
from ralbuild.image.oci import LAYOUT_FILE, index_entry, index_json
from ralbuild.image.plan import LayerDigest
from ralbuild.image.sink import SinkResult

_MTIME = 0
Piece = tuple[Recipe, LayerDigest]


class ArchiveSink:
    """An archive under its temporary name; made by `open_archive`."""

    def __init__(
        self, target: Path, partial: Path, fd: int, pieces: Sequence[Piece], progress: Progress | None
    ):
        self.finished = False
        self._target = target
        self._partial = partial
        self._fd = fd
        self._pieces = iter(pieces)
        self._size = sum(digest.size for _, digest in pieces)
        self._progress = progress

    def add(self, layer: Layer) -> None:
        """Write everything up to the end of ``layer``."""
        with host_errors(self._target.parent, self._size):
            for recipe, digest in self._pieces:
                append_layer(recipe, self._fd, digest, self._progress)
                if digest == layer.digest:
                    return

    def finish(self) -> SinkResult:
        """Write the end and give the file its name."""
        with host_errors(self._target.parent, self._size):
            for recipe, digest in self._pieces:
                append_layer(recipe, self._fd, digest, self._progress)
            self._partial.rename(self._target)
            self.finished = True
        return SinkResult(self._size, frozenset())


@contextlib.contextmanager
def open_archive(
    target: Path, image: Image, tag: str, progress: Progress | None, note: Note
) -> Iterator[ArchiveSink]:
    """Open ``target`` for ``image`` as one tar file; it is replaced when the new one is complete.

    Raises:
        ImageError: when ``target`` is no place for a file, or a source changed.
        HostError: when it cannot be written or the disk is too small.
    """
    target = Path(os.path.realpath(target))
    pieces = tuple(archive_pieces(image, tag, image.artifacts))
    needed = sum(digest.size for _, digest in pieces)
    partial = target.with_name(f".{target.name}{PARTIAL}build")
    with contextlib.ExitStack() as stack:
        with host_errors(target.parent, needed):
            if target.exists() and not target.is_file():
                raise ImageError("is not a file", place=str(target), hint="archive: needs the name of a file")
            target.parent.mkdir(parents=True, exist_ok=True)
            _, fd = stack.enter_context(locked(lambda: (partial, _open(partial)), note))
            sink = ArchiveSink(target, partial, fd, pieces, progress)
            stack.enter_context(_tidy_on_failure(sink, partial))
            os.ftruncate(fd, 0)
            check_room(target.parent, needed, [file for recipe, _ in pieces for file in recipe.copied_files])
        yield sink


@contextlib.contextmanager
def _tidy_on_failure(sink: ArchiveSink, partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not sink.finished:  # else the name may be another build's by now
            partial.unlink(missing_ok=True)
        raise


def archive_pieces(image: Image, tag: str, artifacts: Sequence[Artifact] = ()) -> Iterator[Piece]:
    """Yield the archive as blobs to write one after the other; layers are not read for this.

    Args:
        image: the image.
        tag: its name in the archive; may be empty.
        artifacts: what index.json lists beside it; manifest.json, for `docker load`, has the image alone.
    """
    folder = str(BLOBS)
    entries = [index_entry(image.manifest, image.architecture, tag)]
    entries += [artifact.entry(tag) for artifact in artifacts]
    small = [image.config, image.manifest]
    small += [data for artifact in artifacts for data in (*artifact.blobs, artifact.manifest)]
    blobs = {sha256_hex(data): data for data in small}
    head = b"".join(
        [
            _file("oci-layout", LAYOUT_FILE),
            _file("index.json", index_json(entries, {})),
            _file("manifest.json", _docker_manifest(image, tag)),
            directory_header(str(BLOBS.parent), _MTIME),
            directory_header(folder, _MTIME),
            *(_file(f"{folder}/{name}", data) for name, data in blobs.items()),
        ]
    )
    offset = 0
    for layer in image.unique_layers:
        name, size = f"{folder}/{layer.digest.sha256}", layer.digest.size
        # Aligned, so that the weight bytes inside the layer are too.
        head += aligned_file_header(name, FILE_MODE, size, _MTIME, offset + len(head))
        yield _piece(head)
        yield layer.recipe, layer.digest
        offset += len(head) + size
        head = padding(size)
    yield _piece(head + END)


def archive_chunks(
    image: Image, tag: str, before: Callable[[LayerDigest], None] = lambda _: None
) -> Iterator[bytes]:
    """Yield the archive's bytes as they are read; nothing is written.

    Args:
        image: the image.
        tag: its name in the archive; may be empty.
        before: called with each piece's digest before it is read.
    """
    for recipe, digest in archive_pieces(image, tag):
        before(digest)
        for chunk in recipe_chunks(recipe):
            yield bytes(chunk)


def _docker_manifest(image: Image, tag: str) -> bytes:
    layers = [f"{BLOBS}/{layer.digest.sha256}" for layer in image.layers]
    config = f"{BLOBS}/{sha256_hex(image.config)}"
    return canonical_json([{"Config": config, "RepoTags": [tag] if tag else None, "Layers": layers}])


def _file(name: str, data: bytes) -> bytes:
    return file_header(name, FILE_MODE, len(data), _MTIME) + data + padding(len(data))


def _piece(data: bytes) -> Piece:
    return Recipe("archive metadata", (data,)), LayerDigest(sha256_hex(data), len(data))


def _open(partial: Path) -> int:
    """Open the temporary file, made when it is missing; another build of ours may be writing it."""
    clear_place(partial, _is_ours)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(partial, flags, 0o666)
    if not _is_ours(os.fstat(fd)):
        os.close(fd)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(partial))
    return fd


def _is_ours(info: os.stat_result) -> bool:
    # A file with a second name is somebody's file, which this build would empty.
    return stat.S_ISREG(info.st_mode) and info.st_nlink <= 1 and info.st_uid == os.geteuid()
