"""One registry host: redirects, challenges and attempts; `client` speaks of blobs and manifests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

from ralbuild.errors import ImageError
from ralbuild.image.registry.auth import Auth, Scopes
from ralbuild.image.registry.messages import Answer, Body, Reply, TransportError, Url
from ralbuild.image.registry.profiles import Profile
from ralbuild.image.registry.retry import PASSING, Retry
from ralbuild.image.registry.transport import Transport

_REDIRECTS = (301, 302, 303, 307, 308)
_REDIRECT_LIMIT = 5
_HINTS = {
    401: "docker login {host}",
    403: "docker login {host}; the account needs the right to push and pull there",
    404: "some registries want a repository to be made before the first push",
    413: "the registry or a proxy before it takes no such body: --chunk-size SIZE or --reshard SIZE",
}


class Registry:
    """One host: how to reach it, who we are there, how patient to be.

    Args:
        host: as the user wrote it.
        transport: shared by all hosts of a run.
        profile: what it takes.
        retry: how often and how long to try.
        login: under which name credentials are filed; the host unless given.
    """

    def __init__(
        self,
        host: str,
        transport: Transport,
        profile: Profile,
        retry: Retry | None = None,
        login: str = "",
    ) -> None:
        self.host = host
        self.transport = transport
        self.profile = profile
        self.retry = retry or Retry()
        self.login = login or host
        self.auth = Auth(transport, host, self.login)
        self._root: Url | None = None

    @property
    def root(self) -> Url:
        """Where the API lives: ``https://HOST/v2/``.

        Raises:
            TransportError: when it has to be found out and the host does not answer.
        """
        if self._root is None:
            self._root = Url.parse(f"{self.transport.scheme(self.host)}://{self.host}/v2/")
        return self._root

    def send(
        self,
        method: str,
        url: Url | str,
        scopes: Scopes,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        *,
        wait: float | None = None,
    ) -> Reply:
        """Send a request until there is an answer that will not change; return it whatever its status.

        Args:
            method: of HTTP.
            url: absolute, or below ``/v2/``.
            scopes: what the request needs to be allowed to do.
            headers, body, wait: as of `Transport.open`.

        Raises:
            ImageError: when the attempts are used up.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                with self.once(method, url, scopes, headers, body, wait=wait) as answer:
                    reply = answer.whole()
            except TransportError as error:
                self.pause(attempt, str(error))
                continue
            if reply.status not in PASSING:
                return reply
            self.pause(attempt, explain(reply), reply.headers)

    def pause(self, attempt: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        """Wait as long as `Retry.seconds` says, or raise what it raises."""
        self.transport.sleep(self.retry.seconds(attempt, why, self.host, headers))

    @contextlib.contextmanager
    def once(
        self,
        method: str,
        url: Url | str,
        scopes: Scopes,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        *,
        wait: float | None = None,
    ) -> Iterator[Answer]:
        """Send a request once and yield its answer: follows redirects, and answers one challenge.

        Credentials go to the registry's own scheme, host and port, and nowhere else.

        Raises:
            TransportError: when there is no answer.
            ImageError: when the registry redirects to where nobody should go.
        """
        target = self.root.join(url) if isinstance(url, str) else url
        challenged = False
        for _ in range(_REDIRECT_LIMIT + 2):
            own = target.origin == self.root.origin
            sent = self.auth.header(scopes) if own else {}
            with self.transport.open(method, target, {**(headers or {}), **sent}, body, wait=wait) as answer:
                denied = answer.status == 401 and own and not challenged
                moved = answer.status in _REDIRECTS and "location" in answer.headers
                if not denied and not moved:
                    yield answer
                    return
                reply = answer.whole()
            if moved:
                if body is not None and not body.again:
                    raise ImageError(f"redirects an upload in chunks ({reply.status})", place=self.host)
                target = self.follow(target, reply)
                continue
            challenged = True
            again = body is None or body.again
            if not self.auth.challenged(reply, scopes, sent) or not again:
                yield answer
                return
        raise ImageError(f"redirects more than {_REDIRECT_LIMIT} times", place=self.host)

    def follow(self, base: Url, reply: Reply) -> Url:
        """Return where the answer's ``Location`` leads.

        Raises:
            ImageError: when there is none, or it leads from TLS to plain HTTP.
        """
        location = reply.headers.get("location", "")
        if not location:
            raise ImageError(f"answered {reply.status} without a Location", place=self.host)
        try:
            target = base.join(location)
        except ValueError as error:
            raise ImageError(f"sent a Location that is none: {error}", place=self.host) from None
        if target.scheme == "http" and (
            base.scheme == "https" or not self.transport.allows_plain(target.host)
        ):
            raise ImageError(
                f"sent a Location without TLS, at {target.host}",
                place=self.host,
                hint="a proxy before the registry must pass on X-Forwarded-Proto",
            )
        return target

    def refuse(self, reply: Reply, what: str) -> ImageError:
        """Return the error for an answer that is no success; ``what`` says what was asked for."""
        hint = _HINTS.get(reply.status, "").format(host=self.login)
        return ImageError(f"{what}: {explain(reply)}", place=self.host, hint=hint)


def explain(reply: Reply) -> str:
    """Return what an answer says of itself: its status and the registry's first error."""
    text = f"the registry answered {reply.status}"
    try:
        first = json.loads(reply.data)["errors"][0]
        parts = [str(first.get(name, "")) for name in ("code", "message")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return text
    said = " ".join(part for part in parts if part)[:300]
    return f"{text}: {said}" if said else text
