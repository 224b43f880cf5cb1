"""What is stored beside an image and points at it: signatures, attestations, bills of materials.

An artifact is a manifest of its own whose ``subject`` is the image (image-spec 1.1, "Guidelines for
Artifact Usage"). It never changes the image's digest. A layout lists it in index.json with the
descriptor that a registry's referrers list would have (distribution-spec, "Listing Referrers").

A companion is a manifest that the image belongs to and not the other way round: the image that holds its
weights, the ModelPack manifest of the same files. It has no subject, and the image's name with a suffix.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ralbuild.contract.codec import canonical_json
from ralbuild.errors import ImageError
from ralbuild.image.oci import CONFIG_TYPE, MANIFEST_TYPE, REF_NAME, digest_of, entry_name
from ralbuild.image.store import FILE_LIMIT, OpenBlob, as_object, read_blob, read_json_blob

EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
BESIDE = "io.ralbuild.beside"
"""Annotation of a companion's index entry: the suffix of its name."""
_TAG = re.compile(r"sha256-([0-9a-f]{64})(?:\.[A-Za-z0-9._-]+)?")


@dataclass(frozen=True, slots=True)
class Artifact:
    """One artifact, every byte decided.

    Attributes:
        manifest: canonical JSON; it names the image as its subject, unless it is a companion.
        blobs: its config and layers; of a companion the config, its layers are the image's or beside them.
        artifact_type: what a referrers list calls it; empty for an image.
        annotations: of its descriptor in such a list.
        tag: a name that older tools look for; empty for none.
        suffix: of a companion's name, such as ``weights``; empty for what is no companion.
    """

    manifest: bytes
    blobs: tuple[bytes, ...]
    artifact_type: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    suffix: str = ""

    @property
    def digest(self) -> str:
        """The manifest's digest."""
        return digest_of(self.manifest)

    def name(self, image: str) -> str:
        """Return its name beside the image of that name; empty for none."""
        return companion_name(image, self.suffix) if self.suffix else self.tag

    def entry(self, image: str = "") -> dict[str, Any]:
        """Return its descriptor for an index that calls the image ``image``."""
        entry: dict[str, Any] = {
            "mediaType": MANIFEST_TYPE,
            "digest": self.digest,
            "size": len(self.manifest),
        }
        # What has a tag is an image to old tools, and its manifest says no type.
        if not self.tag and self.artifact_type:
            entry["artifactType"] = self.artifact_type
        annotations = dict(self.annotations)
        annotations |= {REF_NAME: name} if (name := self.name(image)) else {}
        annotations |= {BESIDE: self.suffix} if self.suffix else {}
        return entry | ({"annotations": annotations} if annotations else {})


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """Something that the store holds about an image: a signature, an attestation, a bill of materials.

    Attributes:
        digest: of its manifest.
        artifact_type: as its manifest says; the first layer's type where it does not.
        annotations: of its manifest.
        layers: media type, annotations and bytes of each layer.
        artifact: the same, ready to be written somewhere else byte for byte.
    """

    digest: str
    artifact_type: str
    annotations: Mapping[str, Any]
    layers: tuple[tuple[str, Mapping[str, Any], bytes], ...]
    artifact: Artifact


def make_artifact(
    subject: bytes, artifact_type: str, data: bytes, annotations: Mapping[str, str]
) -> Artifact:
    """Return the artifact that holds ``data`` as its one layer.

    Args:
        subject: the manifest of the image that it is about.
        artifact_type: media type of the artifact and of its layer.
        data: the content.
        annotations: of the manifest, repeated in its descriptor.
    """
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact_type,
        "config": _descriptor(EMPTY_TYPE, EMPTY),
        "layers": [_descriptor(artifact_type, data)],
        "subject": _descriptor(MANIFEST_TYPE, subject),
        "annotations": dict(annotations),
    }
    return Artifact(canonical_json(manifest), (EMPTY, data), artifact_type, dict(annotations))


def make_tagged_artifact(
    subject: bytes, layer_type: str, data: bytes, annotations: Mapping[str, str], suffix: str
) -> Artifact:
    """Return an artifact as tools from before referrers find it: an image under a name made of the digest.

    Args:
        subject: the manifest of the image that it is about.
        layer_type: media type of ``data``.
        data: the content.
        annotations: of the layer.
        suffix: end of the name, such as ``sig``.
    """
    config = canonical_json(
        {
            "architecture": "",
            "config": {},
            "os": "",
            "rootfs": {"type": "layers", "diff_ids": [digest_of(data)]},
        }
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _descriptor(CONFIG_TYPE, config),
        "layers": [_descriptor(layer_type, data) | {"annotations": dict(annotations)}],
    }
    tag = f"{digest_of(subject).replace(':', '-')}.{suffix}"
    return Artifact(canonical_json(manifest), (config, data), layer_type, {}, tag)


