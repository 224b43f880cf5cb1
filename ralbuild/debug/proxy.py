"""A proxy before any OpenAI-compatible server that applies a config's rules and reports what they did.

Only this module imports starlette, uvicorn and httpx in the builder, and only when it runs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.contract.places import ROUTE_HEADER
from ralbuild.debug.rewrite import Exchange, RefusedError, route_of
from ralbuild.debug.rules import Rules, load_rules
from ralbuild.errors import HostError, RalError

if TYPE_CHECKING:
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY_BYTES = 64 << 20
REWRITTEN = ("/v1/chat/completions", "/v1/completions")
_NOT_FORWARDED = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade",
    "transfer-encoding", "host", "content-length", "accept-encoding", "content-encoding",
}  # fmt: skip

Told = Callable[[dict[str, Any]], None]
"""Takes the report of one request."""


@dataclass(slots=True)
class LiveRules:
    """The rules of a config that is read again when the file changes.

    A change that makes no valid config is told once, and the rules before it stay.
    """

    config: Path
    model: Path | None
    complain: Callable[[RalError], None]
    _rules: Rules | None = None
    _stamp: tuple[int, int] = field(default=(0, 0))

    def current(self) -> Rules:
        """Return the rules; raises RalError only while there have never been any."""
        try:
            state = self.config.stat()
            stamp = state.st_mtime_ns, state.st_size
        except OSError:
            stamp = (0, 0)
        if self._rules is None or stamp != self._stamp:
            self._stamp = stamp
            try:
                self._rules = load_rules(self.config, self.model)
            except RalError as error:
                if self._rules is None:
                    raise
                self.complain(error)
        return self._rules


@dataclass(frozen=True, slots=True)
class Options:
    """How the proxy works: where to, whether it only observes, and whether reports hold texts."""

    upstream: str
    observe: bool
    show_text: bool


def make_app(live: LiveRules, options: Options, tell: Told) -> Starlette:
    """Return the proxy as an ASGI application."""
    _require()
    import httpx
    from starlette.applications import Starlette
    from starlette.routing import Route

    client = httpx.AsyncClient(base_url=options.upstream, timeout=httpx.Timeout(600, connect=10))
    proxy = _Proxy(live, options, tell, client)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await client.aclose()

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", proxy.handle, methods=methods)], lifespan=lifespan)


def serve(app: Starlette, host: str, port: int) -> None:
    """Serve until interrupted.

    Raises:
        HostError: when the port cannot be had.
    """
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="error", access_log=False))
    with contextlib.suppress(SystemExit):  # uvicorn's way to say that the port is taken
        server.run()
    if not server.started:
        raise HostError(
            "the port cannot be opened", place=f"{host}:{port}", hint="choose another with --port"
        )


def _require() -> None:
    try:
        import httpx  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        hint = "install the extra: pip install 'ralbuild[debug]'"
        raise HostError(f"debug-proxy needs {error.name}", hint=hint) from None


class _Proxy:
    """Handles every request: rewrites what the rules concern, and passes on the rest as it is."""

    def __init__(self, live: LiveRules, options: Options, tell: Told, client: httpx.AsyncClient) -> None:
        self.live = live
        self.options = options
        self.tell = tell
        self.client = client

    async def handle(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"the proxy takes at most {MAX_BODY_BYTES} bytes")
        exchange, plain = self._exchange(request, bytes(body))
        headers = [
            (name, value) for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED
        ]
        content = bytes(body)
        if exchange is not None:
            try:
                content = json.dumps(exchange.request(plain)).encode()
            except RefusedError as error:
                self._tell(exchange)
                return JSONResponse(error.body, status_code=422)
        return await self._forward(request, headers, content, exchange)

    def _exchange(self, request: Request, body: bytes) -> tuple[Exchange | None, dict[str, Any]]:
        """Return the exchange of a request that rules concern, and its body; None for any other."""
        if request.method != "POST" or request.url.path not in REWRITTEN:
            return None, {}
        try:
            plain = json.loads(body)
        except (ValueError, RecursionError):
            return None, {}  # the server says what is wrong with it
        if not isinstance(plain, dict):
            return None, {}
        rules = self.live.current()
        route, model = route_of(plain, request.headers.get(ROUTE_HEADER), rules.loaded.config.model)
        if model is not None:
            plain["model"] = model
        return Exchange(rules, route, rules.profile(route), self.options.observe), plain

    async def _forward(
        self, request: Request, headers: list[tuple[str, str]], content: bytes, exchange: Exchange | None
    ) -> Response:
        import httpx
        from starlette.responses import Response, StreamingResponse

        outgoing = self.client.build_request(
            request.method,
            httpx.URL(path=request.url.path, query=request.url.query.encode()),
            headers=[*headers, ("accept-encoding", "identity")],
            content=content,
        )
        try:
            incoming = await self.client.send(outgoing, stream=True)
        except httpx.HTTPError as error:
            return _error(502, f"{self.options.upstream} does not answer: {error or type(error).__name__}")
        kept = _response_headers(incoming.headers)
        streams = incoming.headers.get("content-type", "").startswith("text/event-stream")
        if exchange is None or incoming.status_code != 200:
            return StreamingResponse(_relay(incoming), status_code=incoming.status_code, headers=kept)
        if streams:
            return StreamingResponse(self._events(incoming, exchange), status_code=200, headers=kept)
        try:
            data = await incoming.aread()
        except httpx.HTTPError as error:
            return _error(502, f"{self.options.upstream} broke off: {error or type(error).__name__}")
        finally:
            await incoming.aclose()
        with contextlib.suppress(ValueError, RecursionError):
            plain = json.loads(data)
            if isinstance(plain, dict):
                data = json.dumps(exchange.answer(plain), ensure_ascii=False).encode("utf-8", "replace")
        self._tell(exchange)
        return Response(data, status_code=200, headers=kept)

    async def _events(self, incoming: httpx.Response, exchange: Exchange) -> AsyncIterator[bytes]:
        """Rewrite server-sent events; every line that is no JSON object passes as it is."""
        last: dict[str, Any] | None = None
        try:
            async for line in incoming.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    for extra in exchange.rest(last):
                        yield _event(extra)
                chunk = _object(data)
                if chunk is None:
                    yield f"{line}\n".encode("utf-8", "replace")
                    continue
                last = chunk if chunk.get("choices") else last
                yield _event(exchange.chunk(chunk), blank=False)
            for extra in exchange.rest(last):
                yield _event(extra)
        finally:
            await incoming.aclose()
            self._tell(exchange)

    def _tell(self, exchange: Exchange) -> None:
        self.tell(exchange.report(show_text=self.options.show_text))


def _event(chunk: dict[str, Any], *, blank: bool = True) -> bytes:
    text = f"data: {json.dumps(chunk, ensure_ascii=False)}\n" + ("\n" if blank else "")
    return text.encode("utf-8", "replace")


def _object(data: str) -> dict[str, Any] | None:
    if not data.startswith("{"):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        return found if isinstance(found, dict) else None
    return None


async def _relay(incoming: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in incoming.aiter_raw():
            yield part
    finally:
        await incoming.aclose()


def _response_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_FORWARDED}


def _error(status: int, message: str) -> Response:
    from starlette.responses import JSONResponse

    error = {"message": message, "type": "proxy_error", "code": None, "param": None}
    return JSONResponse({"error": error}, status_code=status)
