"""A second manifest over the model's layers, as the CNCF ModelPack specification has it.

The same blobs, under other media types: what reads ModelPack artifacts (modctl, model registries, P2P
distribution) finds weights and configuration without knowing anything of ralbuild, and nothing is stored
or sent twice. https://github.com/modelpack/model-spec, ``docs/spec.md`` and ``docs/config.md``.
"""

from __future__ import annotations

from ralbuild.contract.codec import canonical_json
from ralbuild.contract.manifest import ModelManifest
from ralbuild.contract.places import MODEL_DIR
from ralbuild.image.artifacts import Artifact
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.oci import MANIFEST_TYPE, digest_of
from ralbuild.image.planning import MODEL_LAYER

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
WEIGHT_TYPE = "application/vnd.cncf.model.weight.v1.tar"
WEIGHT_CONFIG_TYPE = "application/vnd.cncf.model.weight.config.v1.tar"
FILE_PATH = "org.cncf.model.filepath"

_PRECISION = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
_SCALES = (("q", 10**15), ("t", 10**12), ("b", 10**9), ("m", 10**6), ("k", 10**3))


def modelpack(image: Image, model: ModelManifest, name: str, licence: str) -> Artifact:
    """Return the ModelPack manifest of the model in ``image``, or of the one in the image beside it.

    Args:
        image: as assembled.
        model: what is known of its files.
        name: what the model is called.
        licence: SPDX id, or the card's own word; may be empty.
    """
    layers = [layer for layer in image.unique_layers if _type_of(layer)]
    config = canonical_json(
        {
            "descriptor": {"name": name, "family": model.model_type, **_licenses(licence)},
            "config": {
                "architecture": "transformer",
                "format": "safetensors",
                "paramSize": parameter_size(model.parameters),
                "precision": _PRECISION.get(model.dtype, model.dtype.lower()),
            },
            "modelfs": {"type": "layers", "diffIds": [layer.descriptor.diff_id for layer in layers]},
        }
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {
                "mediaType": _type_of(layer),
                "digest": layer.descriptor.digest,
                "size": layer.descriptor.size,
                "annotations": {FILE_PATH: _path_of(layer)},
            }
            for layer in layers
        ],
    }
    return Artifact(canonical_json(manifest), (config,), ARTIFACT_TYPE, suffix="modelpack")


def parameter_size(parameters: int) -> str:
    """Return a number of parameters as the specification writes it: ``134.5m``, ``8b``, ``500``."""
    for letter, scale in _SCALES:
        tenths = (parameters * 10 + scale // 2) // scale
        if tenths >= 10:
            whole, part = divmod(tenths, 10)
            return f"{whole}.{part}{letter}" if part else f"{whole}{letter}"
    return str(parameters)


def _licenses(name: str) -> dict[str, list[str]]:
    return {"licenses": [name]} if name else {}


def _type_of(layer: Layer) -> str:
    if layer.descriptor.kind == "weights":
        return WEIGHT_TYPE
    return WEIGHT_CONFIG_TYPE if layer.descriptor.name == MODEL_LAYER else ""


def _path_of(layer: Layer) -> str:
    """Return where the layer's files lie once it is unpacked: one file, or the folder of several."""
    folder, files = MODEL_DIR.strip("/"), layer.recipe.files
    alone = layer.descriptor.kind == "weights" and " to " not in layer.descriptor.name
    return f"{folder}/{layer.descriptor.name.removeprefix('weights ')}" if alone and files else folder