def is_artifact(entry: Mapping[str, Any]) -> bool:
    """Tell whether an index entry is something about an image or beside one, and not an image to run."""
    about = bool(entry.get("artifactType")) or _TAG.fullmatch(entry_name(entry)) is not None
    return about or bool(companion_suffix(entry))


def companion_name(image: str, suffix: str) -> str:
    """Return the name of the companion of the image of that name, which may have none."""
    return f"{image}-{suffix}" if image else suffix


def companion_suffix(entry: Mapping[str, Any]) -> str:
    """Return the suffix that an index entry says its name has; empty for what is no companion."""
    return _texts(entry).get(BESIDE, "")


def read_companions(
    open_blob: OpenBlob, entries: Iterable[Mapping[str, Any]], image: str, store: str
) -> tuple[Artifact, ...]:
    """Return the companions of the image of that name; their layers are not read.

    Raises:
        ImageError: when a manifest or config is missing or damaged.
    """
    found = []
    for entry in entries:
        suffix = companion_suffix(entry)
        if not suffix or entry_name(entry) != companion_name(image, suffix):
            continue
        manifest_json = read_blob(open_blob, entry.get("digest"), store)
        manifest = as_object(manifest_json, f"the manifest of {entry_name(entry)}", store)
        config = manifest.get("config")
        config_json = read_blob(open_blob, config.get("digest") if isinstance(config, dict) else None, store)
        kind = str(manifest.get("artifactType", ""))
        found.append(Artifact(manifest_json, (config_json,), kind, suffix=suffix))
    return tuple(found)


def subject_of(entry: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    """Return the digest of the image that an index entry with this manifest is about, or the empty string."""
    subject = manifest.get("subject")
    if isinstance(subject, dict):
        return str(subject.get("digest", ""))
    found = _TAG.fullmatch(entry_name(entry))
    return f"sha256:{found[1]}" if found else ""


def is_about(open_blob: OpenBlob, entry: Mapping[str, Any], subject: str, store: str) -> bool:
    """Tell whether an index entry is about the image ``subject`` though only its manifest says so.

    Other tools need not repeat the artifact's type in the index. What cannot be read is about nothing.
    """
    with contextlib.suppress(ImageError):
        return subject_of(entry, read_json_blob(open_blob, entry.get("digest"), store)) == subject
    return False


def read_artifact(
    open_blob: OpenBlob, entry: Mapping[str, Any], subject: str, store: str
) -> StoredArtifact | None:
    """Return what an index entry names when it is about the image ``subject``, else None.

    Args:
        open_blob: of the store.
        entry: a descriptor of a manifest.
        subject: digest of the image.
        store: for messages.

    Raises:
        ImageError: when a part of it is missing, too long or damaged.
    """
    manifest_json = read_blob(open_blob, entry.get("digest"), store)
    manifest = as_object(manifest_json, "an artifact's manifest", store)
    if subject_of(entry, manifest) != subject:
        return None
    digest = str(entry["digest"])
    config, items = manifest.get("config"), manifest.get("layers", [])
    if not isinstance(config, dict) or not isinstance(items, list) or not all(map(_is_object, items)):
        raise ImageError(f"{digest} does not describe its parts", place=store)
    blobs = [read_blob(open_blob, part.get("digest"), store, FILE_LIMIT) for part in (config, *items)]
    layers = tuple(
        (str(item.get("mediaType", "")), _texts(item), data)
        for item, data in zip(items, blobs[1:], strict=True)
    )
    kind = str(manifest.get("artifactType") or (layers[0][0] if layers else ""))
    notes = {name: text for name, text in _texts(entry).items() if name != REF_NAME}
    source = Artifact(manifest_json, tuple(blobs), kind, notes, entry_name(entry))
    return StoredArtifact(digest, kind, _texts(manifest), layers, source)


def _texts(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the annotations of a descriptor or manifest; those that are no text are left out."""
    found = item.get("annotations")
    if not isinstance(found, dict):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
