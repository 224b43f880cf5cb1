"""Put an image on another base: new config and manifest, the same layers, not a byte of them read.

The result is byte for byte what a fresh build of the same inputs on that base gives. Everything that
differs between the two is in the image's own JSON and labels, so neither the model nor the old base is
needed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ralbuild import __version__
from ralbuild.contract.tarball import PACKING
from ralbuild.errors import ImageError
from ralbuild.image.assemble import Image, Layer, base_layer
from ralbuild.image.blobs import BLOBS
from ralbuild.image.layers import Recipe
from ralbuild.image.oci import PACKING_LABEL, Descriptor, config_json, manifest_json
from ralbuild.image.plan import BaseImage, HostFile, ImagePlan, LayerDigest
from ralbuild.image.planning import BASE_LABELS, OUR_LABELS, check_base, run_config
from ralbuild.image.reader import StoredImage

_BASE_ANNOTATIONS = "org.opencontainers.image.base."
_CREATED = "org.opencontainers.image.created"


def rebase_image(image: StoredImage, folder: Path, base: BaseImage) -> Image:
    """Return ``image`` on ``base``; only JSON is read.

    Args:
        image: open in the layout at ``folder``.
        folder: where its blobs lie.
        base: what to put it on.

    Raises:
        ImageError: when the base breaks the label contract, or the image is not one that this version
            would build the same way.
    """
    _check_image(image)
    check_base(base, image.labels.get("io.ralbuild.target", ""))
    labels = {name: value for name, value in image.labels.items() if _is_ours(name)}
    annotations = {
        name: value
        for name, value in (image.manifest.get("annotations") or {}).items()
        if name != _CREATED and not name.startswith(_BASE_ANNOTATIONS)
    }
    plan = ImagePlan(
        base=base,
        layers=(),
        config=run_config(labels["io.ralbuild.bundle"].removeprefix("sha256:"), labels),
        created=_seconds(image.config),
        annotations=annotations,
        architecture=str(image.config["architecture"]),
        packing=image.labels[PACKING_LABEL],
    )
    layers = [base_layer(layer) for layer in base.layers]
    layers += [_moved(layer, folder) for layer in image.layers if layer.kind != "base"]
    descriptors = [layer.descriptor for layer in layers]
    config = config_json(plan, descriptors)
    return Image(tuple(layers), config, manifest_json(plan, config, descriptors), plan.architecture)


def _check_image(image: StoredImage) -> None:
    version, packing = image.labels.get("io.ralbuild.version"), image.labels.get(PACKING_LABEL)
    if version is None or "io.ralbuild.bundle" not in image.labels:
        raise ImageError("is no image of ralbuild", place=image.store)
    if (version, packing) != (__version__, PACKING):
        raise ImageError(
            f"was built by ralbuild {version} with packing {packing}, this is {__version__} with {PACKING}",
            place=image.store,
            hint="rebase with that version, or build the image anew",
        )
    kinds = [layer.kind == "base" for layer in image.layers]
    if kinds != sorted(kinds, reverse=True) or not kinds[0]:
        raise ImageError(
            "its base is not its lowest layers", place=image.store, hint="build the image anew on that base"
        )


def _is_ours(label: str) -> bool:
    ours = label.startswith(OUR_LABELS) and not label.startswith(BASE_LABELS)
    return ours and label != PACKING_LABEL


def _seconds(config: Mapping[str, Any]) -> int:
    text = str(config.get("created", ""))
    try:
        return int(dt.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=dt.UTC).timestamp())
    except ValueError:
        raise ImageError(f"needs a date in the config, found {text[:40]!r}") from None


def _moved(layer: Descriptor, folder: Path) -> Layer:
    """Return a layer of the image as it is: a blob to link, or to copy where that cannot be."""
    sha256 = layer.digest.removeprefix("sha256:")
    blob = folder / BLOBS / sha256
    recipe = Recipe(layer.name, (HostFile(blob, layer.size),), blob)
    return Layer(layer, LayerDigest(sha256, layer.size), recipe)
