"""The SHA-256 of weight files themselves, from the layers that hold them.

An image names a weight file by its layer. Who compares it with what the model's publisher says needs the
digest of the file alone: it is computed while the layer's tar goes by.
"""

from __future__ import annotations

import hashlib

from ralbuild.contract.manifest import ModelManifest, PackedWeights
from ralbuild.contract.tarball import WEIGHTS_MTIME, WeightLayer
from ralbuild.digests import CHUNK
from ralbuild.errors import ImageError
from ralbuild.image.reader import StoredImage


class OwnDigests:
    """Takes a weight layer's tar, as it is before compression, and hashes each file in it.

    Where the bytes are other ones than the manifest says, so are the digests: whoever feeds them checks
    the layer's own.
    """

    def __init__(self, layer: PackedWeights) -> None:
        frame = WeightLayer(WEIGHTS_MTIME)
        self._parts = iter(
            part
            for file in layer.files
            for part in (("", len(frame.start(file.path, file.size))), (file.path, file.size))
        )
        self._name, self._left = next(self._parts, ("", 0))
        self._digest = hashlib.sha256()
        self.digests: dict[str, str] = {}

    def feed(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""
        rest = memoryview(chunk)
        while rest or not self._left:
            part = rest[: self._left]
            if self._name:
                self._digest.update(part)
            self._left -= len(part)
            rest = rest[len(part) :]
            if self._left:
                return
            if self._name:
                self.digests[self._name] = self._digest.hexdigest()
            following = next(self._parts, None)
            if following is None:
                self._left = 1 << 62  # the paddings and the end of the tar
                self._name = ""
                return
            self._name, self._left = following
            self._digest = hashlib.sha256()


def stored_weight_digests(image: StoredImage, model: ModelManifest) -> dict[str, str]:
    """Read the weight layers of an image and return the digest of each file in them, by name.

    Raises:
        ImageError: when a layer is missing, compressed, or holds other bytes.
    """
    found: dict[str, str] = {}
    layers = {layer.diff_id: layer for layer in image.mounted().layers}
    for packed in model.weights:
        layer = layers.get(f"sha256:{packed.sha256}")
        if layer is None or not layer.media_type.endswith(".tar"):
            raise ImageError(f"holds no uncompressed layer sha256:{packed.sha256}", place=image.store)
        own, whole = OwnDigests(packed), hashlib.sha256()
        try:
            with image.open_layer(layer) as blob:
                while chunk := blob.read(CHUNK):
                    whole.update(chunk)
                    own.feed(chunk)
        except OSError as error:
            raise ImageError(f"layer {layer.digest} cannot be read: {error}", place=image.store) from None
        if whole.hexdigest() != packed.sha256:
            raise ImageError(f"layer {layer.digest} is damaged", place=image.store)
        found |= own.digests
    return found
