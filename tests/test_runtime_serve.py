"""Connections that take a place and ask nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from ralbuild.runtime import serve
from ralbuild.runtime.serve import Protocol

ASK = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer_late(_scope: Any, _receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
    """Take five times as long as a head may."""
    await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def drip(connection: Connection) -> bytes:
    """Send a byte of a head now and then until the server has had enough."""
    reader, writer = connection
    ended = asyncio.ensure_future(reader.read())
    while not ended.done():
        writer.write(b"x")
        await asyncio.wait([ended], timeout=0.05)
    writer.close()
    return ended.result()


async def ask(connection: Connection) -> bytes:
    connection[1].write(ASK)
    head = await connection[0].readuntil(b"\r\n\r\n")
    return head.split(b"\r\n")[0] + await connection[0].readexactly(2)


def test_a_head_that_does_not_come_ends_its_connection_and_a_slow_answer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.2)

    async def scenario() -> None:
        config, state = uvicorn.Config(answer_late, http=Protocol, log_config=None), ServerState()
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Protocol(config=config, server_state=state, app_state={}), "127.0.0.1"
        )
        port = server.sockets[0].getsockname()[1]
        silent, dripping, working = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        answers = asyncio.gather(silent[0].read(), drip(dripping), ask(working))
        assert await asyncio.wait_for(answers, 30) == [b"", b"", b"HTTP/1.1 200 OKok"]
        # The same connection again, then a head that is never completed.
        assert await asyncio.wait_for(ask(working), 30) == b"HTTP/1.1 200 OKok"
        working[1].write(ASK[:9])
        assert await asyncio.wait_for(working[0].read(), 30) == b""
        silent[1].close()
        working[1].close()
        server.close()

    asyncio.run(scenario())
