"""The lock of the runtime's Python packages: pip's requirements format, every line exact and hashed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources

from ralbuild.contract.codec import sha256_hex
from ralbuild.errors import ImageError

LOCK_NAME = "base-{target}.lock"
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)(?P<hashes>.*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class LockedWheel:
    """One package: normalised name, exact version, and the SHA-256 (hex) of each wheel that may be used."""

    name: str
    version: str
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lock:
    """A parsed lock, sorted by name; ``sha256`` is the digest of its text."""

    wheels: tuple[LockedWheel, ...]
    sha256: str

    def version(self, name: str) -> str:
        """Return the locked version of ``name``, or raise KeyError."""
        return {wheel.name: wheel.version for wheel in self.wheels}[name]


def load_lock(target: str) -> Lock:
    """Return the lock that ships with ralbuild for ``target`` (``cpu``)."""
    name = LOCK_NAME.format(target=target)
    text = resources.files("ralbuild").joinpath("data", name).read_text(encoding="utf-8")
    return parse_lock(text, name)


def parse_lock(text: str, where: str) -> Lock:
    """Parse a lock.

    Raises:
        ImageError: naming the first line that is not ``name==version`` with a SHA-256.
    """
    wheels = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _REQUIREMENT.fullmatch(line.strip())
        hashes = tuple(_HASH.findall(found["hashes"])) if found else ()
        if found is None or not hashes:
            raise ImageError(f"needs name==version --hash=sha256:..., found {line.strip()!r}", place=where)
        wheels.append(LockedWheel(normalised(found["name"]), found["version"], hashes))
    if not wheels:
        raise ImageError("the lock is empty", place=where)
    return Lock(tuple(sorted(wheels, key=lambda wheel: wheel.name)), sha256_hex(text.encode()))


def format_lock(wheels: Iterable[LockedWheel], comment: str) -> str:
    """Return the text of a lock, sorted by name; ``comment`` lines start with ``#``."""
    lines = [comment.rstrip("\n")]
    for wheel in sorted(wheels, key=lambda wheel: wheel.name):
        hashes = [f"    --hash=sha256:{digest}" for digest in sorted(wheel.sha256)]
        lines.append(" \\\n".join([f"{wheel.name}=={wheel.version}", *hashes]))
    return "\n".join(lines) + "\n"


def normalised(name: str) -> str:
    """Return a project name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
