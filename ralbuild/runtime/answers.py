"""Delivers one generation to its client, whole or as a stream, and cancels it when the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Send

from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.orders import Piece
from ralbuild.runtime.replies import PING, Reply, error_event
from ralbuild.runtime.tickets import Ticket
from ralbuild.runtime.wire import Message, unpack_piece

PING_SECONDS = 15.0
_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
HUNG_UP = 499
"""Status of an answer that nobody reads; the number is for the log."""


@contextlib.asynccontextmanager
async def watched(ticket: Ticket, receive: Receive) -> AsyncIterator[None]:
    """Put None into the ticket when the client hangs up; its body must have been read."""
    watcher = asyncio.ensure_future(_watch(ticket, receive))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(ticket: Ticket, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.put(None)


class Answer:
    """What is said about one accepted request. ``facts`` gets what the log tells of it."""

    def __init__(self, reply: Reply, ticket: Ticket, facts: dict[str, Any]) -> None:
        self._reply = reply
        self._ticket = ticket
        self._facts = facts
        self._lasts = [Piece("", 0)] * reply.choices
        facts["finish"] = "cancelled"

    @property
    def ended(self) -> bool:
        """True when every choice has come to its end."""
        return all(last.finish for last in self._lasts)

    async def whole(self) -> Response:
        """Wait for the last piece and return the answer.

        Raises:
            ApiError: when the generation failed.
        """
        answers: list[list[Piece]] = [[] for _ in self._lasts]
        while not self.ended:
            message = await self._ticket.take()
            if message is None:
                return Response(status_code=HUNG_UP)
            choice, piece = self._note(message)
            answers[choice].append(piece)
        return JSONResponse(self._reply.whole(answers))

    async def stream(self, send: Send) -> None:
        """Send events as pieces come; returns early when the client is gone."""
        headers = [(name.encode(), value.encode()) for name, value in _STREAM_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _send_events(send, self._reply.opening())
            while not self.ended:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        message = await self._ticket.take()
                except TimeoutError:
                    await _send_events(send, [PING])
                    continue
                if message is None:
                    return
                choice, piece = self._note(message)
                await _send_events(send, self._reply.piece(choice, piece))
            await _send_events(send, self._reply.closing(self._lasts))
        except ApiError as error:
            self._facts |= {"finish": "error", "code": error.code}
            await _send_events(send, [error_event(error)])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _note(self, message: Message) -> tuple[int, Piece]:
        """Keep what a piece says; raises ApiError for one that failed."""
        piece = unpack_piece(message["piece"])
        choice: int = message["choice"]
        self._lasts[choice] = piece
        self._facts["tokens"] = sum(last.tokens for last in self._lasts)
        if piece.error:
            self._facts["finish"] = "error"
            raise ApiError(500, "engine_error", piece.error)
        if self.ended:
            self._facts["finish"] = ",".join(last.finish for last in self._lasts)
        return choice, piece


async def _send_events(send: Send, events: Iterable[bytes]) -> None:
    body = b"".join(events)
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
