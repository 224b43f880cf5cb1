"""`--base`: an image to build on, from a layout folder or a registry, chosen by digest."""

from __future__ import annotations

import io
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ralbuild.digests import open_regular
from ralbuild.errors import ImageError, UsageError
from ralbuild.image.layerfile import find_in_layer
from ralbuild.image.oci import DIGEST
from ralbuild.image.plan import BaseImage, RemoteBlob
from ralbuild.image.reader import read_base
from ralbuild.image.registry.reference import Reference, parse_reference

if TYPE_CHECKING:
    from ralbuild.image.registry.connect import Registries

REMOTE_LIMIT = 32 << 20
"""Bytes of a registry's layer that are fetched to read a file in it: a list of packages, not a library."""
FORMS = "oci:DIR[@sha256:DIGEST] or HOST/NAME@sha256:DIGEST"


@dataclass(frozen=True, slots=True)
class LayoutBase:
    """An image of an OCI layout folder; ``digest`` says which, or is empty where there is one only."""

    path: Path
    digest: str = ""


BaseSource = LayoutBase | Reference


def parse_base(text: str, place: str = "--base") -> BaseSource:
    """Return the base that ``text`` names (`FORMS`).

    Raises:
        UsageError: when it is none, or a registry's image without a digest: a tag can move.
    """
    if text.startswith("oci:"):
        path, at, digest = text.removeprefix("oci:").rpartition("@")
        if at and DIGEST.fullmatch(digest):
            return LayoutBase(Path(path), digest)
        if text == "oci:":
            raise UsageError(f"needs {FORMS}, found {text!r}", place=place)
        return LayoutBase(Path(text.removeprefix("oci:")))
    reference = parse_reference(text.removeprefix("registry:"), place)
    if not reference.digest:
        raise UsageError(
            f"needs a digest, found {text!r}: a tag can stand for another image tomorrow",
            place=place,
            hint=f"{reference.name}@sha256:...; `skopeo inspect docker://{text}` prints it",
        )
    return reference


def open_base(source: BaseSource, registries: Registries) -> BaseImage:
    """Read manifest and config of the base; its layers are read when an output needs them.

    Raises:
        ImageError: when there is no such image, or what is read is not what its digest says.
    """
    if isinstance(source, LayoutBase):
        return read_base(source.path, digest=source.digest)
    from ralbuild.image.registry.base import pull_base

    return pull_base(registries.repository(source), source)


def read_base_file(base: BaseImage, path: str) -> bytes | None:
    """Return a small file of a base as a container would see it; None when there is none.

    Layers are read from the top. Of a base in a registry those up to `REMOTE_LIMIT` are fetched, whole.

    Raises:
        ImageError: when a layer cannot be read, or the file lies below one that is too large to fetch.
    """
    for layer in reversed(base.layers):
        if isinstance(layer.source, RemoteBlob) and layer.size > REMOTE_LIMIT:
            hint = "copy the base to a layout: skopeo copy --preserve-digests, then --base oci:DIR"
            what = f"{path} lies in or below a layer of {layer.size} bytes, which is not fetched for it"
            raise ImageError(what, place=base.name, hint=hint)
        if layer.media_type.endswith("+zstd"):
            raise ImageError("cannot read inside a layer compressed with zstd", place=base.name)
        try:
            with _open(layer.source) as blob, tarfile.open(fileobj=blob) as tar:
                found = find_in_layer(tar, path.strip("/"))
        except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
            raise ImageError(f"layer {layer.digest} is damaged: {error}", place=base.name) from None
        if found is not None:
            return found.data
    return None


def _open(source: Path | RemoteBlob) -> IO[bytes]:
    return io.BytesIO(b"".join(source.fetch())) if isinstance(source, RemoteBlob) else open_regular(source)
