"""One file of one layer, read where it lies."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass

from ralbuild.errors import ImageError
from ralbuild.image.store import FILE_LIMIT


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of one layer: the file's bytes, or None when the layer deletes it."""

    data: bytes | None


def find_in_layer(tar: tarfile.TarFile, wanted: str) -> Found | None:
    """Look for ``wanted`` in one layer; None when the layer says nothing about it."""
    parts = wanted.split("/")
    parents = ["/".join(parts[:count]) for count in range(len(parts))]
    deleted = {f"{parent}/.wh.{part}".lstrip("/") for parent, part in zip(parents, parts, strict=True)}
    deleted |= {f"{parent}/.wh..wh..opq".lstrip("/") for parent in parents}
    hidden = False
    for member in tar:
        name = member.name.removeprefix("./").strip("/")
        if name == wanted:
            return Found(_content(tar, member, wanted))
        hidden = hidden or name in deleted
    return Found(None) if hidden else None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, wanted: str) -> bytes | None:
    try:
        file = tar.extractfile(member)
    except KeyError:
        file = None  # a link to another layer
    if file is None:
        return None
    with file:
        data = file.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ImageError(f"{wanted} is longer than {FILE_LIMIT} bytes")
    return data
