"""The sink `docker`: the image streamed into a docker engine.

The engine gets the same bytes as `archive:` writes, as they are produced: nothing is written here. It
checks every layer against its diff id, and its image id must be the digest of our config.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ralbuild.errors import ImageError, RalError
from ralbuild.image.archive import archive_chunks
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.layers import Progress
from ralbuild.image.plan import LayerDigest
from ralbuild.image.sink import SinkResult

if TYPE_CHECKING:
    from ralbuild.engine import Engine

_HINT = "start one or set DOCKER_HOST; archive:FILE can be loaded elsewhere with `docker load`"


class _StoppedError(Exception):
    """The rest of the image will not come."""


class DockerSink:
    """A `docker load` that runs in a thread of its own and is fed layer by layer; made by `open_docker`."""

    def __init__(self, engine: Engine, image: Image, tag: str, progress: Progress | None) -> None:
        self._engine = engine
        self._image = image
        self._tag = tag
        self._progress = progress or (lambda _: None)
        self._digests = {layer.digest for layer in image.unique_layers}
        self._allowed = threading.Semaphore(0)
        self._stopped = False
        self._sent = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, name="docker-load", daemon=True)
        self._present = self._find() is not None
        if not self._present:
            self._thread.start()

    def add(self, layer: Layer) -> None:
        """Let the stream go on to the end of ``layer``."""
        if self._present:
            self._progress(layer.digest.size)
        self._allowed.release()

    def finish(self) -> SinkResult:
        """Wait until the engine has the image, and name it."""
        if not self._present:
            self._thread.join()
            if self._error is not None:
                raise self._error
        found = self._find()
        if found is None:
            raise ImageError(f"the engine did not keep {self._image.config_digest}", place="docker")
        if self._tag:
            self._engine.tag(found, self._tag)
        reused = frozenset(digest.sha256 for digest in self._digests) if self._present else frozenset()
        return SinkResult(self._sent, reused, self._tag or found)

    def stop(self) -> None:
        """End the stream early; the engine drops what it got."""
        self._stopped = True
        self._allowed.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _load(self) -> None:
        try:
            self._engine.load(self._stream())
        except (RalError, _StoppedError) as error:
            self._error = error

    def _stream(self) -> Iterator[bytes]:
        for chunk in archive_chunks(self._image, self._tag, self._wait):
            if self._stopped:
                raise _StoppedError
            yield chunk
            self._sent += len(chunk)
            self._progress(len(chunk))

    def _wait(self, piece: LayerDigest) -> None:
        if piece in self._digests:
            self._allowed.acquire()

    def _find(self) -> str | None:
        """Return the engine's id of the image: our config's digest or, with containerd, our manifest's."""
        names = (self._image.config_digest, self._image.digest)
        return next((name for name in names if self._engine.find(name) is not None), None)


@contextlib.contextmanager
def open_docker(image: Image, tag: str, progress: Progress | None) -> Iterator[DockerSink]:
    """Connect to the engine that ``DOCKER_HOST`` names, else to this machine's.

    Raises:
        HostError: when none answers.
        ImageError: when it does not take the image.
    """
    from ralbuild.engine import Engine  # the SDK takes a while to import

    with Engine("--output docker", _HINT) as engine:
        sink = DockerSink(engine, image, tag, progress)
        try:
            yield sink
        finally:
            sink.stop()
