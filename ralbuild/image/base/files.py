"""File habits of the base builder: one lock a folder, whole files or none, the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/ralbuild`` (``~/.cache/ralbuild`` by default); it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "ralbuild"


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; waits for another process, and the kernel releases it if this one dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader sees all of it or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
