"""The blobs of an OCI layout folder or archive: opened by name, checked against their digests."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.digests import open_regular
from ralbuild.errors import ImageError
from ralbuild.image.blobs import BLOBS
from ralbuild.image.oci import DIGEST, MAX_MANIFEST, digest_of

FILE_LIMIT = 64 << 20
"""Largest file or small blob that is read into memory, in bytes."""

OpenBlob = Callable[[str], IO[bytes]]
"""Opens a file of the store, such as ``blobs/sha256/<hex>``; raises OSError, KeyError or TarError."""


def folder_opener(path: Path) -> OpenBlob:
    """Return what opens the files of the layout folder ``path``."""
    return lambda name: open_regular(path / name)


@contextlib.contextmanager
def archive_opener(path: Path) -> Iterator[OpenBlob]:
    """Yield what opens the members of the archive ``path``, or raise ImageError."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(path))
            tar = stack.enter_context(tarfile.open(fileobj=file, mode="r:"))
        except (OSError, tarfile.TarError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            hint = "needs an OCI layout folder or an archive of one"
            raise ImageError(f"cannot be read as an image: {what}", place=str(path), hint=hint) from None

        def open_blob(name: str) -> IO[bytes]:
            file = tar.extractfile(name)
            if file is None:
                raise FileNotFoundError(name)
            return file

        yield open_blob


def open_file(open_blob: OpenBlob, name: str, store: str) -> IO[bytes]:
    """Open a file of the store, or raise ImageError."""
    try:
        return open_blob(name)
    except (OSError, KeyError, tarfile.TarError, ValueError):
        hint = "needs an OCI layout folder or an archive of one" if name == "index.json" else ""
        raise ImageError(f"has no readable {name}", place=store, hint=hint) from None


def read_blob(open_blob: OpenBlob, digest: Any, store: str, limit: int = 2 * MAX_MANIFEST) -> bytes:
    """Return a small blob.

    Raises:
        ImageError: when it is missing, damaged, or longer than ``limit``.
    """
    name = f"{BLOBS}/{hex_of(digest, store)}"
    data = _read(open_blob, name, store, limit)
    if digest_of(data) != digest:
        raise ImageError(f"is damaged: needs {digest}, found {digest_of(data)}", place=f"{store}: {name}")
    return data


def read_json(open_blob: OpenBlob, name: str, store: str) -> dict[str, Any]:
    """Return the JSON object in a file that no digest names, such as index.json."""
    return as_object(_read(open_blob, name, store, 2 * MAX_MANIFEST), name, store)


def read_json_blob(open_blob: OpenBlob, digest: Any, store: str) -> dict[str, Any]:
    """Return the JSON object in a blob, checked against its digest."""
    return as_object(read_blob(open_blob, digest, store), f"{BLOBS}/{hex_of(digest, store)}", store)


def as_object(data: bytes, name: str, store: str) -> dict[str, Any]:
    """Parse the JSON object ``data``; ``name`` and ``store`` say where it lies."""
    try:
        value = parse_json(data, name)
    except FormatError as error:
        raise ImageError(str(error), place=store) from None
    if not isinstance(value, dict):
        raise ImageError(f"{name} is not a JSON object", place=store)
    return value


def hex_of(digest: Any, store: str) -> str:
    """Return the hex digits of a ``sha256:`` digest, or raise ImageError."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ImageError(f"needs a sha256 digest, found {digest!r}", place=store)
    return digest.removeprefix("sha256:")


def _read(open_blob: OpenBlob, name: str, store: str, limit: int) -> bytes:
    with open_file(open_blob, name, store) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ImageError(f"is longer than {limit} bytes", place=f"{store}: {name}")
    return data
