"""The HTTP API: OpenAI's endpoints, probes, metrics. With `answers` the door to starlette."""

from __future__ import annotations

import asyncio
import time
import traceback
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ralbuild import __version__
from ralbuild.contract.places import INPUT_LENGTH_HEADER, ROUTE_HEADER
from ralbuild.runtime.answers import HUNG_UP, Answer, watched
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.exposition import CONTENT_TYPE, ServerMetrics
from ralbuild.runtime.keys import KeyFile
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.log import log_event
from ralbuild.runtime.replies import Reply
from ralbuild.runtime.requests import find_route
from ralbuild.runtime.supervisor import Supervisor
from ralbuild.runtime.tickets import Ticket

MAX_BODY_BYTES = 4 << 20
BODY_SECONDS = 60.0
"""Longest that a body may take to arrive."""
_ADMIN = ("/ral/load", "/ral/unload")


class Api:
    """The ASGI application in front of one supervisor."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        metrics: ServerMetrics,
        supervisor: Supervisor,
        *,
        keys: KeyFile | None = None,
        admin: KeyFile | None = None,
    ) -> None:
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.supervisor = supervisor
        self._keys = keys
        self._admin = admin
        self.in_flight = 0
        """Requests by POST whose answer is not sent completely."""
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/version", self._version),
            Route("/v2/health/live", self._health),
            Route("/v2/health/ready", self._ready),
            Route("/v2/models/{name:path}/ready", self._model_ready),
            Route("/ral/info", self._info),
            Route("/ral/load", self._load, methods=["POST"]),
            Route("/ral/unload", self._unload, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/chat/completions", _Generate(supervisor, chat=True), methods=["POST"]),
            Route("/v1/completions", _Generate(supervisor, chat=False), methods=["POST"]),
        ]
        self._paths = {route.path for route in routes}
        handlers: dict[Any, Any] = {
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        }
        self._app = Starlette(routes=routes, exception_handlers=handlers)
        # A redirect would name a host and a scheme that only the proxy in front knows.
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; adds its id, counts it and logs one line without its text."""
        if scope["type"] != "http":
            return
        scope = {**scope, "path": _origin_form(scope["path"])}
        exchange = _Exchange(scope, send, self.lifecycle.draining)
        posted = scope["method"] == "POST"
        self.in_flight += posted
        scope["ral"] = {"id": exchange.id}
        try:
            await self._admit(scope, receive, exchange.send)
        except asyncio.CancelledError:
            # The process ends now. An answer that was not completed makes the server close the connection.
            scope["ral"]["finish"] = "shutdown"
        except Exception as error:
            # A bug; starlette has answered already, or the stream stays incomplete and is closed.
            log_event(
                "request failed", id=exchange.id, error=type(error).__name__, trace=traceback.format_exc()
            )
        finally:
            self.in_flight -= posted
            path = scope["path"] if scope["path"] in self._paths else "other"
            self.metrics.requests.labels(path, str(exchange.status)).inc()
            if posted:
                exchange.log(path)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in that may come in; probes and metrics are open."""
        path: str = scope["path"]
        try:
            if path in _ADMIN:
                self._require_admin(_authorization(scope))
            elif self._keys is not None and path.startswith(("/v1/", "/ral/")):
                _require_key(self._keys, _authorization(scope), "invalid_api_key", "a key of this server")
        except ApiError as error:
            scope["ral"]["code"] = error.code
            await _answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _require_admin(self, authorization: str | None) -> None:
        if self._admin is None:
            message = "this server was started without RAL_ADMIN_TOKEN_FILE, so nobody may do this"
            raise ApiError(403, "admin_disabled", message)
        _require_key(self._admin, authorization, "invalid_admin_token", "the admin token")

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        return JSONResponse(self.lifecycle.report(), 200 if self.lifecycle.ready else 503)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _metrics(self, _: Request) -> Response:
        await self.supervisor.refresh()
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _info(self, _: Request) -> Response:
        self._served()
        await self.supervisor.refresh()
        counts = self.metrics.worker.by_label("ralbuild_rule_events_total", "rule")
        info = self.supervisor.info
        rules = _with_events(info["rules"], counts)
        return JSONResponse(info | {"rules": rules, "runtime_rules": self._runtime_rules()})

    def _runtime_rules(self) -> dict[str, Any] | None:
        file = self.supervisor.rule_file
        if file is None:
            return None
        info, name = file.info(), "ralbuild_runtime_rule_events_total"
        counts = self.metrics.worker.by_label(name, "rule", serial=str(info["serial"]))
        return info | {"rules": _with_events(info["rules"], counts)}

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object(self._served())]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        find_route(self._served(), name, None)
        return JSONResponse(self._model_object(name))

    async def _model_ready(self, request: Request) -> Response:
        name = request.path_params["name"]
        find_route(self._served(), name, None)
        ready = self.lifecycle.ready
        return JSONResponse({"name": name, "ready": ready}, 200 if ready else 503)

    async def _load(self, _: Request) -> Response:
        await self.supervisor.load()
        return JSONResponse(self.lifecycle.report())

    async def _unload(self, _: Request) -> Response:
        released = await self.supervisor.unload()
        return JSONResponse(self.lifecycle.report() | {"released_bytes": released})

    def _model_object(self, name: str) -> dict[str, Any]:
        """Return OpenAI's object, with the length of the context where clients of vLLM look for it."""
        longest = self.supervisor.info["engine"]["max_seq_len"]
        head = {"id": name, "object": "model", "created": 0, "owned_by": "ralbuild"}
        return head | {"max_model_len": longest}

    def _served(self) -> str:
        """Return the name of the model; raises ApiError 503 before it was loaded once."""
        if not self.supervisor.info:
            self.lifecycle.require_ready()
        return str(self.supervisor.info["model"])


