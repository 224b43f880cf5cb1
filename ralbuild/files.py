"""Small files that other processes may read at any time: replaced whole or left as they were."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, durable: bool = False, mode: int | None = None) -> None:
    """Write ``data`` to ``path`` so that a reader sees all of it or what was there before.

    Args:
        path: of the file; its folder must be there. Of a symbolic link the file that it names is replaced.
        data: all of its bytes.
        durable: return only when the disk has them.
        mode: permissions, whatever the umask; None leaves them to it.

    Raises:
        OSError: when it cannot be written, or ``path`` is a device, a pipe or a folder, which must not become
            a file; nothing of it is left.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is there and is no regular file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
