"""The one read of a weight file: digests, a look at its values, and the layer written as it is hashed.

A weight file is known by the SHA-256 of the tar layer that will hold it: one hash of each byte. Its own
SHA-256 is computed in the same read where somebody asks for it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ralbuild.contract.tarball import WeightLayer
from ralbuild.digests.cache import DigestCache, StatKey, is_racy, open_regular
from ralbuild.errors import WeightsError

CHUNK = 1 << 20
"""Bytes per read; two such buffers are all the memory that a scan takes."""

_VERDICT_LIMIT = 48 << 10
"""A longer verdict is that of a badly broken file, and is worked out again rather than kept."""


class Observer(Protocol):
    """Sees every byte of a file in the read that hashes it, and comes to a verdict.

    Attributes:
        kind: names what it looks for and in which version; a remembered verdict of another kind
            does not count.
    """

    kind: str

    def feed(self, chunk: memoryview) -> None:
        """Take the next bytes; the memory is only valid during the call."""

    def verdict(self) -> str:
        """Return the result as text, once the last byte was fed."""


class LayerCopy(Protocol):
    """Takes a layer's bytes in their order, as they are hashed; it does not fail."""

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes; the memory is only valid during the call."""

    def close(self, sha256: str) -> None:
        """Take the digest of all that was written, or an empty text when it is not a layer after all."""


class LayerCopies(Protocol):
    """Where layers are copied to in the read that hashes them."""

    def open(self, source: Path, size: int) -> LayerCopy | None:
        """Begin a layer of about ``size`` bytes, of ``source`` and its like; None when it is not wanted."""


@dataclass(frozen=True, slots=True)
class Witness:
    """That this run read a file for its layer's digest, and would see a write since then.

    Attributes:
        state: the file's while it was read.
        frame: SHA-256 of what was hashed around the layer's files: headers, paddings and end, in order.
    """

    state: StatKey
    frame: str


@dataclass(frozen=True, slots=True)
class FileDigests:
    """A weight file as scanned; digests in lowercase hex.

    Attributes:
        sha256: of the file; empty when nobody asked for it.
        layer_sha256: of the layer: header, file, trailer (see `ralbuild.contract.tarball`).
        layer_size: of that layer, in bytes.
        cached: True when the file was not read for this.
        verdict: what the observer said; empty without one.
        purpose: under which the digest cache may know them: what to `DigestCache.forget` when they are wrong.
        witness: None when the digests were remembered, or when the file changed so shortly before
            that another write may not show (`is_racy`).
    """

    sha256: str
    layer_sha256: str
    layer_size: int
    cached: bool = field(default=False, compare=False)
    verdict: str = field(default="", compare=False)
    purpose: str = field(default="", compare=False)
    witness: Witness | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes from ``start`` of a file that has ``file_size`` bytes."""

    path: Path
    start: int
    size: int
    file_size: int


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A weight file to scan.

    Attributes:
        path: where it is.
        name: its name in the image; a blob of the Hugging Face cache is stored under its digest.
        observer: fed every byte in the same read; its verdict is remembered with the digests.
        own: compute the file's own SHA-256 too.
    """

    path: Path
    name: str
    observer: Observer | None = None
    own: bool = False


def scan_file(
    path: Path,
    cache: DigestCache,
    mtime: int,
    progress: Callable[[int], None] | None = None,
    *,
    rehash: bool = False,
    observer: Observer | None = None,
    own: bool = False,
) -> FileDigests:
    """Return the digests of a weight file that has a layer of its own; see `scan_layer` and `LayerFile`."""
    file = LayerFile(path, path.name, observer, own)
    return scan_layer((file,), cache, mtime, progress, rehash=rehash)[0]


def scan_layer(
    files: Sequence[LayerFile],
    cache: DigestCache,
    mtime: int,
    progress: Callable[[int], None] | None = None,
    *,
    rehash: bool = False,
    copies: LayerCopies | None = None,
    is_idle: Callable[[], bool] = lambda: True,
) -> tuple[FileDigests, ...]:
    """Return the digests of weight files that share a layer, reading each at most once.

    Args:
        files: in the order of the layer.
        cache: where to look first and to remember the result.
        mtime: time of the layer's entries, in seconds since 1970.
        progress: called with the number of bytes of each step; a cache hit counts as one step.
        rehash: read the files even when the cache knows them.
        copies: takes the layer's bytes when they are read.
        is_idle: tells whether there is a processor for a second thread; asked for each step.

    Raises:
        WeightsError: when one cannot be read, is not a regular file, or changes meanwhile; its place is
            the file's path.
    """
    report = progress or (lambda _: None)
    names = "/".join(file.name for file in files)
    # What a file is remembered for depends on its neighbours: they share the layer's digest.
    place = "" if len(files) == 1 else ":{}"
    purposes = [f"weight-layer:{names}{place.format(at)}:{mtime}" for at in range(len(files))]
    if not rehash:
        known = [_remembered(file, cache, purpose) for file, purpose in zip(files, purposes, strict=True)]
        found = tuple(item for item in known if item is not None)
        # Equal digests of the layer mean that all were remembered together, in these states.
        if len(found) == len(files) and len({item.layer_sha256 for item in found}) == 1:
            for file in files:
                report(file.path.stat().st_size)
            return found
    layer, frame = _Layer(_begin_copy(files, copies)), _Frame(mtime)
    try:
        read = [_read_once(file, layer, frame, report, is_idle) for file in files]
        layer.update(frame.end())
    except BaseException:
        layer.close(good=False)
        raise
    layer.close(good=True)
    return _remember(files, purposes, read, layer.digest.hexdigest(), frame, cache)


def _begin_copy(files: Sequence[LayerFile], copies: LayerCopies | None) -> LayerCopy | None:
    if copies is None:
        return None
    try:
        return copies.open(files[0].path, sum(file.path.stat().st_size for file in files))
    except OSError:
        return None  # the read says what is wrong


def _remember(
    files: Sequence[LayerFile],
    purposes: Sequence[str],
    read: Sequence[tuple[StatKey, int, str]],
    layer_sha256: str,
    frame: _Frame,
    cache: DigestCache,
) -> tuple[FileDigests, ...]:
    """Return what was found of the files, and keep it for the next run where that is safe."""
    around = frame.digest.hexdigest()
    digests = []
    for file, purpose, (key, started, sha256) in zip(files, purposes, read, strict=True):
        verdict = file.observer.verdict() if file.observer is not None else ""
        values = {"layer_sha256": layer_sha256, "layer_size": str(frame.size)}
        if file.own:
            values["sha256"] = sha256
        if file.observer is not None:
            values |= {"observer": file.observer.kind, "verdict": verdict}
        witness = None if is_racy(key, started) else Witness(key, around)
        if witness is not None and len(verdict) <= _VERDICT_LIMIT:
            cache.put(file.path, purpose, key, values)
        item = FileDigests(sha256, layer_sha256, frame.size, verdict=verdict, purpose=purpose)
        digests.append(replace(item, witness=witness))
    return tuple(digests)


class _Layer:
    """The hash of a layer, and the copy of what is hashed."""

    def __init__(self, copy: LayerCopy | None) -> None:
        self.digest = hashlib.sha256()
        self.copy = copy

    def update(self, data: bytes) -> None:
        """Take what lies around the files."""
        self.digest.update(data)
        if self.copy is not None:
            self.copy.write(data)

    def close(self, *, good: bool) -> None:
        if self.copy is not None:
            self.copy.close(self.digest.hexdigest() if good else "")


class _Frame(WeightLayer):
    """A layer's frame that remembers the digest of what it gave out."""

    def __init__(self, mtime: int) -> None:
        super().__init__(mtime)
        self.digest = hashlib.sha256()

    def start(self, name: str, size: int) -> bytes:
        before = super().start(name, size)
        self.digest.update(before)
        return before

    def end(self) -> bytes:
        after = super().end()
        self.digest.update(after)
        return after


