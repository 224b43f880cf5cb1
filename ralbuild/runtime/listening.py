"""The socket that clients connect to: TCP, or a path in the file system. Imports little: it comes first."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Mapping

from ralbuild.contract.places import PORT
from ralbuild.runtime.errors import HostUnfitError
from ralbuild.runtime.variables import read_number

_BACKLOG = 2048
_EVERY = "0.0.0.0"  # noqa: S104 - a container serves its network
_UNIX = "unix:"


def bind(env: Mapping[str, str]) -> socket.socket:
    """Return a socket that listens where ``RAL_HOST`` and ``RAL_PORT`` say.

    Port 0 takes a free one; ``unix:/path`` is a socket file.

    Raises:
        HostUnfitError: when the address cannot be had.
    """
    host, port = env.get("RAL_HOST") or _EVERY, read_number(env, "RAL_PORT", PORT, 65535)
    if host.startswith(_UNIX):
        return _bind_path(host.removeprefix(_UNIX))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise HostUnfitError(f"cannot listen: {error}", place=f"{host}:{port}") from None
    return listener


def describe(listener: socket.socket) -> dict[str, object]:
    """Return the address as fields of a log line."""
    if listener.family == socket.AF_UNIX:
        return {"socket": listener.getsockname()}
    host, port = listener.getsockname()[:2]
    return {"host": host, "port": port}


@contextlib.contextmanager
def listening(env: Mapping[str, str]) -> Iterator[socket.socket]:
    """Yield what `bind` returns; a socket file is gone afterwards."""
    listener = bind(env)
    path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
    try:
        yield listener
    finally:
        listener.close()
        if path:
            _unlink(path)


def _bind_path(path: str) -> socket.socket:
    """Listen on a path; everybody who can reach its folder may connect, as with a port."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o666)  # noqa: PTH101, S103 - pathlib would delay the first answer
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise HostUnfitError(f"cannot listen: {error}", place=f"unix:{path}") from None
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket that an ended process left; one that answers, and any other file, stays."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            _unlink(path)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - see above
