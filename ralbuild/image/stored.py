"""A finished image of an OCI layout, ready to be written somewhere else byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ralbuild.image.assemble import Image, Layer, base_layer
from ralbuild.image.blobs import BLOBS
from ralbuild.image.layers import Recipe
from ralbuild.image.oci import Descriptor
from ralbuild.image.plan import HostFile, LayerDigest
from ralbuild.image.reader import open_image, read_base


def stored_image(folder: Path, name: str = "") -> Image:
    """Return the image of the layout at ``folder`` with what lies beside it; its manifest keeps its digest.

    Raises:
        ImageError: when there is no such image or a blob is missing.
    """
    base = read_base(folder, name)
    with open_image(folder, name) as image:
        config, manifest = (
            (folder / BLOBS / digest.removeprefix("sha256:")).read_bytes()
            for digest in (image.config_digest, image.digest)
        )
        architecture = str(image.config["architecture"])
        weights = image.weights()
        beside = tuple(stored_layer(layer, folder) for layer in weights.layers) if weights else ()
        artifacts = (*image.companions(), *(item.artifact for item in image.artifacts()))
        layers = tuple(
            replace(base_layer(layer), descriptor=descriptor)
            for layer, descriptor in zip(base.layers, image.layers, strict=True)
        )
    return Image(layers, config, manifest, architecture, artifacts, beside)


def stored_layer(layer: Descriptor, folder: Path) -> Layer:
    """Return a layer of the layout at ``folder`` as it is: a blob to link, else to copy."""
    sha256 = layer.digest.removeprefix("sha256:")
    blob = folder / BLOBS / sha256
    recipe = Recipe(layer.name, (HostFile(blob, layer.size),), blob)
    return Layer(layer, LayerDigest(sha256, layer.size), recipe)
