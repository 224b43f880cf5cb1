"""HTTP as a registry client needs it: streamed bodies, kept connections, limits on every wait.

The standard library's client, because it sends memory as it is: 1.3 GB/s a core from a weight file to
a socket, with nothing between them. One connection a thread and host; nothing here knows of registries.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ralbuild import __version__
from ralbuild.digests import CHUNK
from ralbuild.errors import HostError, ImageError
from ralbuild.image.registry.messages import (
    Answer,
    Body,
    Limits,
    Reply,
    StoppedError,
    TransportError,
    Url,
    deadline,
    shut,
)
from ralbuild.image.registry.reference import is_loopback, split_port

_USER_AGENT = f"ralbuild/{__version__}"


class Transport:
    """Connections to hosts, one for each thread and host, kept while they work.

    Args:
        insecure: also allow plain HTTP to hosts other than this machine.
        ca_file: trust the certificates in this PEM file too.
        limits: how long to wait.
    """

    def __init__(
        self, *, insecure: bool = False, ca_file: Path | None = None, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._insecure = insecure
        self._ca_file = ca_file
        self._local = threading.local()
        self._live: dict[http.client.HTTPConnection, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._scheme = functools.cache(self._probe)
        self._tls = functools.cache(self._make_tls)

    def scheme(self, host: str) -> str:
        """Return ``https``, or ``http`` where that is allowed and the host does not speak TLS.

        Raises:
            TransportError: when the host cannot be reached.
            ImageError: when its certificate is not trusted.
        """
        return self._scheme(host)

    def allows_plain(self, host: str) -> bool:
        """Tell whether plain HTTP may be spoken with ``host``."""
        return self._insecure or is_loopback(host)

    def fetch(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
        body: Body | None = None,
        *,
        wait: float | None = None,
    ) -> Reply:
        """Send a request and read the whole answer; see `open` for the arguments.

        Raises:
            TransportError: when there is no whole answer.
            ImageError: when the certificate is not trusted, or the answer is too long.
        """
        with self.open(method, url, headers, body, wait=wait) as answer:
            return answer.whole()

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        url: Url,
        headers: Mapping[str, str],
        body: Body | None = None,
        *,
        wait: float | None = None,
    ) -> Iterator[Answer]:
        """Send a request and yield the answer; its connection is kept when it is read to the end.

        Args:
            method: of HTTP.
            url: where.
            headers: besides those that every request has.
            body: sent with its length, never in HTTP's own chunks.
            wait: seconds for the answer's header; `Limits.reply` unless given.

        Raises:
            TransportError: when there is no answer, or it breaks off while it is read.
            ImageError: when the certificate is not trusted.
        """
        connection = None
        try:
            request = _Request(method, url, headers, body, wait or self.limits.reply)
            connection, answer = self._exchange(request)
            yield answer
            if answer.reusable:
                self._kept[url.origin] = connection
                connection = None
        except (OSError, http.client.HTTPException) as error:
            self._check_open()
            raise TransportError(_text(error)) from None
        finally:
            if connection is not None:
                self._drop(connection)

    def close(self) -> None:
        """End every connection; what other threads wait for fails at once."""
        self._closed.set()
        with self._lock:
            live = tuple(self._live.values())
        for sock in live:
            shut(sock)

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until `close`.

        Raises:
            StoppedError: when that was called.
        """
        self._closed.wait(seconds)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoppedError

    @property
    def _kept(self) -> dict[tuple[str, str], http.client.HTTPConnection]:
        """This thread's idle connections by origin."""
        kept: dict[tuple[str, str], http.client.HTTPConnection] = self._local.__dict__.setdefault("kept", {})
        return kept

    def _exchange(self, request: _Request) -> tuple[http.client.HTTPConnection, Answer]:
        """Send on the kept connection, else, or when the server had closed that one, on a new one."""
        kept = self._kept.pop(request.url.origin, None)
        if kept is not None and not _is_small(request.body):
            # Not to be sent twice unasked; and whoever sends that much has just asked where to.
            return kept, self._owned(kept, request)
        if kept is not None:
            try:
                return kept, self._send(kept, request)
            except (OSError, http.client.HTTPException):
                self._drop(kept)
            except BaseException:
                self._drop(kept)
                raise
        connection = self._connect(request.url.scheme, request.url.host)
        return connection, self._owned(connection, request)

    def _owned(self, connection: http.client.HTTPConnection, request: _Request) -> Answer:
        try:
            return self._send(connection, request)
        except BaseException:
            self._drop(connection)
            raise

    def _send(self, connection: http.client.HTTPConnection, request: _Request) -> Answer:
        sock = connection.sock  # http.client forgets it when the server says that it will hang up
        _write_head(connection, request)
        wait = request.wait
        broken: OSError | None = None
        for chunk in request.body.chunks() if request.body is not None else ():
            try:
                connection.send(chunk)
            except OSError as error:
                # A server that refuses a body answers and hangs up: its 413 says more than the reset.
                broken, wait = error, min(wait, 5.0)
                break
        sock.settimeout(wait)  # a registry may work on what it got for longer than it may pause otherwise
        try:
            with deadline(sock, wait):
                response = connection.getresponse()
        except (OSError, http.client.HTTPException):
            if broken is not None:
                raise broken from None
            raise
        sock.settimeout(self.limits.idle)
        return Answer(sock, response, self.limits)

    def _connect(self, scheme: str, host: str) -> http.client.HTTPConnection:
        name, port = split_port(host)
        name = name.strip("[]")
        made: http.client.HTTPConnection
        if scheme == "https":
            at = _proxy(name) or (name, port)
            made = http.client.HTTPSConnection(
                *at, timeout=self.limits.connect, context=self._tls(), blocksize=CHUNK
            )
            if at != (name, port):
                made.set_tunnel(name, port)
        else:
            made = http.client.HTTPConnection(name, port, timeout=self.limits.connect, blocksize=CHUNK)
        try:
            made.connect()
            with self._lock:
                self._live[made] = made.sock
            self._check_open()
        except ssl.SSLCertVerificationError as error:
            self._drop(made)
            raise _untrusted(host, error) from None
        except BaseException:
            self._drop(made)
            raise
        made.sock.settimeout(self.limits.idle)
        return made

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._live.pop(connection, None)
        connection.close()

    def _probe(self, host: str) -> str:
        if not self.allows_plain(host):
            return "https"
        try:
            connection = self._connect("https", host)
        except ssl.SSLError:
            return "http"  # it answered, but not in TLS
        except OSError as error:
            if isinstance(error, ConnectionResetError):
                return "http"
            raise TransportError(_text(error)) from None
        self._drop(connection)
        return "https"

    def _make_tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._ca_file is not None:
            try:
                context.load_verify_locations(self._ca_file)
            except (OSError, ssl.SSLError) as error:
                what = error.strerror or str(error)
                raise HostError(
                    f"cannot be read as certificates: {what}",
                    place=str(self._ca_file),
                    hint="needs a PEM file",
                ) from None
        return context


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    url: Url
    headers: Mapping[str, str]
    body: Body | None
    wait: float


