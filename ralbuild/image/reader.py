"""Read images that lie in an OCI layout folder or an OCI archive, ours or anybody's.

Every JSON file is checked against the digest that names it. Nothing is unpacked; one small file of a
layer can be read where it lies.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ralbuild.digests import open_regular
from ralbuild.errors import ImageError
from ralbuild.image.artifacts import (
    Artifact,
    StoredArtifact,
    companion_suffix,
    is_about,
    is_artifact,
    read_artifact,
    read_companions,
)
from ralbuild.image.blobs import BLOBS
from ralbuild.image.layerfile import find_in_layer
from ralbuild.image.oci import (
    CONFIG_TYPE,
    INDEX_TYPE,
    LAYER_KIND,
    LAYER_NAME,
    LAYER_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    entry_name,
)
from ralbuild.image.plan import WEIGHTS_LABEL, BaseImage, BaseLayer
from ralbuild.image.store import (
    OpenBlob,
    archive_opener,
    as_object,
    folder_opener,
    hex_of,
    open_file,
    read_blob,
    read_json,
    read_json_blob,
)

_DOCKER = "application/vnd.docker.distribution.manifest"
_INDEX_TYPES = (INDEX_TYPE, f"{_DOCKER}.list.v2+json")
_MANIFEST_TYPES = (MANIFEST_TYPE, f"{_DOCKER}.v2+json")
_CONFIG_TYPES = (CONFIG_TYPE, "application/vnd.docker.container.image.v1+json")
_LAYER_TYPES = {
    LAYER_TYPE: LAYER_TYPE,
    f"{LAYER_TYPE}+gzip": f"{LAYER_TYPE}+gzip",
    f"{LAYER_TYPE}+zstd": f"{LAYER_TYPE}+zstd",
    "application/vnd.docker.image.rootfs.diff.tar": LAYER_TYPE,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": f"{LAYER_TYPE}+gzip",
}
"""Layer types that are accepted, and the OCI type of the same bytes."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One image of a store, open as long as `open_image` is.

    Attributes:
        name: what the index calls it; may be empty.
        digest: of the manifest.
        manifest, config: as parsed.
        config_digest: of the config: Docker's image id.
        layers: from the lowest.
        store: where it lies, for messages.
        manifest_json: the manifest's bytes.
    """

    name: str
    digest: str
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    config_digest: str
    layers: tuple[Descriptor, ...]
    store: str
    manifest_json: bytes
    _open: OpenBlob
    _index: Mapping[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """The config's labels."""
        return dict((self.config.get("config") or {}).get("Labels") or {})

    def open_layer(self, layer: Descriptor) -> IO[bytes]:
        """Open a layer's blob as stored, which may be compressed; its digest is not checked."""
        return self.open_blob(layer.digest)

    def open_blob(self, digest: str) -> IO[bytes]:
        """Open any blob of the store as stored; its digest is not checked."""
        return open_file(self._open, f"{BLOBS}/{hex_of(digest, self.store)}", self.store)

    def artifacts(self) -> tuple[StoredArtifact, ...]:
        """Return what the store holds about this image, in the order of its index.

        Raises:
            ImageError: when a part of one is missing, too long or damaged.
        """
        found = []
        for entry in _flat_entries(self._open, self._index, self.store):
            if entry.get("mediaType") != MANIFEST_TYPE or companion_suffix(entry):
                continue
            if not is_artifact(entry) and not is_about(self._open, entry, self.digest, self.store):
                continue  # another image, which may be broken and is none of our business
            artifact = read_artifact(self._open, entry, self.digest, self.store)
            if artifact is not None:
                found.append(artifact)
        return tuple(found)

    def companions(self) -> tuple[Artifact, ...]:
        """Return the manifests beside this image that belong to it, in the order of the index.

        Raises:
            ImageError: when one is missing or damaged.
        """
        entries = _flat_entries(self._open, self._index, self.store)
        return read_companions(self._open, entries, self.name, self.store)

    def weights(self) -> StoredImage | None:
        """Return the image that holds this one's weights; None when they are in this one.

        Raises:
            ImageError: when the store lacks it, or it is damaged.
        """
        digest = self.labels.get(WEIGHTS_LABEL)
        if not digest:
            return None
        try:
            return _load(self._open, {"digest": digest}, self.store, self._index)
        except ImageError as error:
            hint = f"copy it too: it has this image's name and -weights, and the digest {digest}"
            what = f"the image that holds the weights cannot be read: {error.problems[0].message}"
            raise ImageError(what, place=self.store, hint=hint) from None

    def mounted(self) -> StoredImage:
        """Return this image as it runs: with the layers of the one that holds its weights below its own.

        Raises:
            ImageError: as `weights`.
        """
        weights = self.weights()
        return replace(self, layers=(*weights.layers, *self.layers)) if weights is not None else self

    def read_file(self, path: str) -> bytes | None:
        """Return the file at ``path`` as a container would see it; None when there is none.

        Raises:
            ImageError: when a layer cannot be read, or the file is longer than `FILE_LIMIT`.
        """
        wanted = path.strip("/")
        for layer in reversed(self.layers):
            if layer.media_type.endswith("+zstd"):
                raise ImageError("cannot read inside a layer compressed with zstd", place=self.store)
            try:
                with self.open_layer(layer) as blob, tarfile.open(fileobj=blob) as tar:
                    found = find_in_layer(tar, wanted)
            except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
                raise ImageError(f"layer {layer.digest} is damaged: {error}", place=self.store) from None
            if found is not None:
                return found.data
        return None


