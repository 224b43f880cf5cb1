"""What image-spec 1.1 demands of each JSON document, written from its text as JSON Schema.

Sections: descriptor.md, image-layout.md, image-index.md, manifest.md, config.md, annotations.md.
"""

from __future__ import annotations

from typing import Any

_DIGEST = {"type": "string", "pattern": r"^[a-z0-9]+(?:[+._-][a-z0-9]+)*:[A-Za-z0-9=_-]+$"}
_MEDIA_TYPE = {
    "type": "string",
    "pattern": r"^[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}(?:;.*)?$",
}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_LIST_OF_TEXTS = {"type": "array", "items": {"type": "string"}}
_TIME = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)$"}

DESCRIPTOR: dict[str, Any] = {
    "type": "object",
    "required": ["mediaType", "digest", "size"],
    "properties": {
        "mediaType": _MEDIA_TYPE,
        "digest": _DIGEST,
        "size": {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
        "urls": _LIST_OF_TEXTS,
        "annotations": _TEXTS,
        "data": {"type": "string"},
        "artifactType": _MEDIA_TYPE,
        "platform": {
            "type": "object",
            "required": ["architecture", "os"],
            "properties": {"architecture": {"type": "string"}, "os": {"type": "string"}},
        },
    },
}
LAYOUT: dict[str, Any] = {
    "type": "object",
    "required": ["imageLayoutVersion"],
    "properties": {"imageLayoutVersion": {"enum": ["1.0.0"]}},
}
INDEX: dict[str, Any] = {
    "type": "object",
    "required": ["schemaVersion", "manifests"],
    "properties": {
        "schemaVersion": {"const": 2},
        "mediaType": {"const": "application/vnd.oci.image.index.v1+json"},
        "artifactType": _MEDIA_TYPE,
        "manifests": {"type": "array", "items": DESCRIPTOR},
        "subject": DESCRIPTOR,
        "annotations": _TEXTS,
    },
}
MANIFEST: dict[str, Any] = {
    "type": "object",
    "required": ["schemaVersion", "config", "layers"],
    "properties": {
        "schemaVersion": {"const": 2},
        "mediaType": {"const": "application/vnd.oci.image.manifest.v1+json"},
        "artifactType": _MEDIA_TYPE,
        "config": DESCRIPTOR,
        "layers": {"type": "array", "minItems": 1, "items": DESCRIPTOR},
        "subject": DESCRIPTOR,
        "annotations": _TEXTS,
    },
    # "artifactType MUST be set when config.mediaType is set to the empty value".
    "if": {
        "properties": {
            "config": {"properties": {"mediaType": {"const": "application/vnd.oci.empty.v1+json"}}}
        }
    },
    "then": {"required": ["artifactType"]},
}
CONFIG: dict[str, Any] = {
    "type": "object",
    "required": ["architecture", "os", "rootfs"],
    "properties": {
        "created": _TIME,
        "author": {"type": "string"},
        "architecture": {"type": "string"},
        "os": {"type": "string"},
        "config": {
            "type": "object",
            "properties": {
                "User": {"type": "string"},
                "ExposedPorts": {
                    "type": "object",
                    "propertyNames": {"pattern": r"^\d+(?:/(?:tcp|udp))?$"},
                    "additionalProperties": {"const": {}},
                },
                "Env": {"type": "array", "items": {"type": "string", "pattern": "^[^=]+=.*$"}},
                "Entrypoint": _LIST_OF_TEXTS,
                "Cmd": _LIST_OF_TEXTS,
                "Volumes": {"type": "object", "additionalProperties": {"const": {}}},
                "WorkingDir": {"type": "string"},
                "Labels": _TEXTS,
                "StopSignal": {"type": "string", "pattern": "^SIG[A-Z0-9+-]+$"},
            },
        },
        "rootfs": {
            "type": "object",
            "required": ["type", "diff_ids"],
            "properties": {"type": {"const": "layers"}, "diff_ids": {"type": "array", "items": _DIGEST}},
        },
        "history": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "created": _TIME, "author": {"type": "string"}, "created_by": {"type": "string"},
                    "comment": {"type": "string"}, "empty_layer": {"type": "boolean"},
                },
            },
        },
    },
}  # fmt: skip
