"""Requests and answers of HTTP: URLs, bodies that are streamed, and limits on every wait."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from ralbuild.digests import CHUNK
from ralbuild.errors import ImageError

Chunks = Iterable[bytes | memoryview]

REPLY_LIMIT = 8 << 20
"""Bytes of an answer that is read whole; a manifest has at most 4 MiB."""
_PORTS = {"http": 80, "https": 443}


class TransportError(Exception):
    """No answer: the connection failed, broke or stalled. The request can be tried again."""


class StoppedError(Exception):
    """`Transport.close` was called: another upload failed, or the user said so."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait, in seconds.

    Attributes:
        connect: for a connection.
        idle: for the next bytes to arrive, or for one piece to leave.
        reply: for the answer's header once the request is sent, and for the whole of a small answer.
        stored: for the answer to an upload: the registry may hash and move all of it before it answers.
        slowest: bytes a second below which a download counts as stalled; measured over ``idle``.
    """

    connect: float = 30.0
    idle: float = 60.0
    reply: float = 60.0
    stored: float = 900.0
    slowest: int = 1024


@dataclass(frozen=True, slots=True)
class Url:
    """An absolute ``http`` or ``https`` URL in parts; ``host`` has a port always."""

    scheme: str
    host: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """Return the URL in ``text``.

        Raises:
            ValueError: when it is none, or would smuggle something into a header.
        """
        _check_text(text)
        parts = urlsplit(text)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("needs an http or https URL")
        if parts.username is not None:
            raise ValueError("needs a URL without a user name")
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = parts.port if parts.port is not None else _PORTS[parts.scheme]
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.scheme, f"{name}:{port}", target)

    @property
    def origin(self) -> tuple[str, str]:
        """Scheme, host and port: what credentials belong to."""
        return self.scheme, self.host

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}{self.target}"

    def join(self, location: str) -> Url:
        """Return where ``location``, absolute or relative, leads from here; raises what `parse` raises."""
        _check_text(location)  # `urljoin` would drop what must not be there
        return Url.parse(urljoin(str(self), location))

    def with_query(self, query: str) -> Url:
        """Return this URL with ``query`` added to what it has."""
        mark = "&" if "?" in self.target else "?"
        return Url(self.scheme, self.host, f"{self.target}{mark}{query}")


def _check_text(url: str) -> None:
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("needs a URL without spaces and control characters")


@dataclass(frozen=True, slots=True)
class Body:
    """What a request sends.

    Attributes:
        size: in bytes.
        chunks: produces them.
        again: whether it can do so a second time, for a redirect or a challenge.
    """

    size: int
    chunks: Callable[[], Chunks]
    again: bool = True

    @classmethod
    def of(cls, data: bytes) -> Body:
        """Return a body of ``data``."""
        return cls(len(data), lambda: (data,))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that was read whole; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    data: bytes = b""


class Answer:
    """An answer whose body is still to be read.

    Attributes:
        status: of HTTP.
        headers: names in lower case.
    """

    def __init__(self, sock: socket.socket, response: http.client.HTTPResponse, limits: Limits) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self._sock = sock
        self._response = response
        self._limits = limits
        self._reply: Reply | None = None

    @property
    def reusable(self) -> bool:
        """True when it was read to its end and the server keeps the connection open."""
        return self._response.isclosed() and not self._response.will_close

    def whole(self) -> Reply:
        """Read the rest, at most `REPLY_LIMIT` bytes; a second call returns the same.

        Raises:
            TransportError: when it ends early.
            ImageError: when it is longer.
        """
        if self._reply is not None:
            return self._reply
        with deadline(self._sock, self._limits.reply):
            data = self._response.read(REPLY_LIMIT + 1)
        if len(data) > REPLY_LIMIT:
            raise ImageError(f"the registry's answer is longer than {REPLY_LIMIT} bytes")
        if self._response.length:
            raise TransportError(f"the answer ended {self._response.length} bytes early")
        self._reply = Reply(self.status, self.headers, data)
        return self._reply

    def chunks(self) -> Iterator[bytes]:
        """Yield the rest as it arrives.

        Raises:
            TransportError: when it ends early, or is slower than `Limits.slowest`.
        """
        limits, since, count = self._limits, time.monotonic(), 0
        while chunk := self._response.read1(CHUNK):
            count += len(chunk)
            yield chunk
            passed = time.monotonic() - since
            if passed > limits.idle:
                if count < limits.slowest * passed:
                    raise TransportError(f"only {count} bytes arrived in {passed:.0f} seconds")
                since, count = time.monotonic(), 0
        if self._response.length:
            raise TransportError(f"the connection ended {self._response.length} bytes early")
        self._response.read()  # marks it as read to its end


@contextlib.contextmanager
def deadline(sock: socket.socket, seconds: float) -> Iterator[None]:
    """End the connection when the block takes longer: bytes that trickle reset every socket timeout."""
    timer = threading.Timer(seconds, shut, (sock,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shut(sock: socket.socket) -> None:
    """Wake whatever waits for this socket; closing it is its owner's business."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
