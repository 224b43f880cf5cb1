"""A base from a registry, shallowly: manifest and config are read, layers stay where they are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.errors import ImageError
from ralbuild.image.oci import MAX_MANIFEST
from ralbuild.image.plan import BaseImage, BaseLayer, RemoteBlob
from ralbuild.image.reader import StoredImage, load_image
from ralbuild.image.registry.client import MANIFEST_TYPES, Repository
from ralbuild.image.registry.reference import Reference


def read_image(repository: Repository, reference: Reference, architecture: str = "amd64") -> StoredImage:
    """Return the image at ``reference``, which has a digest, with manifest and config alone.

    Raises:
        ImageError: when it is missing or damaged, no image for ``architecture``, or the registry lies.
    """
    blobs = _Blobs(repository, str(reference))
    index = {"manifests": [blobs.descriptor(reference.digest)]}
    return load_image(blobs.open, index, str(reference), architecture=architecture)


def pull_base(repository: Repository, reference: Reference, architecture: str = "amd64") -> BaseImage:
    """Return the image at ``reference``, which has a digest: of a manifest, or of an index of platforms.

    The base's own digest is that of the platform's manifest; its name keeps what was asked for.

    Raises:
        ImageError: as `read_image`.
    """
    image = read_image(repository, reference, architecture)
    layers = tuple(
        BaseLayer(
            layer.media_type,
            layer.digest,
            layer.size,
            diff_id,
            RemoteBlob(
                reference.host,
                reference.repository,
                layer.digest,
                layer.size,
                partial(_fetch, repository, layer.digest, layer.size),
            ),
            layer.name,
        )
        for layer, diff_id in zip(image.layers, image.config["rootfs"]["diff_ids"], strict=True)
    )
    return BaseImage(image.digest, str(reference), image.config, layers)


class _Blobs:
    """Opens ``blobs/sha256/<hex>`` as `ralbuild.image.reader` asks; a registry keeps manifests elsewhere."""

    def __init__(self, repository: Repository, place: str) -> None:
        self._repository = repository
        self._place = place
        self._manifests: dict[str, bytes] = {}
        self._listed: set[str] = set()

    def descriptor(self, digest: str) -> dict[str, Any]:
        """Read a manifest or index; return a descriptor of it without a platform."""
        data, kind = self._repository.get_manifest(digest)
        value = self._parsed(data)
        kind = str(value.get("mediaType") or kind)
        if kind not in MANIFEST_TYPES:
            raise ImageError(
                f"is no image of today: its manifest is {kind or 'without a type'}", place=self._place
            )
        self._manifests[digest] = data
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def open(self, name: str) -> IO[bytes]:
        """Return the bytes of a manifest or config."""
        digest = f"sha256:{name.rpartition('/')[2]}"
        if digest in self._listed and digest not in self._manifests:
            self._manifests[digest] = self._repository.get_manifest(digest)[0]
        data = self._manifests.get(digest)
        if data is None:
            return io.BytesIO(self._repository.get_blob(digest, MAX_MANIFEST))
        listed = self._parsed(data).get("manifests") or []
        self._listed |= {str(item.get("digest")) for item in listed if isinstance(item, dict)}
        return io.BytesIO(data)

    def _parsed(self, data: bytes) -> dict[str, Any]:
        try:
            value = parse_json(data, "manifest")
        except FormatError as error:
            raise ImageError(str(error), place=self._place) from None
        if not isinstance(value, dict):
            raise ImageError("the manifest is not a JSON object", place=self._place)
        return value


def _fetch(repository: Repository, digest: str, size: int) -> Iterator[bytes]:
    return repository.read_blob(digest, size)
