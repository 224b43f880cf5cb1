"""The server loop: binds at once, drains on SIGTERM, then ends. The only door to uvicorn."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ralbuild.runtime.app import Api
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.log import log_event

HEAD_SECONDS = 60.0
"""How long a request's first line and headers may take."""
_LAST_SECONDS = 3.0
"""After the drain: time for the loop to end what is cut short."""
_ERROR_SECONDS = 0.5
"""After the drain: time for the error that cut streams end with."""
_SHUT_DOWN = ApiError(503, "shut_down", "the server ended before the answer did", retry_after=1)


class _Bridge(logging.Handler):
    """uvicorn's warnings as lines of ours: one line each, no trace."""

    def emit(self, record: logging.LogRecord) -> None:
        log_event("server", level=record.levelname.lower(), message=record.getMessage().strip())


class Protocol(H11Protocol):
    """HTTP/1.1 on one connection, closed when a request's head does not come in time.

    uvicorn looks at the time between two requests only, and a single byte ends that: connections that say
    nothing, or a byte now and then, would stay for ever and use up the descriptors.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Read; the time of a head that has begun goes on, a complete one stops it."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._stop_watch()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watch()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """uvicorn with a drain: signals stop the intake, and the loop ends when the last answer is out.

    uvicorn's own shutdown would tell running streams that their client is gone.
    """

    def __init__(
        self, api: Api, drain_seconds: int, waiting: Callable[[], Sequence[socket.socket]] = tuple
    ) -> None:
        """Serve ``api``; ``waiting`` gives the connections that were accepted before the server was there."""
        config = uvicorn.Config(
            api,
            loop="asyncio",
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        logger = logging.getLogger("uvicorn.error")
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        logger.handlers = [_Bridge()]
        self._api = api
        self._waiting = waiting
        self._drain_seconds = drain_seconds
        self._deadline = 0.0
        self._cut = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and to follow the worker."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        for client in self._waiting():
            await loop.connect_accepted_socket(self._protocol, client)
        self._api.supervisor.begin()

    def _protocol(self) -> asyncio.Protocol:
        """Return what speaks HTTP on one connection, as uvicorn makes it for those that it accepts."""
        kind: Any = self.config.http_protocol_class
        state = self.server_state
        protocol: asyncio.Protocol = kind(config=self.config, server_state=state, app_state={})
        return protocol

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends what runs without waiting."""
        if self._api.lifecycle.draining:
            self._deadline = 0.0
            return
        self._api.lifecycle.draining = True
        self._deadline = time.monotonic() + self._drain_seconds
        # Should anything keep the loop from ending, the process ends all the same.
        last = threading.Timer(self._drain_seconds + _LAST_SECONDS, os._exit, [0])
        last.daemon = True
        last.start()
        log_event("draining", signal=sig, in_flight=self._api.in_flight)

    async def on_tick(self, counter: int) -> bool:
        """Called every 0.1 s: ends the loop once the drain is over or the start has failed."""
        if self._api.lifecycle.failure is not None:
            self.should_exit = True
        if self._api.lifecycle.draining:
            late = time.monotonic() - self._deadline
            if late > 0 and self._api.in_flight and not self._cut:
                self._cut = True
                log_event("drain cut short", in_flight=self._api.in_flight)
                self._api.supervisor.abandon(_SHUT_DOWN)
            # What is left after that moment has a client that does not read.
            self.force_exit = self._cut and late > _ERROR_SECONDS
            self.should_exit = self.force_exit or not self._api.in_flight
        return await super().on_tick(counter)
