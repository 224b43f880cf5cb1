"""Answers `/health` from the first moment, while the server is still being imported.

Only that probe is answered here. Every other connection is held, with nothing of it read, and goes to
the server as soon as there is one.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading

_PROBES = (b"GET /health ", b"GET /v2/health/live ")
_PEEK = max(map(len, _PROBES))
_MOST_HELD = 256
"""More connections than these stay in the kernel's queue."""
_HEAD_BYTES = 1 << 16
_SWITCH_SECONDS = 0.0002
"""Each of its calls gives up the interpreter, which imports hold for 5 ms unless told otherwise."""
_CLIENT = "client"
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n"
    b'connection: close\r\n\r\n{"status":"ok"}'
)


class Porter:
    """A thread that owns the listening socket until `leave`."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._held: list[socket.socket] = []
        self._ends = socket.socketpair()
        self._usual_switch = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._work, name="porter", daemon=True)
        self._thread.start()

    def leave(self) -> list[socket.socket]:
        """Stop, and return the connections that wait for the server."""
        self._ends[0].close()
        self._thread.join()
        self._ends[1].close()
        sys.setswitchinterval(self._usual_switch)
        return self._held

    def _work(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._ends[1], selectors.EVENT_READ)
            waiting.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select():
                    found = key.fileobj
                    assert isinstance(found, socket.socket)
                    if found is self._ends[1]:
                        silent = [item.fileobj for item in waiting.get_map().values() if item.data == _CLIENT]
                        self._held += [item for item in silent if isinstance(item, socket.socket)]
                        return
                    if found is self._listener:
                        self._accept(waiting)
                    else:
                        waiting.unregister(found)
                        self._look(found)

    def _accept(self, waiting: selectors.BaseSelector) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone away again
            return
        client.setblocking(False)
        waiting.register(client, selectors.EVENT_READ, _CLIENT)
        if len(waiting.get_map()) + len(self._held) > _MOST_HELD:
            waiting.unregister(self._listener)

    def _look(self, client: socket.socket) -> None:
        """Answer a probe; hold what is anything else, or has not said it in one go."""
        try:
            begin = client.recv(_PEEK, socket.MSG_PEEK)
            if not begin.startswith(_PROBES):
                self._held.append(client)
                return
            client.recv(_HEAD_BYTES)
            client.send(_ANSWER)
        except OSError:
            pass
        client.close()
