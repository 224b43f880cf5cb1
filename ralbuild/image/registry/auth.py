"""Proving who we are: Basic, and the token service that a registry names in its challenge.

A token is asked for each set of scopes, kept while it is fresh, and asked for anew before it runs out:
an upload is authorised when it begins, so that is when its token must be young.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.errors import ImageError
from ralbuild.image.registry.credentials import Credentials, find_credentials
from ralbuild.image.registry.messages import Body, Reply, TransportError, Url
from ralbuild.image.registry.retry import PASSING
from ralbuild.image.registry.transport import Transport

_DEFAULT_LIFE = 60.0  # seconds; the token specification's default, and its least
_MARGIN = 10.0
_CLIENT = "ralbuild"
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,]+))')
_SCHEME = re.compile(r"\s*(Basic|Bearer)\b", re.IGNORECASE)

Scopes = frozenset[str]
"""Such as ``repository:team/model:pull,push``."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """What ``WWW-Authenticate`` asks for; realm and service only for Bearer."""

    scheme: str
    realm: str = ""
    service: str = ""


def parse_challenge(header: str) -> Challenge | None:
    """Return the challenge in a ``WWW-Authenticate`` header, None for a scheme that is not ours."""
    match = _SCHEME.match(header)
    if match is None:
        return None
    values = {
        name.lower(): (re.sub(r"\\(.)", r"\1", quoted) or plain)
        for name, quoted, plain in _PARAMETER.findall(header[match.end() :])
    }
    return Challenge(match[1].lower(), values.get("realm", ""), values.get("service", ""))


@dataclass(frozen=True, slots=True)
class _Token:
    text: str = field(repr=False)
    until: float


class Auth:
    """Authorization headers for one registry, for all threads.

    Args:
        transport: to reach the token service.
        host: as the user wrote it.
        login: under which name credentials are filed; the host unless given.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        transport: Transport,
        host: str,
        login: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._host = host
        self._login = login or host
        self._clock = clock
        self._lock = threading.Lock()
        self._challenge: Challenge | None = None
        self._tokens: dict[Scopes, _Token] = {}
        self._credentials: Credentials | None = None

    def header(self, scopes: Scopes) -> dict[str, str]:
        """Return the ``Authorization`` header for ``scopes``; empty as long as nobody asked for one.

        Raises:
            ImageError: when the token service refuses.
            TransportError: when it does not answer.
        """
        with self._lock:
            if self._challenge is None:
                return {}
            if self._challenge.scheme == "basic":
                basic = self._known().basic
                return {"Authorization": basic} if basic else {}
            token = self._tokens.get(scopes)
            if token is None or token.until <= self._clock():
                token = self._tokens[scopes] = self._ask(self._challenge, scopes)
            return {"Authorization": f"Bearer {token.text}"}

    def challenged(self, reply: Reply, scopes: Scopes, sent: Mapping[str, str]) -> bool:
        """Take a 401 to heart; tell whether the request is worth sending again.

        Args:
            reply: the answer, with its challenge.
            scopes: that the request needs.
            sent: the header it was sent with: a token that another thread has replaced since is not lost.
        """
        challenge = parse_challenge(reply.headers.get("www-authenticate", ""))
        if challenge is None:
            return False
        with self._lock:
            fresh = challenge != self._challenge
            self._challenge = challenge
            if challenge.scheme == "basic":
                return bool(self._known().basic) and (fresh or not sent)
            token = self._tokens.get(scopes)
            if token is not None and sent.get("Authorization") == f"Bearer {token.text}":
                del self._tokens[scopes]
            return True

    @property
    def anonymous(self) -> bool:
        """True when no credentials are known for the registry."""
        with self._lock:
            return self._known() == Credentials()

    def _known(self) -> Credentials:
        if self._credentials is None:
            self._credentials = find_credentials(self._login)
        return self._credentials

    def _ask(self, challenge: Challenge, scopes: Scopes) -> _Token:
        url = self._realm(challenge)
        known = self._known()
        started = self._clock()
        if known.identity_token:
            form = {
                "grant_type": "refresh_token",
                "refresh_token": known.identity_token,
                "service": challenge.service,
                "client_id": _CLIENT,
                "scope": " ".join(sorted(scopes)),
            }
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            reply = self._transport.fetch("POST", url, headers, Body.of(urlencode(form).encode()))
        else:
            pairs = [("service", challenge.service)] if challenge.service else []
            pairs += [("scope", scope) for scope in sorted(scopes)]
            headers = {"Authorization": known.basic} if known.basic else {}
            reply = self._transport.fetch("GET", url.with_query(urlencode(pairs)), headers)
        return self._read(reply, url, started)

    def _realm(self, challenge: Challenge) -> Url:
        try:
            url = Url.parse(challenge.realm)
        except ValueError as error:
            raise ImageError(f"names a token service that is none: {error}", place=self._host) from None
        # A password goes there: never over plain HTTP, unless the registry itself may be spoken to so.
        plain = self._transport.allows_plain(url.host) and self._transport.scheme(self._host) == "http"
        if url.scheme == "http" and not plain:
            raise ImageError(
                f"names a token service without TLS, {url.host}: no password is sent there", place=self._host
            )
        return url

    def _read(self, reply: Reply, url: Url, started: float) -> _Token:
        if reply.status in PASSING:
            raise TransportError(f"the token service {url.host} answered {reply.status}")
        if reply.status != 200:
            who = "without credentials" if self._known() == Credentials() else "with the known credentials"
            raise ImageError(
                f"the token service {url.host} answered {reply.status} {who}",
                place=self._host,
                hint=f"docker login {self._login}",
            )
        try:
            value = parse_json(reply.data, "token")
            text = value.get("token") or value.get("access_token")
            life = value.get("expires_in", _DEFAULT_LIFE)
        except (FormatError, AttributeError):
            text = None
        if not isinstance(text, str) or not text or not text.isascii() or not text.isprintable():
            raise ImageError(f"the token service {url.host} sent no token", place=self._host)
        seconds = float(life) if isinstance(life, int | float) and life > 0 else _DEFAULT_LIFE
        return _Token(text, started + max(seconds - _MARGIN, seconds / 2))
