"""What an image will be, as an inert value: nothing is read, hashed or written here.

docs/image-plan.md is the written form. The same plan gives the same image bytes, whatever writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ralbuild.contract.codec import sha256_hex
from ralbuild.contract.places import MODEL_DIR
from ralbuild.contract.tarball import DIR_MODE, FILE_MODE, LINK_MODE, PACKING
from ralbuild.digests import FileDigests, Witness

Kind = Literal["small", "weights"]


@dataclass(frozen=True, slots=True)
class HostFile:
    """Bytes that are in a file of this machine when the image is written: all of it, or a range.

    Attributes:
        path: the file; links are followed.
        size: of the range in bytes.
        sha256: what its bytes must hash to, in hex; empty when only the layer's digest is known.
        purpose: under which the digest cache may know its layer's digest; empty when it does not.
        start: where the range begins.
        file_size: of the whole file; -1 means ``size``. A file of another size fails the build.
        witness: that this run hashed it for its layer's digest; in another state than then it fails the
            build. None when it was not hashed, or when a write might not show in the state.
    """

    path: Path
    size: int
    sha256: str = ""
    purpose: str = field(default="", compare=False)
    start: int = 0
    file_size: int = -1
    witness: Witness | None = field(default=None, compare=False)

    @property
    def is_whole(self) -> bool:
        """True when the range is the file."""
        return self.file_size in (-1, self.size)


@dataclass(frozen=True, slots=True)
class RemoteBlob:
    """A blob that a registry has; nothing of it is here until a sink needs it.

    Attributes:
        host, repository: where it is.
        digest: ``sha256:`` and hex.
        size: in bytes.
        fetch: yields the blob's bytes, checked against both; raises ImageError.
    """

    host: str
    repository: str
    digest: str
    size: int
    fetch: Callable[[], Iterator[bytes]] = field(compare=False, repr=False)


Pieces = tuple[bytes | HostFile, ...]
"""A file made of other files' bytes, in order."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A regular file: ``path`` in the image (relative, with slashes), its bytes, and 0644 or 0755."""

    path: str
    source: bytes | HostFile | Pieces
    mode: int = FILE_MODE

    @property
    def pieces(self) -> Pieces:
        """The bytes, as pieces in order."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(len(part) if isinstance(part, bytes) else part.size for part in self.pieces)


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """A symbolic link at ``path``; ``target`` is not resolved and may be absolute."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class DirEntry:
    """A directory that must be there even when empty: 0755, or 1777 for a temporary folder."""

    path: str
    mode: int = DIR_MODE


Entry = FileEntry | LinkEntry | DirEntry


@dataclass(frozen=True, slots=True)
class LayerDigest:
    """An uncompressed layer's SHA-256 in hex, which is both its digest and its diff id, and its size."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer of ours.

    Attributes:
        name: for people and for `inspect`; it goes into the image's history.
        kind: ``weights`` aligns file contents so that a file system can share them; ``small`` does not.
        entries: in any order.
        owned: folders that are ours: they and the folders below them get an entry of their own (0755)
            where a path needs them. An entry resets a lower layer's folder mode, so others get none.
            The empty string owns everything.
        known: the layer's digest when the weights were scanned already; the bytes written must match it.
    """

    name: str
    kind: Kind
    entries: tuple[Entry, ...]
    owned: tuple[str, ...] = ()
    known: LayerDigest | None = None


