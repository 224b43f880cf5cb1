"""A layer is a recipe, never a file of its own: hashed, copied or streamed from where its bytes lie.

Copying lets the kernel move the bytes of large files (a shared extent where the file system can). What is
hashed is what is written, and each byte is hashed once for it: a file that this run has read for its digest
must be in the very state of that read before and after the copy; of anything else, a second thread hashes
what has arrived in the output.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ralbuild.contract.codec import sha256_hex
from ralbuild.digests import CHUNK, StatKey
from ralbuild.errors import ImageError
from ralbuild.image.disk import changed, unchanging
from ralbuild.image.plan import BaseLayer, HostFile, LayerDigest, LayerPlan, RemoteBlob
from ralbuild.image.tarball import Segment, layer_segments

Progress = Callable[[int], None]
"""Called with the number of bytes that were just dealt with, from several threads; below zero takes back."""

COPY_STEP = 16 << 20
"""Bytes the kernel copies per call: short enough for progress, Ctrl-C and a hash that stays close."""

_COPY_UNSUPPORTED = (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM)


class WrongLayerError(ImageError):
    """What was written is not what its digest says: a file changed, or its remembered digest is wrong.

    Attributes:
        files: what the layer was made from.
    """

    def __init__(self, recipe: Recipe, expected: LayerDigest, found: str) -> None:
        self.files = recipe.files
        again = "build from files at rest, then run the command again"
        if any(file.purpose for file in self.files):
            again += "; what was remembered of the file is forgotten now, and --rehash reads every file anew"
        super().__init__(
            f"changed while the image was being built, or its remembered digest is wrong: {recipe.name} "
            f"needs {expected.size} bytes with sha256 {expected.sha256}, "
            f"what was written has {recipe.size} with {found}",
            place=", ".join(str(file.path) for file in self.files) or recipe.name,
            hint=again,
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """A file with a layer's very bytes, that this run wrote as it hashed them, and its state since then."""

    path: Path
    state: StatKey


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to produce a blob: its name for messages, its segments in order, its size in bytes.

    ``blob`` is a file of another layout that holds exactly these bytes under their digest already;
    ``ready`` is one that the first who wants it may move away.
    """

    name: str
    segments: tuple[Segment, ...]
    blob: Path | None = None
    ready: Ready | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """Bytes of the whole blob."""
        return sum(len(part) if isinstance(part, bytes) else part.size for part in self.segments)

    @property
    def files(self) -> tuple[HostFile, ...]:
        """The files that it reads."""
        return tuple(part for part in self.segments if isinstance(part, HostFile))

    @property
    def copied_files(self) -> tuple[HostFile, ...]:
        """Those of them that the kernel is asked to copy whole, and may share."""
        return tuple(file for file in self.files if _is_copied(file) and file.is_whole)

    @property
    def is_witnessed(self) -> bool:
        """True when this run hashed just these bytes, and a write to a file since then would show."""
        files = self.copied_files
        if not files or any(isinstance(part, RemoteBlob) for part in self.segments):
            return False
        frame = sha256_hex(b"".join(part for part in self.segments if isinstance(part, bytes)))
        return files == self.files and all(
            file.witness is not None and file.witness.frame == frame for file in files
        )

    @property
    def remote(self) -> RemoteBlob | None:
        """The registry's blob that this one is, or None."""
        first = self.segments[0] if self.segments else None
        return first if isinstance(first, RemoteBlob) else None


def layer_recipe(layer: LayerPlan, mtime: int) -> Recipe:
    """Return the recipe of one of our layers, or raise ImageError for an entry that cannot be in one."""
    return Recipe(layer.name, layer_segments(layer, mtime))


def base_recipe(layer: BaseLayer) -> Recipe:
    """Return the recipe of a base layer: its blob as it is."""
    source = layer.source
    held = source if isinstance(source, RemoteBlob) else HostFile(source, layer.size)
    return Recipe(f"base layer {layer.digest}", (held,))


def digest_layer(recipe: Recipe, progress: Progress | None = None) -> LayerDigest:
    """Read the recipe's bytes once and return their digest and size; memory is one chunk.

    Raises:
        ImageError: when a source file is not what the plan says or changes meanwhile.
    """
    digest = hashlib.sha256()
    for chunk in recipe_chunks(recipe):
        digest.update(chunk)
        if progress:
            progress(len(chunk))
    return LayerDigest(digest.hexdigest(), recipe.size)


def recipe_chunks(recipe: Recipe) -> Iterator[bytes | memoryview]:
    """Yield the recipe's bytes; a chunk is valid until the next one is asked for."""
    for part in recipe.segments:
        if isinstance(part, bytes):
            yield part
        elif isinstance(part, RemoteBlob):
            yield from part.fetch()
        else:
            with unchanging(part) as fd:
                yield from _file_chunks(part, fd)