def _is_small(body: Body | None) -> bool:
    return body is None or (body.again and body.size < CHUNK)


def _write_head(connection: http.client.HTTPConnection, request: _Request) -> None:
    connection.putrequest(request.method, request.url.target)
    for name, value in {"User-Agent": _USER_AGENT, **request.headers}.items():
        connection.putheader(name, value)
    if request.body is not None or request.method in ("POST", "PUT", "PATCH"):
        connection.putheader("Content-Length", str(request.body.size if request.body is not None else 0))
    connection.endheaders()


def _proxy(name: str) -> tuple[str, int | None] | None:
    """Return the proxy that the environment names for https to ``name``."""
    proxy = urllib.request.getproxies().get("https", "")
    if not proxy or is_loopback(name) or urllib.request.proxy_bypass(name):
        return None
    parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return (parts.hostname, parts.port) if parts.hostname else None


def _untrusted(host: str, error: ssl.SSLCertVerificationError) -> ImageError:
    return ImageError(
        f"its certificate is not trusted: {error.verify_message or error.reason}",
        place=host,
        hint="--registry-ca FILE trusts the certificates of a file; SSL_CERT_FILE does too",
    )


def _text(error: Exception) -> str:
    """Return what went wrong with a connection, for people."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the connection ended without an answer"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended in the middle of the answer"
    if isinstance(error, OSError):
        return str(error.strerror or error).lower()
    return f"the answer is not HTTP: {error!r}"[:200]