@contextlib.contextmanager
def open_image(
    path: Path, name: str = "", architecture: str = "amd64", digest: str = ""
) -> Iterator[StoredImage]:
    """Open an image of the OCI layout folder or archive at ``path``.

    Args:
        path: a folder with ``oci-layout`` and ``index.json``, or a tar of one.
        name: which image, as the index calls it; needed only where the store has several.
        architecture: which platform of a multi-platform image.
        digest: of the entry that is meant, an image or an index of several platforms.

    Raises:
        ImageError: when it is no such thing, holds no such image, or a JSON file is damaged.
    """
    with contextlib.ExitStack() as stack:
        store = str(path)
        open_blob = folder_opener(path) if _is_folder(path) else stack.enter_context(archive_opener(path))
        index = read_json(open_blob, "index.json", store)
        chosen = index
        if digest:
            entries = [entry for entry in _entries(index, store) if entry.get("digest") == digest]
            if not entries:
                raise ImageError(f"holds no {digest}", place=store)
            chosen = {"manifests": entries[:1]}
        yield _load(open_blob, _select(open_blob, chosen, name, architecture, store), store, index)


def load_image(
    open_blob: OpenBlob, index: Mapping[str, Any], store: str, name: str = "", architecture: str = "amd64"
) -> StoredImage:
    """Return the image that is meant in ``index``; see `open_image`."""
    return _load(open_blob, _select(open_blob, index, name, architecture, store), store, index)


def read_base(folder: Path, name: str = "", architecture: str = "amd64", digest: str = "") -> BaseImage:
    """Return the image of a layout folder as a base; layers are checked when they are written.

    Raises:
        ImageError: when there is no such image or a blob is missing or of another size.
    """
    if not _is_folder(folder):
        raise ImageError("is not a folder", place=str(folder), hint="needs an OCI image layout folder")
    with open_image(folder, name, architecture, digest) as image:
        diff_ids = image.config["rootfs"]["diff_ids"]
        layers = []
        for layer, diff_id in zip(image.layers, diff_ids, strict=True):
            source = folder / BLOBS / hex_of(layer.digest, image.store)
            found = _size(source)
            if found != layer.size:
                what = "is missing" if found is None else f"needs {layer.size} bytes, found {found}"
                raise ImageError(f"the layer's blob {what}", place=str(source), hint="make the base anew")
            layers.append(BaseLayer(layer.media_type, layer.digest, layer.size, diff_id, source, layer.name))
        return BaseImage(image.digest, image.name, image.config, tuple(layers))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise ImageError(f"cannot be read: {error.strerror}", place=str(path)) from None


def _size(path: Path) -> int | None:
    """Return the size of a regular file, or None when there is none that can be read."""
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None


def _select(
    open_blob: OpenBlob, index: Mapping[str, Any], name: str, architecture: str, store: str
) -> Mapping[str, Any]:
    """Return the one index entry that is meant, looking into nested indexes for the platform."""
    found = []
    for entry in _entries(index, store):
        if (entry_name(entry) != name) if name else is_artifact(entry):
            continue
        if entry.get("mediaType") in _INDEX_TYPES:
            nested = read_json_blob(open_blob, entry.get("digest"), store)
            found += [
                {**item, "annotations": entry.get("annotations")}
                for item in _entries(nested, store)
                if _is_platform(item, architecture)
            ]
        elif entry.get("mediaType") in _MANIFEST_TYPES and _is_platform(entry, architecture):
            found.append(entry)
    if len({str(entry.get("digest")) for entry in found}) == 1:
        return found[0]
    what = f"an image called {name!r}" if name else f"one image for linux/{architecture}"
    names = ", ".join(sorted({entry_name(entry) or "(no name)" for entry in found}))
    raise ImageError(f"needs {what}, found {len(found)}" + (f": {names}" if names else ""), place=store)


