"""What the writer asks of this machine's disk: sources that stay the same, room, and locked outputs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ralbuild.digests import StatKey, open_regular
from ralbuild.errors import HostError, ImageError
from ralbuild.image.plan import HostFile

Note = Callable[[str], None]
"""Tells the user one line."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FICLONE = 0x40049409  # linux/fs.h


@contextlib.contextmanager
def unchanging(source: HostFile) -> Iterator[int]:
    """Open ``source`` for reading and, at the end, make sure that it stayed what it was.

    Yields:
        A file descriptor at the range's start.

    Raises:
        ImageError: when it cannot be read, is no regular file, has another size, or changed meanwhile.
    """
    place = str(source.path)
    try:
        file = open_regular(source.path)
    except OSError as error:
        raise ImageError(f"cannot be read: {error.strerror}", place=place) from None
    with file:
        fd = file.fileno()
        before = os.fstat(fd)
        needed = source.size if source.is_whole else source.file_size
        if before.st_size != needed:
            raise changed(source, f"needs {needed} bytes, found {before.st_size}")
        if source.witness is not None and source.witness.state != StatKey.of(before):
            raise changed(source, "was written to or replaced after it was hashed")
        os.lseek(fd, source.start, os.SEEK_SET)
        yield fd
        if StatKey.of(os.fstat(fd)) != StatKey.of(before):
            raise changed(source, "was written to meanwhile")


def changed(source: HostFile, what: str) -> ImageError:
    """Return the error for a source file that is not what the plan was made from."""
    return ImageError(
        f"changed while the image was being built: {what}",
        place=str(source.path),
        hint="build from files at rest, then run the command again",
    )


def check_room(folder: Path, needed: int, files: Iterable[HostFile] = ()) -> None:
    """Raise HostError when the file system of ``folder`` has less than ``needed`` bytes to give.

    Those of ``files`` that it can share with their originals (XFS, Btrfs) need no room.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        needed -= sum(file.size for file in files if can_share(file.path, folder))
    if needed > free:
        raise _full(folder, needed, free)


def can_share(source: Path, folder: Path) -> bool:
    """Tell whether a file in ``folder`` can have the same extents as ``source``, by doing it for a moment."""
    try:
        with source.open("rb") as file, tempfile.TemporaryFile(dir=folder) as clone:
            fcntl.ioctl(clone.fileno(), _FICLONE, file.fileno())
    except OSError:
        return False
    return True


@contextlib.contextmanager
def host_errors(folder: Path, needed: int) -> Iterator[None]:
    """Turn a failed write below ``folder`` into HostError; ``needed`` is the whole job in bytes."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _full(folder, needed, shutil.disk_usage(folder).free) from None
        place = error.filename or folder
        raise HostError(f"cannot write: {error.strerror}", place=os.fsdecode(place)) from None


def _full(folder: Path, needed: int, free: int) -> HostError:
    return HostError(
        f"the disk is too full: {needed} bytes are needed, {free} are free",
        place=str(folder),
        hint="free some space or choose an output on another disk",
    )


@contextlib.contextmanager
def locked(open_path: Callable[[], tuple[Path, int]], note: Note) -> Iterator[tuple[Path, int]]:
    """Hold the lock of an output that another build may be renaming into place.

    The lock is on the file or folder itself. Whoever got it opens the output again: when that is
    something else by then, the wait starts over with it.

    Args:
        open_path: opens what must be locked and returns its name and descriptor.
        note: told once when another build holds the lock.
    """
    waited = False
    while True:
        path, fd = open_path()
        try:
            if not try_lock(fd):
                if not waited:
                    note(f"waiting for another build that writes {path}")
                waited = True
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_still(path, fd, open_path):
                yield path, fd
                return
        finally:
            os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_place(path: Path, is_ours: Callable[[os.stat_result], bool]) -> None:
    """Remove what lies at the temporary name ``path``, left by a build of another kind or planted.

    Raises:
        HostError: when a running build holds the lock of it.
        OSError: when it cannot be removed.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if is_ours(info):
        return
    if (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)) and not can_lock(path):
        raise HostError("another build writes there", place=str(path), hint="wait for its end")
    remove_tree(path)


def can_lock(path: Path) -> bool:
    """Tell whether no running process holds the lock of a file or folder."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return try_lock(fd)
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the lock of an open file or folder unless another process holds it; tell whether it was got."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, fd: int, open_path: Callable[[], tuple[Path, int]]) -> bool:
    again_path, again = open_path()
    try:
        if again_path == path and os.path.samestat(os.fstat(fd), os.fstat(again)):
            return True
    finally:
        os.close(again)
    with contextlib.suppress(OSError):
        path.rmdir()  # an empty folder that was made while another build finished
    return False
