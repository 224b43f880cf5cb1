"""Sending one blob: asked for first, mounted where it can be, else streamed from where its bytes lie.

A registry keeps nothing of a broken upload that a client could rely on (Debian's forgets the session),
so a blob that fails is sent from its start again: it is the unit of retrying, and costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ralbuild.errors import ImageError
from ralbuild.image.layers import Progress, Recipe, WrongLayerError, digest_layer, recipe_chunks
from ralbuild.image.plan import LayerDigest
from ralbuild.image.registry.client import Repository
from ralbuild.image.registry.messages import Body, Chunks, Reply, TransportError, Url
from ralbuild.image.registry.profiles import CHUNKED
from ralbuild.image.registry.retry import PASSING
from ralbuild.image.registry.session import Registry, explain

_REFUSED_WAY = frozenset({400, 404, 405, 411, 413, 415, 416, 501})
"""Answers to an upload that may mean: not in this way."""
_LOST = frozenset({404, 416})
"""They may also mean that the registry has forgotten the upload."""
_OCTETS = {"Content-Type": "application/octet-stream"}


class Uploader:
    """Sends blobs to one repository; safe to use from several threads.

    Args:
        repository: where to.
        chunk_size: bytes of a chunk: send in chunks from the start; 0 leaves it to the profile.
        progress: called with bytes sent; with less than zero when an upload starts over.
    """

    def __init__(
        self, repository: Repository, *, chunk_size: int = 0, progress: Progress | None = None
    ) -> None:
        self.repository = repository
        self._chunk_size = chunk_size
        self._progress = progress or (lambda _: None)
        ways = repository.registry.profile.upload
        first = (CHUNKED,) if chunk_size else ()
        self._ways = (*first, *(way for way in ways if way not in first))

    def put(self, recipe: Recipe, digest: LayerDigest, mount_from: Sequence[str] = ()) -> int:
        """Make sure that the blob is there; return the bytes that were sent for it: 0 when it was.

        Args:
            recipe: how to produce it; produced anew for each attempt.
            digest: what it must be.
            mount_from: repositories of the same registry that have it.

        Raises:
            WrongLayerError: when what the recipe gives is not ``digest``.
            ImageError: when the registry refuses it, or the attempts are used up.
        """
        registry, name = self.repository.registry, f"sha256:{digest.sha256}"
        attempt = 0
        while True:
            attempt += 1
            if self.repository.has_blob(name, digest.size, scopes=self.repository.push):
                self._progress(digest.size)
                return 0
            meter = _Meter(self._progress)
            try:
                return self._send(recipe, digest, mount_from if attempt == 1 else (), meter)
            except (TransportError, _Failed) as error:
                meter.undo()
                why, headers = str(error), error.headers if isinstance(error, _Failed) else {}
                if isinstance(error, _Failed) and error.damaged:
                    _check_source(recipe, digest)
                registry.pause(attempt, f"{recipe.name}: {why}", headers)

    def put_bytes(self, data: bytes) -> str:
        """Store a small blob; return its digest."""
        recipe = Recipe("metadata", (data,))
        digest = digest_layer(recipe)
        self.put(recipe, digest)
        return f"sha256:{digest.sha256}"

    def _send(self, recipe: Recipe, digest: LayerDigest, mount_from: Sequence[str], meter: _Meter) -> int:
        for source in mount_from:
            if source != self.repository.name and self._mount(digest, source):
                meter(digest.size)
                return 0
        reply: Reply | None = None
        for way in self._ways:
            start = self._begin()
            send = self._chunked if way == CHUNKED else self._single
            reply = send(start, recipe, digest, meter)
            if reply.status in (201, 204):
                self._check_stored(reply, digest)
                return digest.size
            if reply.status in PASSING or reply.status == 401 or _says_damaged(reply):
                raise _Failed(reply)
            if reply.status not in _REFUSED_WAY:
                break
            meter.undo()
        assert reply is not None  # a profile has at least one way
        if reply.status in _LOST:
            raise _Failed(reply)
        raise self.repository.registry.refuse(reply, f"does not take {recipe.name} ({digest.size} bytes)")

    def _mount(self, digest: LayerDigest, source: str) -> bool:
        """Ask for the blob of another repository; a refusal only means that it has to be sent."""
        registry, name = self.repository.registry, f"sha256:{digest.sha256}"
        if not registry.profile.mount:
            return False
        scopes = self.repository.push | {f"repository:{source}:pull"}
        url = f"{self.repository.name}/blobs/uploads/?mount={name}&from={source}"
        try:
            with registry.once("POST", url, scopes) as answer:
                reply = answer.whole()
        except (TransportError, ImageError):
            return False
        if reply.status == 202:  # a session was opened instead; an idle one would lie there for days
            self._cancel(registry, reply)
        return reply.status == 201 and self.repository.has_blob(name, digest.size)

    def _cancel(self, registry: Registry, reply: Reply) -> None:
        try:
            with registry.once(
                "DELETE", registry.follow(registry.root, reply), self.repository.push
            ) as answer:
                answer.whole()
        except (TransportError, ImageError):
            pass  # it is the registry's own litter

    def _begin(self) -> tuple[Url, Reply]:
        """Open an upload; return where to send the blob."""
        registry = self.repository.registry
        url = f"{self.repository.name}/blobs/uploads/"
        reply = registry.send("POST", url, self.repository.push)
        if reply.status not in (201, 202):
            raise registry.refuse(reply, f"does not take uploads to {self.repository.name}")
        return registry.follow(registry.root.join(url), reply), reply

    def _single(self, start: tuple[Url, Reply], recipe: Recipe, digest: LayerDigest, meter: _Meter) -> Reply:
        def chunks() -> Chunks:
            meter.undo()
            return meter.pass_on(_exactly(recipe, digest))

        body = Body(digest.size, chunks)
        return self._once("PUT", start[0].with_query(f"digest=sha256:{digest.sha256}"), _OCTETS, body)

    def _chunked(self, start: tuple[Url, Reply], recipe: Recipe, digest: LayerDigest, meter: _Meter) -> Reply:
        url, reply = start
        least = reply.headers.get("oci-chunk-min-length", "")
        profile = self.repository.registry.profile
        step = profile.chunk(digest.size, self._chunk_size, int(least[:18]) if least.isdecimal() else 0)
        cutter = _Cutter(_exactly(recipe, digest))
        for at in range(0, digest.size, step):
            size = min(step, digest.size - at)
            headers = {**_OCTETS, "Content-Range": f"{at}-{at + size - 1}"}
            body = Body(size, partial(_counted, cutter, size, meter), again=False)
            reply = self._once("PATCH", url, headers, body)
            # 202 is the specification's; ECR says 201 and others 204, with the same meaning.
            if reply.status not in (201, 202, 204):
                return reply
            url = self.repository.registry.follow(url, reply) if "location" in reply.headers else url
        cutter.finish()
        return self._once("PUT", url.with_query(f"digest=sha256:{digest.sha256}"), _OCTETS, Body.of(b""))

    def _once(self, method: str, url: Url, headers: dict[str, str], body: Body) -> Reply:
        registry = self.repository.registry
        wait = registry.transport.limits.stored
        with registry.once(method, url, self.repository.push, headers, body, wait=wait) as answer:
            return answer.whole()

    def _check_stored(self, reply: Reply, digest: LayerDigest) -> None:
        stored = reply.headers.get("docker-content-digest", f"sha256:{digest.sha256}")
        if stored != f"sha256:{digest.sha256}":
            raise ImageError(
                f"stored another blob: sent sha256:{digest.sha256}, it has {stored}",
                place=f"{self.repository.registry.host}/{self.repository.name}",
            )


class _Failed(Exception):  # noqa: N818 - an answer, not yet an error
    """An upload that may work the next time."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(explain(reply))
        self.headers = reply.headers
        self.damaged = _says_damaged(reply)


