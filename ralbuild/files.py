"""Small files that other processes may read at any time: replaced whole or left as they were."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, durable: bool = False, mode: int | None = None) -> None:
    """Write ``data`` to ``path`` so that a reader sees all of it or what was there before.

    Args:
        path: of the file; its folder must be there.
        data: all of its bytes.
        durable: return only when the disk has them.
        mode: permissions, whatever the umask; None leaves them to it.

    Raises:
        OSError: when it cannot be written; nothing of it is left.
    """
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
