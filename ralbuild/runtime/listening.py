"""The socket that clients connect to: TCP, or a path in the file system."""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path

from ralbuild.runtime.errors import HostUnfitError
from ralbuild.runtime.settings import Settings

_BACKLOG = 2048


def bind(settings: Settings) -> socket.socket:
    """Return a listening socket; connections made from now on wait until the loop runs.

    Raises:
        HostUnfitError: when the address cannot be had.
    """
    if settings.socket_path:
        return _bind_path(Path(settings.socket_path))
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise HostUnfitError(f"cannot listen: {error}", place=f"{settings.host}:{settings.port}") from None
    return listener


def _bind_path(path: Path) -> socket.socket:
    """Listen on a path; everybody who can reach its folder may connect, as with a port."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise HostUnfitError(f"cannot listen: {error}", place=f"unix:{path}") from None
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket that an ended process left; one that answers, and any other file, stays."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def unbind(settings: Settings) -> None:
    """Remove the socket's path; a port needs nothing."""
    if settings.socket_path:
        Path(settings.socket_path).unlink(missing_ok=True)
