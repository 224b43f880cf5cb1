"""Weight layers written while they are hashed: the one read of a cold build is also its copy.

A new layout's weight layers are written, byte for byte as they are hashed, into a folder beside its place,
and moved into it once the image is decided. A short cut and never a condition: where it cannot be taken
(a layout that is there already, no room, a file system that shares extents, another build on the same
output, a failed write) the layer is copied when its turn comes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ralbuild.digests import StatKey
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.blobs import PARTIAL
from ralbuild.image.disk import can_share, remove_tree, try_lock
from ralbuild.image.layers import Ready
from ralbuild.image.outputs import LayoutOutput, Output

_SPARE = 64 << 20
"""Bytes that stay free on the disk: the rest of the image is not known yet."""


class Ahead:
    """The layers that one run has written; only whoever holds its folder's lock may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = map(str, itertools.count())
        self._room = shutil.disk_usage(folder).free - _SPARE
        self._lock = threading.Lock()
        self._ready: dict[str, Ready] = {}

    def open(self, source: Path, size: int) -> AheadCopy | None:
        """Begin a layer of about ``size`` bytes, of ``source`` and its like; None where that does not pay."""
        with self._lock:
            self._room -= size
            if self._room < 0 or can_share(source, self._folder):
                return None
            path = self._folder / next(self._names)
        try:
            return AheadCopy(path, self._ready)
        except OSError:
            return None

    def hand_over(self, image: Image) -> Image:
        """Return the image with the layers that were written, for `BlobFolder.add` to move."""
        return replace(
            image,
            layers=tuple(map(self._with_file, image.layers)),
            beside=tuple(map(self._with_file, image.beside)),
        )

    def _with_file(self, layer: Layer) -> Layer:
        ready = self._ready.get(layer.digest.sha256)
        return layer if ready is None else replace(layer, recipe=replace(layer.recipe, ready=ready))


class AheadCopy:
    """One layer that is being written: see `ralbuild.digests.LayerCopy`."""

    def __init__(self, path: Path, ready: dict[str, Ready]) -> None:
        self._path = path
        self._ready = ready
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; after a failed write, a full disk for one, nothing more is written."""
        if self._file.closed:
            return
        try:
            with memoryview(data) as rest:
                done = 0
                while done < len(rest):
                    done += self._file.write(rest[done:])
        except OSError:
            self.close("")

    def close(self, sha256: str) -> None:
        """Keep the file as the layer with this digest; remove it for an empty one."""
        if self._file.closed:
            return
        try:
            self._file.close()  # a network's file system may tell only now that it has no room
            if sha256:
                self._ready[sha256] = Ready(self._path, StatKey.of(self._path.stat(follow_symlinks=False)))
                return
        except OSError:
            pass
        with contextlib.suppress(OSError):
            self._path.unlink()


@contextlib.contextmanager
def writing_ahead(outputs: Sequence[Output]) -> Iterator[Ahead | None]:
    """Write weight layers ahead for the first new layout among ``outputs``; None where there is none.

    What a killed build left is removed, and so is what nobody took in the end.
    """
    folders = [Path(os.path.realpath(item.path)) for item in outputs if isinstance(item, LayoutOutput)]
    target = next((folder for folder in folders if folder.parent.is_dir()), None)
    if target is None:
        yield None
        return
    folder = target.with_name(f".{target.name}{PARTIAL}ahead")
    with _own_folder(folder, make=not os.path.lexists(target)) as own:
        yield Ahead(folder) if own and not os.path.lexists(target) else None


@contextlib.contextmanager
def _own_folder(folder: Path, *, make: bool) -> Iterator[bool]:
    """Hold the empty folder, made if need be, and remove it in the end; False when it is not to be had."""
    try:
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not try_lock(fd):
            yield False
            return
        try:
            for path in folder.iterdir():
                remove_tree(path)
            yield True
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)
