"""One request on its way through the worker, as the supervisor's process sees it."""

from __future__ import annotations

import asyncio

from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.wire import Message, pack, pack_error, unpack_error


class Ticket:
    """What the worker says about one request, in order; None when its client has hung up.

    Attributes:
        number: of the request, unique in this process.
        frame: what is to be sent to the worker; empty once it was sent.
        pending: True until the worker accepted or refused it.
    """

    def __init__(self, number: int, message: Message, body: bytes) -> None:
        self.number = number
        self.frame = pack(message, body)
        self.pending = True
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()

    def put(self, message: Message | None) -> None:
        """Add what was said."""
        self._said.put_nowait(message)

    async def take(self) -> Message | None:
        """Return what comes next; raises ApiError when the request was refused or lost."""
        message = await self._said.get()
        if message is not None and message["say"] == "error":
            raise unpack_error(message["error"])
        return message

    def fail(self, error: ApiError) -> None:
        """End the request with an error."""
        self.put({"say": "error", "error": pack_error(error)})