def _entries(index: Mapping[str, Any], store: str) -> list[dict[str, Any]]:
    entries = index.get("manifests", [])
    if not _are(dict, entries):
        raise ImageError("an index does not list descriptors", place=store)
    return list(entries)


def _is_platform(entry: Mapping[str, Any], architecture: str) -> bool:
    platform = entry.get("platform")
    if not isinstance(platform, dict):
        return True
    return (platform.get("os"), platform.get("architecture")) == ("linux", architecture)


def _flat_entries(open_blob: OpenBlob, index: Mapping[str, Any], store: str) -> Iterator[Mapping[str, Any]]:
    """Yield an index's entries, and those of the referrers lists in it that are kept under a name."""
    for entry in _entries(index, store):
        if entry.get("mediaType") == INDEX_TYPE and is_artifact(entry):
            yield from _entries(read_json_blob(open_blob, entry.get("digest"), store), store)
        else:
            yield entry


def _load(open_blob: OpenBlob, entry: Mapping[str, Any], store: str, index: Mapping[str, Any]) -> StoredImage:
    manifest_json = read_blob(open_blob, entry.get("digest"), store)
    manifest = as_object(manifest_json, "the manifest", store)
    try:
        config_type, config_digest = manifest["config"]["mediaType"], manifest["config"]["digest"]
        if config_type not in _CONFIG_TYPES:
            raise ImageError(f"is not a container image: its config is {config_type}", place=store)
        config = read_json_blob(open_blob, config_digest, store)
        _check_config(config, store)
        diff_ids = config["rootfs"]["diff_ids"]
        layers = tuple(
            _descriptor(item, str(diff_id), store)
            for item, diff_id in zip(manifest["layers"], diff_ids, strict=True)
        )
    except (KeyError, TypeError, ValueError):
        raise ImageError("the manifest and config do not describe the same layers", place=store) from None
    return StoredImage(
        name=entry_name(entry),
        digest=str(entry["digest"]),
        manifest=manifest,
        config=config,
        config_digest=config_digest,
        layers=layers,
        store=store,
        manifest_json=manifest_json,
        _open=open_blob,
        _index=index,
    )


def _check_config(config: Mapping[str, Any], store: str) -> None:
    """Make sure of the types of what is merged into our own config."""
    settings, history = config.get("config") or {}, config.get("history") or []
    if not isinstance(settings, dict):
        raise ImageError("the image config has no settings", place=store)
    env, labels = settings.get("Env") or [], settings.get("Labels") or {}
    commands = [settings.get(name) or [] for name in ("Entrypoint", "Cmd")]
    texts = [settings.get(name) or "" for name in ("User", "WorkingDir", "StopSignal")]
    ports = settings.get("ExposedPorts") or {}
    if not (
        _are(dict, history)
        and all(_are(str, items) for items in (env, *commands, texts))
        and isinstance(labels, dict)
        and _are(str, list(labels.values()))
        and isinstance(ports, dict)
    ):
        raise ImageError("the image config has a setting of the wrong type", place=store)
    if any("\0" in text for items in (env, *commands, texts) for text in items):
        raise ImageError("the image config has a setting with a zero byte", place=store)


def _are(kind: type, items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, kind) for item in items)


def _descriptor(item: Mapping[str, Any], diff_id: str, store: str) -> Descriptor:
    media_type = _LAYER_TYPES.get(item["mediaType"])
    if media_type is None:
        raise ImageError(f"has a layer of the unsupported type {item['mediaType']}", place=store)
    hex_of(item["digest"], store)
    hex_of(diff_id, store)
    annotations = item.get("annotations") or {}
    if not isinstance(annotations, dict):
        raise ImageError("a layer's annotations are not an object", place=store)
    size = item["size"]
    if type(size) is not int or size < 0:
        raise ImageError(f"a layer's size is {size!r}", place=store)
    name, kind = str(annotations.get(LAYER_NAME, "layer")), str(annotations.get(LAYER_KIND, ""))
    return Descriptor(media_type, item["digest"], size, diff_id, name, kind)
