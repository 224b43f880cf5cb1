"""The HTTP API: OpenAI's endpoints, probes, metrics. The only door to starlette."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ralbuild.contract.places import INPUT_LENGTH_HEADER, ROUTE_HEADER
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.log import log_event
from ralbuild.runtime.metrics import CONTENT_TYPE, Metrics
from ralbuild.runtime.orders import Order, Piece, TokenLogprob
from ralbuild.runtime.preparing import HungUpError, Preparation
from ralbuild.runtime.replies import PING, Reply
from ralbuild.runtime.requests import Ask, parse_chat, parse_completion

if TYPE_CHECKING:  # the API answers probes while torch is still being imported
    from ralbuild.runtime.service import Service

MAX_BODY_BYTES = 4 << 20
PING_SECONDS = 15.0
_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_Parse = Callable[[bytes], Ask]


class Api:
    """The ASGI application. ``service`` is set when the model is ready."""

    def __init__(self, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.service: Service | None = None
        self._preparation = Preparation()
        self.in_flight = 0
        """Requests to generate whose answer is not sent completely."""
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/ral/info", self._info),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", partial(self._generate, parse_chat), methods=["POST"]),
            Route("/v1/completions", partial(self._generate, parse_completion), methods=["POST"]),
        ]
        self._paths = {route.path for route in routes}
        handlers: dict[Any, Any] = {
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        }
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; adds its id, counts it and logs one line without its text."""
        if scope["type"] != "http":
            return
        exchange = _Exchange(scope, send, self.lifecycle.draining)
        generates = scope["method"] == "POST"
        self.in_flight += generates
        scope["ral"] = {"id": exchange.id}
        try:
            await self._app(scope, receive, exchange.send)
        except asyncio.CancelledError:
            # The process ends now. An answer that was not completed makes the server close the connection.
            scope["ral"]["finish"] = "shutdown"
        except Exception as error:
            # A bug; starlette has answered already, or the stream stays incomplete and is closed.
            log_event(
                "request failed", id=exchange.id, error=type(error).__name__, trace=traceback.format_exc()
            )
        finally:
            self.in_flight -= generates
            path = scope["path"] if scope["path"] in self._paths else "other"
            self.metrics.requests.labels(path, str(exchange.status)).inc()
            if generates:
                exchange.log(path)

    async def _health(self, _: Request) -> Response:
        if self.service is not None and not self.service.engine.alive:
            return JSONResponse({"status": "the decode loop has ended"}, 500)
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        return JSONResponse(self.lifecycle.report(), 200 if self.lifecycle.ready else 503)

    async def _metrics(self, _: Request) -> Response:
        self.metrics.ready.set(self.lifecycle.ready)
        return Response(self.metrics.exposition(), media_type=CONTENT_TYPE)

    async def _info(self, _: Request) -> Response:
        return JSONResponse(self._serving().info())

    async def _models(self, _: Request) -> Response:
        return JSONResponse(self._serving().models())

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._serving().model(request.path_params["name"]))

    async def _generate(self, parse: _Parse, request: Request) -> Any:
        """Answer a chat or text completion; everything that can be refused is refused before the 200."""
        service = self._serving()
        self.lifecycle.require_ready()
        self._preparation.require_room()
        body = await _read_body(request)
        route, length = _header(request, ROUTE_HEADER), _header(request, INPUT_LENGTH_HEADER)

        def prepare() -> tuple[Ask, Order]:
            ask = parse(body)
            _check_input_length(length, ask)
            return ask, service.make_order(ask, route)

        try:
            ask, order = await self._preparation.run(prepare, request.receive)
        except HungUpError:
            return Response(status_code=499)  # nobody reads it; the number is for the log
        mailbox = _Mailbox()
        generation = service.submit(order, mailbox.put)
        profile = service.bundle.profiles[order.profile].name
        facts: dict[str, Any] = request.scope["ral"]
        facts |= {"profile": profile, "prompt_tokens": len(order.prompt)}
        reply = Reply(
            chat=parse is parse_chat,
            id=facts["id"],
            created=int(time.time()),
            model=ask.model,
            prompt_tokens=len(order.prompt),
            include_usage=ask.include_usage,
            logprobs=ask.logprobs is not None,
        )
        answer = _Answer(reply, mailbox, facts, partial(service.engine.cancel, generation))
        return answer.stream if ask.stream else await answer.whole(request.receive)

    def _serving(self) -> Service:
        if self.service is None:
            self.lifecycle.require_ready()
            raise ApiError(503, "model_loading", "the model is loading", retry_after=2)
        return self.service


class _Exchange:
    """One request as the outside sees it: id, status, duration."""

    def __init__(self, scope: Scope, send: Send, draining: bool) -> None:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        usable = 0 < len(given) <= 128 and all(33 <= byte < 127 for byte in given)
        self.id = given.decode() if usable else uuid.uuid4().hex
        self.status = 0
        self._scope = scope
        self._send = send
        self._draining = draining
        self._begin = time.monotonic()

    async def send(self, message: Message) -> None:
        """Pass a message on; the first one gets our headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self.id.encode())]
            if self._draining:
                message["headers"].append((b"connection", b"close"))
        await self._send(message)

    def log(self, path: str) -> None:
        """Write the request's line."""
        facts: dict[str, Any] = self._scope["ral"]
        seconds = time.monotonic() - self._begin
        log_event("request", path=path, status=self.status, seconds=seconds, **facts)


