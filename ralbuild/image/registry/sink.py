"""The sink `registry:REF`: blobs from where their bytes lie straight to the registry, the manifest last."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from ralbuild.errors import UsageError
from ralbuild.image.artifacts import Artifact
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.layers import Progress
from ralbuild.image.oci import BASE_NAME
from ralbuild.image.registry.client import Repository
from ralbuild.image.registry.connect import Registries
from ralbuild.image.registry.messages import StoppedError
from ralbuild.image.registry.profiles import check_limits
from ralbuild.image.registry.reference import Reference, parse_reference
from ralbuild.image.registry.upload import Uploader
from ralbuild.image.sink import SinkResult

_LOOK_SECONDS = 0.5
"""Longest wait without a look at signals: one that comes just before a lock is waited for is not seen."""


class RegistrySink:
    """An image that is being pushed; made by `open_registry`, which ends its threads."""

    def __init__(
        self,
        target: Reference,
        image: Image,
        repository: Repository,
        uploader: Uploader,
        jobs: int,
    ) -> None:
        self._target = target
        self._image = image
        self._repository = repository
        self._uploader = uploader
        self._pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="push")
        # One more layer than is being sent: other outputs of this run stay close to what is read.
        self._room = threading.Semaphore(max(1, jobs))
        self._sending: dict[str, Future[int]] = {}
        self._base = _base_repository(image, target)

    def add(self, layer: Layer) -> None:
        """Begin to send a layer; waits while as many are being sent as may be."""
        while not self._room.acquire(timeout=_LOOK_SECONDS):
            pass
        self._raise_failed()
        self._sending[layer.digest.sha256] = self._pool.submit(self._put, layer)

    def finish(self) -> SinkResult:
        """Wait for the layers, then send config, manifest and what lies beside the image."""
        left = set(self._sending.values())
        while left:
            left = wait(left, _LOOK_SECONDS, FIRST_EXCEPTION).not_done
            self._raise_failed()
        sent = {name: future.result() for name, future in self._sending.items()}
        self._put_artifacts(self._image.companions)  # before the image that needs them
        self._uploader.put_bytes(self._image.config)
        reference = self._target.tag or self._image.digest
        if self._repository.manifest_digest(reference) != self._image.digest:
            self._repository.put_manifest(self._image.manifest, reference)
        self._put_artifacts(item for item in self._image.artifacts if not item.suffix)
        name = replace(self._target, digest=self._image.digest)
        return SinkResult(
            sum(sent.values()), frozenset(key for key, size in sent.items() if not size), str(name)
        )

    def _put_artifacts(self, artifacts: Iterable[Artifact]) -> None:
        for artifact in artifacts:
            for data in artifact.blobs:
                self._uploader.put_bytes(data)
            self._repository.put_manifest(artifact.manifest, artifact.name(self._target.tag))

    def stop(self) -> None:
        """Wait until no thread works any more."""
        self._pool.shutdown(cancel_futures=True)

    def _put(self, layer: Layer) -> int:
        try:
            remote = layer.recipe.remote
            near = remote is not None and remote.host == self._target.host
            sources = [remote.repository] if remote is not None and near else []
            if layer.descriptor.kind == "base" and self._base and self._base not in sources:
                sources.append(self._base)
            return self._uploader.put(layer.recipe, layer.digest, sources)
        finally:
            self._room.release()

    def _raise_failed(self) -> None:
        for future in self._sending.values():
            error = future.exception() if future.done() and not future.cancelled() else None
            if error is not None and not isinstance(error, StoppedError):
                raise error


@contextlib.contextmanager
def open_registry(
    target: Reference, image: Image, registries: Registries, progress: Progress | None
) -> Iterator[RegistrySink]:
    """Open ``target`` for ``image``: what the registry would refuse is refused before anything is sent.

    Raises:
        ImageError: when a layer is above the registry's cap, or the registry refuses something.
    """
    repository = registries.repository(target)
    check_limits(image, repository.registry.profile)
    uploader = Uploader(repository, chunk_size=registries.options.chunk_size, progress=progress)
    sink = RegistrySink(target, image, repository, uploader, registries.options.jobs)
    try:
        yield sink
    except BaseException:
        registries.close()
        raise
    finally:
        sink.stop()


def _base_repository(image: Image, target: Reference) -> str:
    """Return the repository that the image's base is said to come from, when it is on the same host."""
    name = image.annotations.get(BASE_NAME, "")
    try:
        base = parse_reference(name, BASE_NAME)
    except UsageError:
        return ""
    return base.repository if base.host == target.host else ""
