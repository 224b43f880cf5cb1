"""The sink `docker`: the image streamed into a docker engine. Only this module imports the docker SDK.

The engine gets the same bytes as `archive:` writes, as they are produced: nothing is written here. It
checks every layer against its diff id, and its image id must be the digest of our config.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from ralbuild.errors import HostError, ImageError
from ralbuild.image.archive import archive_pieces
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.layers import Progress, recipe_chunks
from ralbuild.image.sink import SinkResult

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.images import Image as DockerImage

_LOAD_SECONDS = 3600
"""The engine says nothing while it unpacks a layer."""


class _StoppedError(Exception):
    """The rest of the image will not come."""


class DockerSink:
    """A `docker load` that runs in a thread of its own and is fed layer by layer; made by `open_docker`."""

    def __init__(self, client: DockerClient, image: Image, tag: str, progress: Progress | None) -> None:
        self._client = client
        self._image = image
        self._tag = tag
        self._progress = progress or (lambda _: None)
        self._allowed = threading.Semaphore(0)
        self._stopped = False
        self._sent = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, name="docker-load", daemon=True)
        self._present = _find_image(client, image) is not None
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
        found = _find_image(self._client, self._image)
        if found is None:
            raise ImageError(f"the engine did not keep {self._image.config_digest}", place="docker")
        if self._tag:
            found.tag(self._tag)
        layers = frozenset(layer.digest.sha256 for layer in self._image.layers)
        name = self._tag or str(found.id)
        return SinkResult(self._sent, layers if self._present else frozenset(), name)

    def stop(self) -> None:
        """End the stream early; the engine drops what it got."""
        self._stopped = True
        self._allowed.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _load(self) -> None:
        from docker.errors import APIError, DockerException
        from requests import RequestException

        try:
            # Its types know files only; requests sends whatever can be iterated over.
            self._client.images.load(cast(Any, self._stream()))
        except (ImageError, _StoppedError) as error:
            self._error = error
        except (DockerException, RequestException, OSError) as error:
            said = error.explanation if isinstance(error, APIError) and error.explanation else str(error)
            self._error = ImageError(f"the engine did not take the image: {said[:300]}", place="docker")

    def _stream(self) -> Iterator[bytes]:
        layers = {layer.digest for layer in self._image.layers}
        for recipe, digest in archive_pieces(self._image, self._tag):
            if digest in layers:
                self._allowed.acquire()
            for chunk in recipe_chunks(recipe):
                if self._stopped:
                    raise _StoppedError
                yield bytes(chunk)
                self._sent += len(chunk)
                self._progress(len(chunk))


@contextlib.contextmanager
def open_docker(image: Image, tag: str, progress: Progress | None) -> Iterator[DockerSink]:
    """Connect to the engine that ``DOCKER_HOST`` names, else to this machine's.

    Raises:
        HostError: when none answers.
        ImageError: when it does not take the image.
    """
    client = _connect()
    try:
        sink = DockerSink(client, image, tag, progress)
        try:
            yield sink
        finally:
            sink.stop()
    finally:
        client.close()


def _connect() -> DockerClient:
    import docker

    try:
        client = docker.from_env(timeout=_LOAD_SECONDS)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        raise HostError(
            f"no docker engine answers: {str(error)[:300]}",
            place="--output docker",
            hint="start one or set DOCKER_HOST; archive:FILE can be loaded elsewhere with `docker load`",
        ) from None
    return client


def _find_image(client: DockerClient, image: Image) -> DockerImage | None:
    """Return the engine's image by the digest of our config, or, with containerd, of our manifest."""
    from docker.errors import ImageNotFound

    for digest in (image.config_digest, image.digest):
        with contextlib.suppress(ImageNotFound):
            return client.images.get(digest)
    return None