@dataclass(frozen=True, slots=True)
class BaseLayer:
    """A blob taken from the base unchanged.

    Attributes:
        media_type: an OCI layer type.
        digest, size: of the blob as stored; ``sha256:`` and hex, bytes.
        diff_id: of the uncompressed tar.
        source: the file, or the registry, that holds the blob.
        name: what the base calls it.
    """

    media_type: str
    digest: str
    size: int
    diff_id: str
    source: Path | RemoteBlob
    name: str = "base"


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image to build on: manifest digest, name (may be empty), its image config as parsed, its layers."""

    digest: str
    name: str
    config: Mapping[str, Any]
    layers: tuple[BaseLayer, ...]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How a container of the image runs. Applied over the base's; see docs/image-plan.md.

    Attributes:
        env: replaces a base variable in its place, or is added at the end in this order.
        entrypoint: also clears the base's command.
        cmd: default arguments.
        user: ``uid`` or ``uid:gid``; empty keeps the base's.
        workdir: empty keeps the base's.
        ports: TCP ports.
        labels: added to the base's labels, or replacing them.
        stop_signal: empty keeps the base's.
    """

    env: tuple[tuple[str, str], ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    user: str = ""
    workdir: str = ""
    ports: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = "SIGTERM"


WEIGHTS_LABEL = "io.ralbuild.weights.image"
"""Label of an image without weights: the manifest digest of the image that holds them."""
WEIGHTS_VARIABLE = "RAL_WEIGHTS_IMAGE"
"""The same for the launcher, which names it when nothing is mounted."""


def bind_weights(config: ImageConfig, digest: str) -> ImageConfig:
    """Return ``config`` with the digest of the image that holds the weights."""
    labels = {**config.labels, WEIGHTS_LABEL: digest}
    return replace(config, labels=labels, env=(*config.env, (WEIGHTS_VARIABLE, digest)))


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """A whole image.

    Attributes:
        base: None starts from nothing.
        layers: from the lowest to the highest, so from the least to the most often changed.
        config: how it runs.
        created: seconds since 1970 for the image's own dates (``SOURCE_DATE_EPOCH``, else 0).
        mtime: seconds since 1970 for every entry of our layers. Not ``created``: a new commit date
            would give every weight layer another digest.
        annotations: of the manifest; must not be the ``org.opencontainers.image.base`` ones.
        architecture: as the OCI image specification names it.
        packing: version of the rules that turn a layer into bytes.
        weights: the image that holds the weights when this one does not; its digest becomes a label.
    """

    base: BaseImage | None
    layers: tuple[LayerPlan, ...]
    config: ImageConfig
    created: int = 0
    mtime: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"
    packing: str = PACKING
    weights: ImagePlan | None = None


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One entry of our layers: layer and path, mode, and SHA-256 (hex) of its bytes or its link's target.

    A weight file is known by the digest of its layer.
    """

    layer: str
    path: str
    mode: int
    sha256: str


def _known_digest(source: bytes | HostFile | Pieces) -> str:
    if isinstance(source, bytes):
        return sha256_hex(source)
    return source.sha256 if isinstance(source, HostFile) else ""


def planned_files(plan: ImagePlan) -> tuple[PlannedFile, ...]:
    """Return what our layers will hold, in the order of the layers and of their paths; weights first."""
    out = list(planned_files(plan.weights)) if plan.weights is not None else []
    for layer in plan.layers:
        for entry in sorted(layer.entries, key=lambda item: item.path.encode()):
            if isinstance(entry, FileEntry):
                source = entry.source
                known = _known_digest(source)
                digest = known or (layer.known.sha256 if layer.known else "")
                out.append(PlannedFile(layer.name, entry.path, entry.mode, digest))
            elif isinstance(entry, LinkEntry):
                digest = sha256_hex(entry.target.encode())
                out.append(PlannedFile(layer.name, entry.path, LINK_MODE, digest))
            else:
                out.append(PlannedFile(layer.name, entry.path, entry.mode, ""))
    return tuple(out)


def weight_layer(path: Path, size: int, digests: FileDigests) -> LayerPlan:
    """Return the layer of one scanned weight file; scan and plan must use the same ``mtime``."""
    # The layer's digest covers the file's: a second hash of the file would only cost time.
    source = HostFile(path, size, purpose=digests.purpose, witness=digests.witness)
    return bundled_layer([(path.name, source)], digests)


def bundled_layer(files: Sequence[tuple[str, HostFile | Pieces]], digests: FileDigests) -> LayerPlan:
    """Return the layer that scanned weight files share.

    Args:
        files: name in the image and bytes of each, in the order of the scan.
        digests: of any of them.
    """
    folder = MODEL_DIR.strip("/")
    entries = tuple(FileEntry(f"{folder}/{name}", source) for name, source in files)
    known = LayerDigest(digests.layer_sha256, digests.layer_size)
    first, last = files[0][0], files[-1][0]
    name = f"weights {first}" if len(files) == 1 else f"weights {first} to {last}"
    return LayerPlan(name, "weights", entries, (folder,), known)
