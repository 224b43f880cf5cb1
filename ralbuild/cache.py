"""`.ral_cache`: compiled outputs by the digest of their inputs, re-hashed whenever they are read.

    objects/<sha256>   the bytes, named by their own digest
    index/<key>.json   key -> outputs, each with SHA-256 and size

Nothing in it is believed. An entry that is damaged, swapped, linked elsewhere or writable by others is
computed again with a note. Writers put a complete file in place by renaming it, so two builds can
share the folder and a killed one leaves nothing half-written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ralbuild.contract.bundle import ObjectRef
from ralbuild.contract.codec import FormatError, canonical_json, parse_json, sha256_hex
from ralbuild.errors import CacheError

SCHEMA = "ralbuild.cache/1"
MAX_INDEX_BYTES = 1 << 20
MAX_OBJECT_BYTES = 1 << 32
_PARTIAL = ".partial-"


class Notes(Protocol):
    """Where the cache says what it could not use."""

    def note(self, text: str) -> None:
        """Say what the user should know."""


class _UnusableError(Exception):
    """An entry cannot be used; the text says why."""


class Cache:
    """A folder of outputs; see the module's text.

    Where the folder cannot be trusted or written to, outputs are kept in memory for this run, so a
    build never fails by its cache alone.
    """

    def __init__(self, root: Path, report: Notes, *, writes: bool = True) -> None:
        """Open or create the cache.

        Args:
            root: the folder, usually ``.ral_cache`` beside the config.
            report: where it says what it could not use.
            writes: without, what is there is read, and what is new is kept in memory: for a dry run.

        Raises:
            CacheError: when the folder cannot be created or is no folder.
        """
        self.root = root
        self.report = report
        self._memory: dict[str, bytes] = {}
        self._index: dict[str, dict[str, ObjectRef]] = {}
        self._write_failed = False
        self._writes = writes
        self.trusted = self._prepare()

    def fetch(
        self,
        key: str,
        miss: Callable[[], Mapping[str, bytes]],
        label: str,
        accept: Callable[[Mapping[str, bytes]], bool] | None = None,
    ) -> Mapping[str, bytes]:
        """Return the outputs stored under ``key``, or make, store and return them.

        Args:
            key: 64 hex digits, a digest of everything that decides the outputs.
            miss: makes the outputs: name to bytes. Its errors pass through; nothing is stored then.
            label: how notes call the entry.
            accept: a test that stored outputs must pass to be used.
        """
        try:
            outputs = self._load(key)
            if outputs is not None and accept is not None and not accept(outputs):
                raise _UnusableError("it does not pass the check of what it is for")
        except _UnusableError as error:
            self.report.note(f"cache entry of {label} is not used, and made again: {error}")
            outputs = None
        if outputs is None:
            outputs = dict(miss())
            self._store(key, outputs, label)
        return outputs

    def add(self, data: bytes) -> ObjectRef:
        """Store one object and return its reference."""
        ref = ObjectRef(sha256_hex(data), len(data))
        with contextlib.suppress(_UnusableError):
            if self.trusted and self._read_object(ref) == data:
                return ref
        self._write("objects", ref.sha256, data)
        return ref

    def read(self, ref: ObjectRef) -> bytes:
        """Return an object, its digest checked.

        Raises:
            CacheError: when it is not there or not what its name says.
        """
        try:
            return self._read_object(ref)
        except _UnusableError as error:
            hint = "run the command again: what is missing is made again"
            raise CacheError(str(error), place=str(self._path("objects", ref.sha256)), hint=hint) from None

    # Reading

    def _load(self, key: str) -> dict[str, bytes] | None:
        if key in self._index:
            return {name: self._read_object(ref) for name, ref in self._index[key].items()}
        if not self.trusted:
            return None
        try:
            data = _read_file(self._path("index", f"{key}.json"), MAX_INDEX_BYTES)
        except FileNotFoundError:
            return None
        return {name: self._read_object(ref) for name, ref in _parse_index(data, key).items()}

    def _read_object(self, ref: ObjectRef) -> bytes:
        if ref.sha256 in self._memory:
            return self._memory[ref.sha256]
        if not self.trusted:
            raise _UnusableError("the object is not there")
        try:
            data = _read_file(self._path("objects", ref.sha256), ref.size)
        except FileNotFoundError:
            raise _UnusableError("the object is not there") from None
        found = sha256_hex(data)
        if len(data) != ref.size or found != ref.sha256:
            raise _UnusableError(
                f"needs {ref.size} bytes with SHA-256 {ref.sha256}, found {len(data)} with {found}"
            )
        return data

    # Writing

    def _store(self, key: str, outputs: Mapping[str, bytes], label: str) -> None:
        refs = {name: self.add(data) for name, data in outputs.items()}
        self._index[key] = refs
        entry = {
            "schema": SCHEMA,
            "key": key,
            "label": label,
            "files": {name: {"sha256": ref.sha256, "size": ref.size} for name, ref in refs.items()},
        }
        text = canonical_json({"entry": entry, "sha256": sha256_hex(canonical_json(entry))})
        self._write("index", f"{key}.json", text)

    def _write(self, folder: str, name: str, data: bytes) -> None:
        """Put a whole file in place, or keep an object in memory when the disk does not take it."""
        if self.trusted and self._writes:
            try:
                place = self._path(folder, name)
                if place.is_dir() and not place.is_symlink():
                    shutil.rmtree(place)  # no build leaves one; it would block the name for good
                _replace(place, data)
                return
            except OSError as error:
                if not self._write_failed:
                    self.report.note(f"the cache cannot be written: {error.strerror}")
                self._write_failed = True
        if folder == "objects":
            self._memory[name] = data

    # The folder

    def _path(self, folder: str, name: str) -> Path:
        return self.root / folder / name

    def _prepare(self) -> bool:
        """Create the folders; tell whether all of them are ours alone."""
        for folder in (self.root, self.root / "objects", self.root / "index"):
            try:
                if not self._writes and not os.path.lexists(folder):
                    return False
                if self._writes:
                    folder.mkdir(mode=0o700, parents=folder == self.root, exist_ok=True)
                reason = _distrust(folder.lstat())
            except OSError as error:
                raise CacheError(
                    f"cannot be created: {error.strerror}",
                    place=str(folder),
                    hint="free the name or the disk, or choose another folder",
                ) from None
            if reason:
                self.report.note(f"the cache is not used in this run: {folder} {reason}")
                return False
        if self._writes:
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Remove what killed builds left: partial files whose process is gone."""
        for path in self.root.glob(f"*/{_PARTIAL}*"):
            process = path.name.removeprefix(_PARTIAL).split("-")[0]
            if not Path("/proc", process).exists():
                with contextlib.suppress(OSError):  # a folder, which no build leaves
                    path.unlink()


