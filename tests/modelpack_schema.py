"""What the ModelPack specification demands, written from its text as JSON Schema.

https://github.com/modelpack/model-spec: docs/spec.md (manifest), docs/config.md and schema/config-schema.json.
"""

from __future__ import annotations

from typing import Any

from oci_schema import DESCRIPTOR

_TEXT = {"type": "string"}
_LIST = {"type": "array", "items": _TEXT}
_LAYER_TYPES = [
    f"application/vnd.cncf.model.{kind}.v1.{form}"
    for kind in ("weight", "weight.config", "doc", "code", "dataset")
    for form in ("raw", "tar", "tar+gzip", "tar+zstd")
]

MANIFEST: dict[str, Any] = {
    "type": "object",
    "required": ["schemaVersion", "artifactType", "config", "layers"],
    "properties": {
        "schemaVersion": {"const": 2},
        "mediaType": {"const": "application/vnd.oci.image.manifest.v1+json"},
        "artifactType": {"const": "application/vnd.cncf.model.manifest.v1+json"},
        "config": {
            "allOf": [
                DESCRIPTOR,
                {"properties": {"mediaType": {"const": "application/vnd.cncf.model.config.v1+json"}}},
            ]
        },
        "layers": {
            "type": "array",
            "minItems": 1,
            "items": {"allOf": [DESCRIPTOR, {"properties": {"mediaType": {"enum": _LAYER_TYPES}}}]},
        },
    },
}
CONFIG: dict[str, Any] = {
    "type": "object",
    "required": ["descriptor", "config", "modelfs"],
    "additionalProperties": False,
    "properties": {
        "descriptor": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                **dict.fromkeys(("authors", "datasetsURL", "licenses"), _LIST),
                **dict.fromkeys(
                    ("createdAt", "family", "docURL", "sourceURL", "version", "revision", "vendor", "title",
                     "description"),
                    _TEXT,
                ),
                "name": {"type": "string", "minLength": 1},
            },
        },
        "config": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                **dict.fromkeys(("architecture", "format", "precision", "quantization"), _TEXT),
                "paramSize": {"type": "string", "pattern": r"^[0-9]+(\.[0-9])?[QqTtBbMmKk]?$"},
                "transformerConfig": {"type": "object"},
                "capabilities": {"type": "object"},
            },
        },
        "modelfs": {
            "type": "object",
            "required": ["type", "diffIds"],
            "additionalProperties": False,
            "properties": {"type": {"const": "layers"}, "diffIds": {**_LIST, "minItems": 1}},
        },
    },
}  # fmt: skip
