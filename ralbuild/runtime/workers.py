"""Starting a worker process and ending it: the only place of the supervisor that knows about processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from ralbuild.runtime.errors import WorkerLostError
from ralbuild.runtime.memory import resident

MAX_DEATHS = 5
"""Workers in a row that may die before they have served for `STEADY_SECONDS`."""
STEADY_SECONDS = 60.0
BACK_OFF = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Seconds before the first, second, ... restart in a row."""
_LINE_BYTES = 1 << 20
"""Buffer of the socket: the decode loop writes into it and must not wait for the event loop."""


class WorkerProcess:
    """One ``python -m ralbuild.runtime.worker`` and this end of the socket to it."""

    def __init__(self) -> None:
        """Start the process; it begins to load at once."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINE_BYTES)
            # A session of its own: Ctrl-C in a terminal must not end it before its requests.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ralbuild.runtime.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def resident(self) -> dict[str, int]:
        """Return its resident bytes by kind."""
        return dict(resident(self.pid))

    def end(self) -> int:
        """End the process if it still runs; return its exit status, negative for a signal.

        By SIGKILL: it has nothing to save, and a decode step in a C library cannot be interrupted.
        """
        self._process.kill()
        status = self._process.wait()
        self.connection.close()
        return status

    def wait(self, seconds: float) -> int:
        """Return the exit status; a process that is not gone within ``seconds`` is ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.end()


class Deaths:
    """Workers that died one after the other."""

    def __init__(self) -> None:
        self._row = 0

    def pause(self, lived: float, how: str) -> float:
        """Count one that served for ``lived`` seconds; return the seconds to wait before the next.

        Raises:
            WorkerLostError: when too many died in a row; it says ``how`` the last one did.
        """
        if lived > STEADY_SECONDS:
            self._row = 0
        if self._row == MAX_DEATHS:
            reason = f"died {MAX_DEATHS + 1} times in a row, the last time by {how}"
            raise WorkerLostError(reason, place="worker")
        self._row += 1
        return BACK_OFF[self._row - 1]


def reap_orphans(worker: WorkerProcess | None) -> None:
    """Collect ended children other than ``worker``, whose status its own `WorkerProcess` wants."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if worker is not None and found.si_pid == worker.pid:
                return
            os.waitpid(found.si_pid, 0)
