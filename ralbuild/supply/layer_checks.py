"""Every layer of an image, read once: sizes, digests, diff ids, and the weight files in them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from ralbuild.contract.manifest import ModelManifest
from ralbuild.digests import CHUNK
from ralbuild.errors import ImageError
from ralbuild.image.oci import Descriptor
from ralbuild.image.own_digests import OwnDigests
from ralbuild.image.reader import StoredImage

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: its name, whether it is good, and what was found."""

    name: str
    good: bool
    detail: str


class Reading:
    """The one read of every layer of an image, and of the one that holds its weights.

    Args:
        model: what must be in them.
        progress: called with the number of bytes read in each step.
        own: hash each weight file itself too, because there is something to compare it with.

    Attributes:
        weight_digests: SHA-256 of each weight file itself by name, from good layers.
    """

    def __init__(self, model: ModelManifest, progress: Progress | None, *, own: bool) -> None:
        self.weight_digests: dict[str, str] = {}
        self._own = own
        self._missing = {f"sha256:{item.sha256}": item for item in model.weights}
        self._files = len(model.weight_files)
        self._progress = progress

    def check(self, image: StoredImage, layer: Descriptor) -> Check:
        """Read a layer and say whether it is what the manifest and the config say."""
        name = f"layer {layer.name}"
        packed = self._missing.pop(layer.diff_id, None)
        own = OwnDigests(packed) if packed is not None and self._own else None
        try:
            with image.open_layer(layer) as blob:
                wrong = _wrong_layer(blob, layer, own, self._progress)
        except (ImageError, OSError, zlib.error, EOFError) as error:
            wrong = str(error)
        if own is not None and not wrong:
            self.weight_digests |= own.digests
        return Check(name, good=not wrong, detail=wrong or layer.digest)

    def model(self) -> Check:
        """Say, after all layers, whether the weights are those that the model's manifest names."""
        if self._missing:
            return Check(
                "weights", good=False, detail=f"there is no layer with the diff id {min(self._missing)}"
            )
        return Check("weights", good=True, detail=f"{self._files} files in the layers that the model names")


def _wrong_layer(
    blob: IO[bytes], layer: Descriptor, own: OwnDigests | None, progress: Progress | None
) -> str:
    """Read a layer once, for ``own`` too; return what is wrong with its size, digest or diff id."""
    stored, plain, size = hashlib.sha256(), hashlib.sha256(), 0
    gunzip = _Gunzip() if layer.media_type.endswith("+gzip") else None
    packed = layer.media_type.endswith("+zstd")
    while chunk := blob.read(CHUNK):
        size += len(chunk)
        stored.update(chunk)
        for part in gunzip.feed(chunk) if gunzip else ():
            plain.update(part)
            if own is not None:
                own.feed(part)
        if own is not None and not gunzip and not packed:
            own.feed(chunk)
        if progress:
            progress(len(chunk))
    if size != layer.size:
        return f"needs {layer.size} bytes, found {size}"
    if f"sha256:{stored.hexdigest()}" != layer.digest:
        return f"needs {layer.digest}, found sha256:{stored.hexdigest()}"
    if packed:
        return ""  # the digest holds; the standard library cannot say more before Python 3.14
    diff_id = f"sha256:{(plain if gunzip else stored).hexdigest()}"
    return "" if diff_id == layer.diff_id else f"needs the diff id {layer.diff_id}, found {diff_id}"


class _Gunzip:
    """Unpacks a gzip stream of any number of members, in pieces of bounded size."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what ``data`` unpacks to; raises zlib.error."""
        while data:
            if self._member.eof:
                self._member = zlib.decompressobj(wbits=31)
            yield self._member.decompress(data, CHUNK)
            data = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