class _Meter:
    """Counts what an attempt has sent, so that a failed one can be taken back."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._sent = 0

    def __call__(self, size: int) -> None:
        self._sent += size
        self._progress(size)

    def undo(self) -> None:
        self._progress(-self._sent)
        self._sent = 0

    def pass_on(self, chunks: Chunks) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self(len(chunk))


class _Cutter:
    """Hands out a stream in pieces of given sizes, without copying."""

    def __init__(self, chunks: Iterator[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._rest:
                self._rest = memoryview(next(self._chunks))
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            yield piece

    def finish(self) -> None:
        """Read on to the end, where sources check that they did not change."""
        for _ in self._chunks:
            pass


def _counted(cutter: _Cutter, size: int, meter: _Meter) -> Chunks:
    return meter.pass_on(cutter.take(size))


def _exactly(recipe: Recipe, digest: LayerDigest) -> Iterator[bytes | memoryview]:
    """Yield the recipe's bytes: as many as were promised, or an error instead of the last ones."""
    if recipe.size != digest.size:
        raise WrongLayerError(recipe, digest, "another size")
    return recipe_chunks(recipe)


def _check_source(recipe: Recipe, digest: LayerDigest) -> None:
    """The registry says that the bytes are wrong: find out whether it is right."""
    found = digest_layer(recipe)
    if found != digest:
        raise WrongLayerError(recipe, digest, found.sha256)


def _says_damaged(reply: Reply) -> bool:
    return reply.status == 400 and b"DIGEST_INVALID" in reply.data
