"""A finished image of an OCI layout, ready to be written somewhere else byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ralbuild.image.assemble import Image, base_layer
from ralbuild.image.blobs import BLOBS
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
        artifacts = tuple(item.artifact for item in image.artifacts())
        layers = tuple(
            replace(base_layer(layer), descriptor=descriptor)
            for layer, descriptor in zip(base.layers, image.layers, strict=True)
        )
    return Image(layers, config, manifest, architecture, artifacts)