def _remembered(file: LayerFile, cache: DigestCache, purpose: str) -> FileDigests | None:
    try:
        key = StatKey.of(file.path.stat())
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=str(file.path)) from None
    values: dict[str, Any] | None = cache.get(file.path, purpose, key)
    observer = file.observer
    if values is None or (observer is not None and values.get("observer") != observer.kind):
        return None
    try:
        return FileDigests(
            values["sha256"] if file.own else "",
            values["layer_sha256"],
            int(values["layer_size"]),
            cached=True,
            verdict=values["verdict"] if observer is not None else "",
            purpose=purpose,
        )
    except (KeyError, ValueError):
        return None


def _read_once(
    file: LayerFile,
    layer: _Layer,
    frame: WeightLayer,
    report: Callable[[int], None],
    is_idle: Callable[[], bool],
) -> tuple[StatKey, int, str]:
    """Read a file into the layer's hash; return its state, the time before, and its own SHA-256 if asked."""
    started = time.time_ns()
    try:
        with open_regular(file.path) as opened:
            fd = opened.fileno()
            key = StatKey.of(os.fstat(fd))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            layer.update(frame.start(file.name, key.size))
            sha256 = _hash_through(fd, key.size, layer, report, file, is_idle)
            if StatKey.of(os.fstat(fd)) != key:
                raise WeightsError(
                    "changed while it was read", place=str(file.path), hint="build from files at rest"
                )
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=str(file.path)) from None
    return key, started, sha256


def _hash_through(
    fd: int,
    size: int,
    layer: _Layer,
    report: Callable[[int], None],
    file: LayerFile,
    is_idle: Callable[[], bool],
) -> str:
    """Feed every byte to the layer's hash in this thread (hashlib releases the GIL), and to what else looks.

    All else (the copy, the file's own hash, the observer) is done while the bytes are still in the
    processor's cache: by a helper where a processor is idle, else after the hash, for handing a megabyte
    from thread to thread costs more than it gains there.
    """
    whole = hashlib.sha256() if file.own else None
    buffers = (memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK)))
    pending: Future[None] | None = None
    done = turn = 0

    def look(chunk: memoryview) -> None:
        if layer.copy is not None:
            layer.copy.write(chunk)
        if whole is not None:
            whole.update(chunk)
        if file.observer is not None:
            file.observer.feed(chunk)

    with ThreadPoolExecutor(max_workers=1) as helper:
        while done < size:
            buffer = buffers[turn]
            count = os.readv(fd, [buffer[: min(CHUNK, size - done)]])
            if count == 0:
                break  # shorter than it was; the caller sees the changed state
            if pending is not None:
                pending.result()  # the other buffer is free for the next read
            pending = helper.submit(look, buffer[:count]) if is_idle() else None
            layer.digest.update(buffer[:count])
            if pending is None:
                look(buffer[:count])
            done += count
            turn ^= 1
            report(count)
        if pending is not None:
            pending.result()
    return whole.hexdigest() if whole is not None else ""