def _distrust(found: os.stat_result) -> str:
    """Return why a folder or file could have been written by others; empty when it could not."""
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if found.st_mode & 0o022:
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _read_file(path: Path, limit: int) -> bytes:
    """Read at most ``limit`` + 1 bytes of a regular file of ours; never follow a link or wait on a pipe."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _UnusableError(f"{path.name} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(handle)
        reason = _distrust(found)
        if reason or not stat.S_ISREG(found.st_mode):
            raise _UnusableError(f"{path.name} {reason or 'is not a regular file'}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(min(limit, found.st_size) + 1)
    finally:
        os.close(handle)


def _parse_index(data: bytes, key: str) -> dict[str, ObjectRef]:
    """Return the outputs that an index file names; it must be the one for ``key``."""
    try:
        text: Any = parse_json(data, "index")
        entry = text["entry"]
        if sha256_hex(canonical_json(entry)) != text["sha256"]:
            raise _UnusableError("the index is damaged")
        if entry["schema"] != SCHEMA or entry["key"] != key:
            raise _UnusableError(f"the index is that of another key or format: {entry['label']!r}")
        refs = {str(name): ObjectRef(item["sha256"], item["size"]) for name, item in entry["files"].items()}
    except (FormatError, KeyError, TypeError, AttributeError) as error:
        raise _UnusableError(f"the index is not readable ({type(error).__name__})") from None
    for ref in refs.values():
        if not _is_digest(ref.sha256) or type(ref.size) is not int or not 0 <= ref.size <= MAX_OBJECT_BYTES:
            raise _UnusableError("the index names something that is no object")
    return refs


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and not set(text) - set("0123456789abcdef")


def _replace(path: Path, data: bytes) -> None:
    """Write ``data`` under a name of its own in the same folder, then rename it into place."""
    partial = path.with_name(f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(8)}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
