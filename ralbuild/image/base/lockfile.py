"""The lock of the runtime's Python packages: pip's requirements format, every line exact and hashed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ralbuild.contract.codec import sha256_hex
from ralbuild.digests import open_regular
from ralbuild.errors import ImageError

LOCK_NAME = "base-{target}.lock"
_MAX_LOCK_BYTES = 1 << 20
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)(?P<hashes>.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_SIZE = re.compile(r"# (\d{1,3}(?:,\d{3}){0,4}) bytes")
"""A comment to pip; it speaks of the package in the next line."""


@dataclass(frozen=True, slots=True)
class LockedWheel:
    """One package.

    Attributes:
        name: normalised.
        version: exact.
        sha256: in hex, of each wheel that may be used.
        size: of that wheel in bytes; 0 where the lock does not say.
    """

    name: str
    version: str
    sha256: tuple[str, ...]
    size: int = 0


@dataclass(frozen=True, slots=True)
class Lock:
    """A parsed lock, sorted by name; ``sha256`` is the digest of its text."""

    wheels: tuple[LockedWheel, ...]
    sha256: str

    def version(self, name: str) -> str:
        """Return the locked version of ``name``, or raise KeyError."""
        return {wheel.name: wheel.version for wheel in self.wheels}[name]


@dataclass(frozen=True, slots=True)
class Work:
    """What making a part of an image takes.

    Attributes:
        part: what it is.
        packages: how many locked packages go into it.
        download: their bytes, as far as the lock says them; those in the user's cache are not fetched again.
        room: bytes of disk that it takes meanwhile.
    """

    part: str
    packages: int
    download: int
    room: int


def work_of(part: str, lock: Lock, room: int) -> Work:
    """Return what making ``part`` from the packages of ``lock`` takes."""
    return Work(part, len(lock.wheels), sum(wheel.size for wheel in lock.wheels), room)


def load_lock(target: str) -> Lock:
    """Return the lock that ships with ralbuild for ``target`` (``cpu``, ``cuda``)."""
    return read_lock(shipped_lock(target))


def shipped_lock(target: str) -> Path:
    """Return where the lock of ``target`` lies in this installation."""
    return Path(str(resources.files("ralbuild").joinpath("data", LOCK_NAME.format(target=target))))


def read_lock(path: Path) -> Lock:
    """Return the lock in the file ``path``.

    Raises:
        ImageError: when it cannot be read, or as `parse_lock`.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_LOCK_BYTES + 1)
        if len(data) > _MAX_LOCK_BYTES:
            raise ImageError(f"a lock has at most {_MAX_LOCK_BYTES} bytes", place=str(path))
        return parse_lock(data.decode("utf-8"), path.name)
    except OSError as error:
        raise ImageError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except UnicodeDecodeError:
        raise ImageError("is not text in UTF-8", place=str(path)) from None


def parse_lock(text: str, where: str) -> Lock:
    """Parse a lock.

    Raises:
        ImageError: naming the first line that is not ``name==version`` with a SHA-256.
    """
    wheels: list[LockedWheel] = []
    size = 0
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            said = _SIZE.fullmatch(line)
            size = int(said[1].replace(",", "")) if said else size
            continue
        found = _REQUIREMENT.fullmatch(line.strip())
        hashes = tuple(_HASH.findall(found["hashes"])) if found else ()
        if found is None or not hashes:
            raise ImageError(f"needs name==version --hash=sha256:..., found {line.strip()!r}", place=where)
        wheels.append(LockedWheel(normalised(found["name"]), found["version"], hashes, size))
        size = 0
    if not wheels:
        raise ImageError("the lock is empty", place=where)
    names = [wheel.name for wheel in wheels]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ImageError(f"the lock names {twice[0]} twice", place=where)
    return Lock(tuple(sorted(wheels, key=lambda wheel: wheel.name)), sha256_hex(text.encode()))


def format_lock(wheels: Iterable[LockedWheel], comment: str) -> str:
    """Return the text of a lock, sorted by name; ``comment`` lines start with ``#``."""
    lines = [comment.rstrip("\n")]
    for wheel in sorted(wheels, key=lambda wheel: wheel.name):
        if wheel.size:
            lines.append(f"# {wheel.size:,} bytes")
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted(wheel.sha256)]
        lines.append(" \\\n".join([f"{wheel.name}=={wheel.version}", *hashes]))
    return "\n".join(lines) + "\n"


def normalised(name: str) -> str:
    """Return a project name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
