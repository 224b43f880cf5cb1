"""Work that comes before the decode loop, in a few threads of its own: reading JSON, filters, tokenising."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ralbuild.runtime.errors import ApiError

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's way to hear from the client."""

THREADS = 2
"""Prompts prepared at once; they share one interpreter, so more would only delay the decode loop."""
MAX_PENDING = 64
"""Prompts that may be in preparation or wait for it; a body has up to 4 MiB."""


class HungUpError(Exception):
    """The client went away while its request was being prepared."""


class Preparation:
    """A bounded queue in front of `THREADS` threads. Used from the event loop only.

    The loop's default executor would hold up the end of the process until its threads are done.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self._pending: set[Future[Any]] = set()

    def require_room(self) -> None:
        """Raise ApiError 429 when as many requests are being prepared as may be."""
        if len(self._pending) >= MAX_PENDING:
            message = f"{len(self._pending)} requests are being prepared already"
            raise ApiError(429, "queue_full", message, retry_after=1)

    async def run(self, work: Callable[[], T], receive: Receive) -> T:
        """Return what ``work`` returns in a thread; its body was read, so ``receive`` tells of the end.

        Raises:
            ApiError: 429 when the queue is full, and whatever ``work`` raises.
            HungUpError: the client is gone. Work that had not begun is dropped.
        """
        self.require_room()
        future = self._threads.submit(work)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        result = asyncio.wrap_future(future)
        end = asyncio.ensure_future(_disconnected(receive))
        try:
            watched: set[asyncio.Future[Any]] = {result, end}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise HungUpError
            return result.result()
        finally:
            end.cancel()
            future.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
