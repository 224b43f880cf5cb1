"""A small HTTP client for one server of ours: JSON, streams, and the metrics that a release reads."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ralbuild.errors import UsageError

ANSWER_LIMIT = 16 << 20
"""Bytes of an answer that are read; a server that sends more is broken."""
_GAUGE = re.compile(r"^ralbuild_requests_(?:running|waiting) ([0-9.eE+]+)$", re.MULTILINE)


class NoAnswerError(Exception):
    """The server cannot be reached, hung up or sent what is no HTTP; the text says which."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: HTTP status, parsed JSON (None when it is none) and seconds until it was complete."""

    status: int
    body: Any
    seconds: float
    headers: dict[str, str]

    @property
    def error_code(self) -> str:
        """OpenAI's ``error.code``, or empty."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("code") or "") if isinstance(error, dict) else ""


@dataclass(frozen=True, slots=True)
class Events:
    """A stream that ended: parsed events, whether ``[DONE]`` came, seconds to the first text and in all."""

    status: int
    events: tuple[Any, ...]
    done: bool
    first_text_seconds: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Talks to one address; every call is a connection of its own.

    Attributes:
        host, port: where.
        prefix: path in front of every path, without a final slash.
        tls: HTTPS.
        timeout: seconds without a byte after which a call fails.
        headers: sent with every request.
    """

    host: str
    port: int
    prefix: str = ""
    tls: bool = False
    timeout: float = 60.0
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, *, timeout: float, headers: tuple[tuple[str, str], ...] = ()) -> ServiceClient:
        """Return a client for ``http://host:port`` or ``https://...``.

        Raises:
            UsageError: when it is no such address.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        except ValueError:
            port = 0
        if not port or not parts.hostname or parts.query or parts.username:
            hint = "give an address such as http://127.0.0.1:8000"
            raise UsageError(f"{url!r} is no HTTP address", place="--url", hint=hint)
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, path, parts.scheme == "https", timeout, headers)

    def get(self, path: str) -> Answer:
        """Return the answer to a GET.

        Raises:
            NoAnswerError: when there is none.
        """
        return self._call("GET", path, None, ())

    def post(self, path: str, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
        """Return the answer to a POST of ``body`` (bytes as they are, everything else as JSON)."""
        return self._call("POST", path, body, headers)

    def stream(self, path: str, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> Events:
        """POST ``body`` and read server-sent events to the end.

        Raises:
            NoAnswerError: when the connection breaks; a stream that ends without ``[DONE]`` does not raise.
        """
        started = time.monotonic()
        events: list[Any] = []
        first: float | None = None
        done = False
        with self._exchange("POST", path, body, headers) as response:
            if response.status != 200:
                return Events(response.status, (_parsed(response.read(ANSWER_LIMIT)),), False, None, 0.0)
            size = 0
            for line in response:
                size += len(line)
                if size > ANSWER_LIMIT:
                    raise NoAnswerError(f"the stream has more than {ANSWER_LIMIT >> 20} MiB")
                text = line.strip()
                if not text.startswith(b"data:"):
                    continue
                data = text.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    done = True
                    continue
                event = _parsed(data)
                events.append(event)
                if first is None and _has_text(event):
                    first = time.monotonic() - started
        return Events(200, tuple(events), done, first, time.monotonic() - started)

    def ready(self) -> tuple[bool, str]:
        """Return whether ``/ready`` says yes, and what it says for people."""
        try:
            answer = self.get("/ready")
        except NoAnswerError as error:
            return False, str(error)
        body = answer.body if isinstance(answer.body, dict) else {}
        return answer.status == 200, f"{body.get('stage', answer.status)}, {body.get('percent', '?')} %"

    def in_flight(self) -> int:
        """Return the requests that hold a slot or wait for one; 0 when the server is gone."""
        try:
            text = self._text("/metrics")
        except NoAnswerError:
            return 0
        return sum(int(float(number)) for number in _GAUGE.findall(text))

    def _text(self, path: str) -> str:
        with self._exchange("GET", path, None, ()) as response:
            return response.read(ANSWER_LIMIT).decode("utf-8", "replace")

    def _call(self, method: str, path: str, body: Any, headers: tuple[tuple[str, str], ...]) -> Answer:
        started = time.monotonic()
        with self._exchange(method, path, body, headers) as response:
            data = response.read(ANSWER_LIMIT)
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, _parsed(data), time.monotonic() - started, found)

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: Any, headers: tuple[tuple[str, str], ...]
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.timeout)
        sent = dict(self.headers) | dict(headers)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("content-type", "application/json")
        try:
            connection.request(method, self.prefix + path, data, sent)
            with connection.getresponse() as response:
                yield response
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise NoAnswerError(f"{method} {path}: {reason}") from None
        finally:
            connection.close()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _has_text(event: Any) -> bool:
    try:
        choice = event["choices"][0]
        return bool(choice.get("text") or choice["delta"].get("content"))
    except (KeyError, IndexError, TypeError, AttributeError):
        return False
