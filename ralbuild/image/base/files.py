"""File habits of the base builder: one lock a folder, whole files or none, the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ralbuild.digests import cache_root, make_cache_folder, open_regular
from ralbuild.errors import HostError


def cache_dir() -> Path:
    """Return the user's cache, `ralbuild.digests.cache_root`; it may not exist yet.

    Raises:
        HostError: for a user without a home.
    """
    root = cache_root()
    if root is None:
        raise HostError("this user has no home folder to keep a cache in", hint="set XDG_CACHE_HOME")
    return root


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; waits for another process, and the kernel releases it if this one dies."""
    make_cache_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