class _Generate:
    """The ASGI endpoint of chat or text completions."""

    def __init__(self, supervisor: Supervisor, *, chat: bool) -> None:
        self._supervisor = supervisor
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; everything that can be refused is refused before the 200.

        Raises:
            ApiError: what is refused, or what failed before a stream began.
        """
        ticket = await self._ask(Request(scope, receive))
        answer = None
        response = Response(status_code=HUNG_UP)
        try:
            async with watched(ticket, receive):
                accepted = await ticket.take()
                if accepted is not None:
                    answer = self._answer(accepted, ticket, scope["ral"])
                    if accepted["stream"]:
                        await answer.stream(send)
                        return
                    response = await answer.whole()
        finally:
            self._supervisor.drop(ticket, ended=answer is not None and answer.ended)
        await response(scope, receive, send)

    async def _ask(self, request: Request) -> Ticket:
        self._supervisor.require_room()  # before the body is read
        body = await _read_body(request)
        fields = {
            "chat": self._chat,
            "id": request.scope["ral"]["id"],
            "route": _header(request, ROUTE_HEADER),
            "length": _header(request, INPUT_LENGTH_HEADER),
        }
        return self._supervisor.ask(fields, body)

    def _answer(self, accepted: dict[str, Any], ticket: Ticket, facts: dict[str, Any]) -> Answer:
        facts |= {"profile": accepted["profile"], "prompt_tokens": accepted["prompt_tokens"]}
        reply = Reply(
            chat=self._chat,
            id=facts["id"],
            created=int(time.time()),
            model=accepted["model"],
            prompt_tokens=accepted["prompt_tokens"],
            include_usage=accepted["include_usage"],
            logprobs=accepted["logprobs"],
            choices=accepted["choices"],
        )
        return Answer(reply, ticket, facts)


def _with_events(rules: list[dict[str, Any]], counts: dict[str, float]) -> list[dict[str, Any]]:
    return [rule | {"events": int(counts.get(str(rule["id"]), 0))} for rule in rules]


def _origin_form(path: str) -> str:
    """Return the path of a target that is written as for a proxy, `http://host/path` (RFC 9112, 3.2.2)."""
    scheme, found, rest = path.partition("://")
    if not found or scheme.lower() not in ("http", "https"):
        return path
    return "/" + rest.partition("/")[2]


def _authorization(scope: Scope) -> str | None:
    """Return the header; two of them are as good as none."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _require_key(keys: KeyFile, authorization: str | None, code: str, what: str) -> None:
    if not keys.accepts(authorization):
        raise ApiError(401, code, f"needs the header 'Authorization: Bearer' with {what}")


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


async def _read_body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    size = int(announced) if announced.isdecimal() else 0
    body = bytearray()
    if size <= MAX_BODY_BYTES:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if (size := len(body)) > MAX_BODY_BYTES:
                        break
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
            raise ApiError(408, "body_timeout", message) from None
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


def _answer(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
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