def append_layer(recipe: Recipe, out: int, expected: LayerDigest, progress: Progress | None = None) -> None:
    """Write the recipe's bytes at the end of the file ``out`` (open for reading and writing).

    Raises:
        ImageError: when a source file changed.
        WrongLayerError: when what was written is not ``expected``.
        OSError: when the output cannot be written.
    """
    if recipe.is_witnessed and _copy_witnessed(recipe, out, progress):
        return
    with _Follower(out, os.lseek(out, 0, os.SEEK_END), progress) as follower:
        writer = _Writer(out, follower)
        for part in recipe.segments:
            if isinstance(part, bytes):
                writer.write(part)
            elif isinstance(part, RemoteBlob):
                for chunk in part.fetch():
                    writer.write(chunk)
            else:
                with unchanging(part) as fd:
                    _append_file(part, fd, writer)
        writer.flush()
        found = follower.finish()
    if (found, recipe.size) != (expected.sha256, expected.size):
        raise WrongLayerError(recipe, expected, found)


def _copy_witnessed(recipe: Recipe, out: int, progress: Progress | None) -> bool:
    """Append what this run has hashed; return False, with nothing appended, where the kernel cannot copy."""
    start = os.lseek(out, 0, os.SEEK_END)
    report = progress or (lambda _: None)
    for part in recipe.segments:
        if isinstance(part, bytes):
            _write_all(out, part)
            report(len(part))
        elif isinstance(part, HostFile):
            left = part.size
            with unchanging(part) as fd:  # and still in the state that it was hashed in
                while left and (count := _copy_step(fd, out, part.size - left, left)):
                    left -= count
                    report(count)
            if left:
                report(start - os.lseek(out, 0, os.SEEK_CUR))
                os.ftruncate(out, start)
                return False
    return True


def _copy_step(fd: int, out: int, start: int, size: int) -> int:
    """Let the kernel append up to `COPY_STEP` bytes; return how many it did, 0 where it cannot."""
    try:
        return os.copy_file_range(fd, out, min(size, COPY_STEP), start)
    except OSError as error:
        if error.errno not in _COPY_UNSUPPORTED:
            raise
        return 0


def _write_all(out: int, data: bytes | bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(out, view[done:])


def _is_copied(source: HostFile) -> bool:
    # A file with a digest of its own must pass through here; a small one is not worth calls of its own.
    return not source.sha256 and source.size >= CHUNK


def _append_file(source: HostFile, fd: int, writer: _Writer) -> None:
    done = 0
    if _is_copied(source):
        done = writer.copy(fd, source.start, source.size)
        os.lseek(fd, source.start + done, os.SEEK_SET)
    for chunk in _file_chunks(source, fd, done):
        writer.write(chunk)


def _file_chunks(source: HostFile, fd: int, start: int = 0) -> Iterator[memoryview]:
    """Yield the range from its current position, ``start`` bytes in, to its end; check its digest."""
    buffer = memoryview(bytearray(min(CHUNK, source.size) or 1))
    digest = hashlib.sha256()
    left = source.size - start
    while left:
        count = os.readv(fd, [buffer[: min(len(buffer), left)]])
        if count == 0:
            raise changed(source, "is shorter than it was")
        left -= count
        if source.sha256:
            digest.update(buffer[:count])
        yield buffer[:count]
    if source.sha256 and digest.hexdigest() != source.sha256:
        raise changed(source, f"needs sha256 {source.sha256}, found {digest.hexdigest()}")


class _Writer:
    """Appends to a file: small pieces gathered, large files copied by the kernel; keeps the hash informed."""

    def __init__(self, out: int, follower: _Follower) -> None:
        self._out = out
        self._follower = follower
        self._pending = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        self._pending += data
        if len(self._pending) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Hand what was gathered to the system."""
        _write_all(self._out, self._pending)
        self._pending.clear()
        self._follower.advance()

    def copy(self, fd: int, start: int, size: int) -> int:
        """Let the kernel append ``size`` bytes of ``fd``; return how many it did, fewer where it cannot."""
        self.flush()
        done = 0
        while done < size and (count := _copy_step(fd, self._out, start + done, size - done)):
            done += count
            self._follower.advance()
        return done


class _Follower:
    """Hashes a growing file in a thread, just behind the writer, so that it reads from the page cache."""

    def __init__(self, fd: int, start: int, progress: Progress | None) -> None:
        self._fd = fd
        self._position = start
        self._progress = progress
        self._ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="layer-hash", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._ends.put(None)
        self._thread.join()

    def advance(self) -> None:
        """Say that everything before the file's current position is written."""
        self._ends.put(os.lseek(self._fd, 0, os.SEEK_CUR))

    def finish(self) -> str:
        """Wait for the hash of all that was written and return it in hex."""
        self._ends.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def _run(self) -> None:
        buffer = memoryview(bytearray(CHUNK))
        try:
            while (end := self._ends.get()) is not None:
                self._hash_to(end, buffer)
        except OSError as error:
            self._error = error

    def _hash_to(self, end: int, buffer: memoryview) -> None:
        while self._position < end and not self._stopped:
            count = os.preadv(self._fd, [buffer[: min(len(buffer), end - self._position)]], self._position)
            if count == 0:
                raise OSError(errno.EIO, "the output is shorter than what was written to it")
            self._digest.update(buffer[:count])
            self._position += count
            if self._progress:
                self._progress(count)
