"""What a layout holds about an image, signatures and SBOMs, pushed along with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.digests import open_regular
from ralbuild.errors import ImageError
from ralbuild.image.blobs import BLOBS
from ralbuild.image.layers import Recipe
from ralbuild.image.oci import MANIFEST_TYPE, MAX_MANIFEST, digest_of
from ralbuild.image.plan import HostFile, LayerDigest
from ralbuild.image.registry.reference import DIGEST
from ralbuild.image.registry.upload import Uploader


def push_referrers(folder: Path, digest: str, uploader: Uploader) -> tuple[str, ...]:
    """Push every manifest of the layout whose subject is ``digest``; return their digests.

    Raises:
        ImageError: when one is damaged, or the registry refuses it.
    """
    pushed = []
    for data, manifest in _referrers(folder, digest):
        for part in (manifest.get("config"), *manifest.get("layers", [])):
            uploader.put(*_blob(folder, part))
        uploader.repository.put_manifest(data)
        pushed.append(digest_of(data))
    return tuple(pushed)


def _referrers(folder: Path, digest: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    index = _read(folder / "index.json")[1]
    for entry in index.get("manifests", []):
        if entry.get("mediaType") != MANIFEST_TYPE or not DIGEST.fullmatch(str(entry.get("digest"))):
            continue
        data, manifest = _read(folder / BLOBS / entry["digest"].removeprefix("sha256:"))
        subject = manifest.get("subject")
        if isinstance(subject, dict) and subject.get("digest") == digest:
            if digest_of(data) != entry["digest"]:
                raise ImageError(
                    f"is damaged: needs {entry['digest']}, found {digest_of(data)}", place=str(folder)
                )
            yield data, manifest


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_MANIFEST + 1)
        value = parse_json(data, path.name)
    except (OSError, FormatError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise ImageError(f"cannot be read: {what}", place=str(path)) from None
    if not isinstance(value, dict):
        raise ImageError("is not a JSON object", place=str(path))
    return data, value


def _blob(folder: Path, part: Mapping[str, Any]) -> tuple[Recipe, LayerDigest]:
    try:
        digest, size = str(part["digest"]), int(part["size"])
    except (KeyError, TypeError, ValueError):
        raise ImageError("a manifest has a part without digest and size", place=str(folder)) from None
    if not DIGEST.fullmatch(digest):
        raise ImageError(f"needs a sha256 digest, found {digest!r}", place=str(folder))
    name = digest.removeprefix("sha256:")
    return Recipe(f"blob {digest}", (HostFile(folder / BLOBS / name, size),)), LayerDigest(name, size)
