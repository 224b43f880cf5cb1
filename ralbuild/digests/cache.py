"""Digests of files, remembered by path, device, inode, size, mtime and ctime.

The inode and ctime catch what path, size and mtime miss: a file replaced by another of the same size and
copied time. The cache never fails a build: an entry that is damaged, foreign or unwritable means that the
file is read again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pwd
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ralbuild.contract.codec import FormatError, canonical_json, from_plain, parse_json, sha256_hex, to_plain
from ralbuild.contract.tarball import PACKING

RACY_NS = 2_000_000_000
"""A file that changed this close to its hashing may change again without a new timestamp."""

_ENTRY_LIMIT = 64 << 10


@dataclass(frozen=True, slots=True)
class StatKey:
    """What tells one state of a file from another without reading it. Times in nanoseconds."""

    dev: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> StatKey:
        """Return the key of a `stat` result."""
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One remembered file: its state, what was computed from it, and a checksum over both."""

    key: StatKey
    values: dict[str, str]
    check: str


class DigestCache:
    """One small JSON file for each (real path, purpose), in ``folder``; None remembers nothing.

    Without ``writes`` nothing more is remembered, and nothing forgotten.
    """

    def __init__(self, folder: Path | None, *, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes

    def get(self, path: Path, purpose: str, key: StatKey) -> dict[str, str] | None:
        """Return what was stored for ``path`` in the state ``key``, or None."""
        place = self._place(path, purpose)
        if place is None:
            return None
        try:
            with open_regular(place, follow=False) as file:
                info = os.fstat(file.fileno())
                if info.st_uid != os.geteuid() or info.st_mode & 0o022:
                    return None
                entry = from_plain(_Entry, parse_json(file.read(_ENTRY_LIMIT), "entry"), "entry")
        except (OSError, FormatError):
            return None
        if entry.key != key or entry.check != _checksum(entry.key, entry.values):
            return None
        return entry.values

    def put(self, path: Path, purpose: str, key: StatKey, values: Mapping[str, str]) -> None:
        """Remember ``values`` for ``path`` in the state ``key``; failing to is not an error."""
        place = self._place(path, purpose)
        if place is None or not self.writes:
            return
        kept = dict(values)
        data = canonical_json(to_plain(_Entry(key, kept, _checksum(key, kept))))
        temporary = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            make_cache_folder(place.parent.parent)
            place.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(data)
            temporary.replace(place)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()

    @contextlib.contextmanager
    def across_a_link(self, path: Path, purpose: str) -> Iterator[None]:
        """Keep what is remembered of ``path`` while the caller gives it another name and ctime."""
        before = StatKey.of(path.stat())
        values = self.get(path, purpose, before)
        yield
        after = StatKey.of(path.stat())
        # A write would show in the mtime, which is long ago and stays the same.
        same = after == replace(before, ctime_ns=after.ctime_ns)
        if values is not None and same and abs(after.mtime_ns - after.ctime_ns) > RACY_NS:
            self.put(path, purpose, after, values)

    def forget(self, path: Path, purpose: str) -> None:
        """Drop what is remembered for ``path``."""
        place = self._place(path, purpose)
        if place is not None and self.writes:
            with contextlib.suppress(OSError):
                place.unlink()

    def _place(self, path: Path, purpose: str) -> Path | None:
        if self.folder is None:
            return None
        # Names of files are bytes, not always UTF-8.
        identity = b"\0".join(map(os.fsencode, (os.path.realpath(path), str(PACKING), purpose)))
        return self.folder / f"{sha256_hex(identity)}.json"


def cache_root() -> Path | None:
    """Return ``$XDG_CACHE_HOME/ralbuild``, else ``~/.cache/ralbuild``; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG specification: a relative path is ignored
        return Path(base, "ralbuild")
    home = os.environ.get("HOME") or _home_of_user()
    return Path(home, ".cache", "ralbuild") if home.startswith("/") else None


def _home_of_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def default_cache(*, writes: bool = True) -> DigestCache:
    """Return the user's cache, ``digests`` in `cache_root`, or one that remembers nothing."""
    root = cache_root()
    return DigestCache(root / "digests" if root else None, writes=writes)


def make_cache_folder(folder: Path) -> None:
    """Make ``folder`` and the missing ones above it; whatever the umask, no other user can write to them.

    Raises:
        OSError: when one cannot be made.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)


def open_regular(path: Path, *, follow: bool = True) -> io.BufferedReader:
    """Open a regular file for reading; never waits for the other end of a pipe.

    Args:
        path: the file.
        follow: take the file that a symbolic link leads to; without it a link is an error.

    Raises:
        OSError: when it cannot be opened or is something else.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(fd, "rb")


def is_racy(key: StatKey, hashed_ns: int) -> bool:
    """Tell whether a file in the state ``key``, hashed from ``hashed_ns`` on, may have changed unseen.

    A write within the clock's granularity leaves the same timestamps; git has the same rule.
    """
    return key.ctime_ns > hashed_ns - RACY_NS or abs(key.mtime_ns - hashed_ns) <= RACY_NS


def _checksum(key: StatKey, values: Mapping[str, str]) -> str:
    return sha256_hex(canonical_json(to_plain([key, values])))
