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
from ralbuild.image.assemble import Image, base_layer
from ralbuild.image.oci import PACKING_LABEL, config_json, manifest_json
from ralbuild.image.plan import WEIGHTS_LABEL, BaseImage, ImagePlan, bind_weights
from ralbuild.image.planning import BASE_LABELS, OUR_LABELS, check_base, run_config
from ralbuild.image.reader import StoredImage
from ralbuild.image.stored import stored_layer

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
    run = run_config(labels["io.ralbuild.bundle"].removeprefix("sha256:"), labels)
    weights = image.weights()
    plan = ImagePlan(
        base=base,
        layers=(),
        config=bind_weights(run, labels[WEIGHTS_LABEL]) if weights else run,
        created=_seconds(image.config),
        annotations=annotations,
        architecture=str(image.config["architecture"]),
        packing=image.labels[PACKING_LABEL],
    )
    layers = [base_layer(layer) for layer in base.layers]
    layers += [stored_layer(layer, folder) for layer in image.layers if layer.kind != "base"]
    descriptors = [layer.descriptor for layer in layers]
    config = config_json(plan, descriptors)
    manifest = manifest_json(plan, config, descriptors)
    beside = tuple(stored_layer(layer, folder) for layer in weights.layers) if weights else ()
    return Image(tuple(layers), config, manifest, plan.architecture, image.companions(), beside)


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