class _Mailbox:
    """Pieces on their way from the engine's thread to one request's task; None when the client is gone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Piece | None] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        """Called by the engine."""
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    async def take(self) -> Piece | None:
        """Return the next piece."""
        return await self._queue.get()

    async def watch(self, receive: Receive) -> None:
        """Post None when the client hangs up."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(None)


class _Answer:
    """Delivers one generation, whole or as a stream, and cancels it when the client is gone."""

    def __init__(
        self, reply: Reply, mailbox: _Mailbox, facts: dict[str, Any], cancel: Callable[[], None]
    ) -> None:
        self._reply = reply
        self._mailbox = mailbox
        self._facts = facts
        self._cancel = cancel

    async def whole(self, receive: Receive) -> Response:
        """Wait for the last piece and return the answer."""
        texts = []
        logprobs: list[TokenLogprob] = []
        async with self._watched(receive):
            while piece := await self._mailbox.take():
                texts.append(piece.text)
                logprobs += piece.logprobs
                if self._ended(piece):
                    break
        if piece is None:
            return Response(status_code=499)  # nobody reads it; the number is for the log
        if piece.error:
            raise ApiError(500, "engine_error", piece.error)
        return JSONResponse(self._reply.whole("".join(texts), piece, logprobs))

    async def stream(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as pieces come; this method is the ASGI response."""
        headers = [(name.encode(), value.encode()) for name, value in _STREAM_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with self._watched(receive):
            await _send_events(send, self._reply.opening())
            while True:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        piece = await self._mailbox.take()
                except TimeoutError:
                    await _send_events(send, [PING])
                    continue
                if piece is None:
                    return
                ended = self._ended(piece)
                await _send_events(send, self._reply.piece(piece))
                if ended:
                    break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _ended(self, piece: Piece) -> bool:
        self._facts["tokens"] = piece.tokens
        self._facts["finish"] = piece.finish or ("error" if piece.error else "cancelled")
        return bool(piece.finish or piece.error)

    @contextlib.asynccontextmanager
    async def _watched(self, receive: Receive) -> Any:
        """Watch for the client's hang-up; leaving before the last piece cancels the generation."""
        watcher = asyncio.ensure_future(self._mailbox.watch(receive))
        self._facts["finish"] = "cancelled"
        try:
            yield
        finally:
            watcher.cancel()
            if self._facts["finish"] == "cancelled":
                self._cancel()


async def _send_events(send: Send, events: Iterable[bytes]) -> None:
    body = b"".join(events)
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _read_body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    size = int(announced) if announced.isdecimal() else 0
    body = bytearray()
    if size <= MAX_BODY_BYTES:
        try:
            async for chunk in request.stream():
                body += chunk
                if (size := len(body)) > MAX_BODY_BYTES:
                    break
        except ClientDisconnect:
            raise ApiError(400, "client_disconnected", "the body never arrived") from None
    if size > MAX_BODY_BYTES:
        message = f"the body has more than {MAX_BODY_BYTES} bytes"
        raise ApiError(413, "body_too_large", message, extra={"measured": size, "allowed": MAX_BODY_BYTES})
    return bytes(body)


def _header(request: Request, name: str) -> str | None:
    """Return a header that decides something; with two, a gateway may have checked the other one."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise ApiError(400, "duplicate_header", f"{name} was sent {len(values)} times", param=name)
    return _as_utf8(values[0]) if values else None


def _as_utf8(value: str) -> str:
    """Return a header as its sender meant it: UTF-8 where its bytes are that, else Latin-1 as HTTP has it.

    Read as Latin-1 alone, the route of a client that sends UTF-8 would match no rule.
    """
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return value


def _check_input_length(header: str | None, ask: Ask) -> None:
    """A gateway that measured the input says so: a difference means that text was lost on the way."""
    if header is not None and header.strip() != str(ask.input_length):
        said = header.strip()[:32]
        message = f"{INPUT_LENGTH_HEADER} says {said!r}, the texts have {ask.input_length} characters"
        raise ApiError(422, "input_length_mismatch", message, extra={"measured": ask.input_length})


def _answer(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    return JSONResponse(error.body(), error.status, headers)


async def _answer_api_error(request: Request, error: ApiError) -> Response:
    request.scope["ral"]["code"] = error.code
    return _answer(error)


async def _answer_bug(request: Request, _: Exception) -> Response:
    error = ApiError(500, "internal_error", "the server failed to answer; its log has the reason")
    return await _answer_api_error(request, error)


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    message = f"{request.method} {request.url.path} is not part of this API"
    response = await _answer_api_error(request, ApiError(error.status_code, code, message))
    response.headers.update(error.headers or {})
    return response
