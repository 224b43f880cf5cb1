"""The JSON of an OCI image (image-spec 1.0): config, manifest and index, each with one canonical text.

Rules kept here: `history` has one entry per layer; the base's history and settings stay as they are
unless the plan says otherwise; no float, no clock, sorted keys.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.codec import canonical_json, sha256_hex
from ralbuild.errors import ImageError
from ralbuild.image.plan import BaseImage, ImageConfig, ImagePlan

CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'

REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
PACKING_LABEL = "io.ralbuild.packing"
LICENSE_LABEL = "io.ralbuild.model.license"
LAYER_NAME = "io.ralbuild.layer.name"
LAYER_KIND = "io.ralbuild.layer.kind"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
BASE_DIGEST = "org.opencontainers.image.base.digest"
BASE_NAME = "org.opencontainers.image.base.name"

MAX_LAYERS = 125
"""Docker's limit (moby `maxLayerDepth`); overlayfs and registries allow a few more."""
MAX_MANIFEST = 4 << 20
"""Bytes of a manifest that a registry must take (distribution-spec)."""

_BASE_KEYS_DROPPED = ("Healthcheck", "OnBuild")
"""A base's health check would probe something that our entrypoint does not run."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the manifest says of a layer: type, ``sha256:`` digest, size, diff id, and its name and kind."""

    media_type: str
    digest: str
    size: int
    diff_id: str
    name: str
    kind: str


def digest_of(data: bytes) -> str:
    """Return ``sha256:`` and the hex digest of ``data``."""
    return f"sha256:{sha256_hex(data)}"


def timestamp(seconds: int) -> str:
    """Return RFC 3339 UTC for seconds since 1970."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def config_json(plan: ImagePlan, layers: Sequence[Descriptor]) -> bytes:
    """Return the image config for ``plan`` with all its layers, the base's first.

    Raises:
        ImageError: when the base is for another platform, or there are too many layers for Docker.
    """
    base = plan.base.config if plan.base else {}
    platform = (base.get("architecture", plan.architecture), base.get("os", "linux"))
    if platform != (plan.architecture, "linux"):
        found = "/".join(map(str, reversed(platform)))
        raise ImageError(f"the base is for {found}, the image for linux/{plan.architecture}")
    if len(layers) > MAX_LAYERS:
        raise ImageError(f"the image has {len(layers)} layers, Docker takes at most {MAX_LAYERS}")
    created = timestamp(plan.created)
    ours = layers[len(plan.base.layers) if plan.base else 0 :]
    history = _base_history(plan.base, created)
    history += [{"created": created, "created_by": f"ralbuild: {layer.name}"} for layer in ours]
    value = {
        "architecture": plan.architecture,
        "config": _run_config(base.get("config") or {}, plan.config, plan.packing),
        "created": created,
        "history": history,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    return canonical_json(value)


def manifest_json(plan: ImagePlan, config: bytes, layers: Sequence[Descriptor]) -> bytes:
    """Return the manifest that joins ``config`` and ``layers``."""
    annotations = {"org.opencontainers.image.created": timestamp(plan.created), **plan.annotations}
    if plan.base:
        annotations[BASE_DIGEST] = plan.base.digest
        if plan.base.name:
            annotations[BASE_NAME] = plan.base.name
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [
            {
                "mediaType": layer.media_type,
                "digest": layer.digest,
                "size": layer.size,
                "annotations": {LAYER_NAME: layer.name, LAYER_KIND: layer.kind},
            }
            for layer in layers
        ],
        "annotations": annotations,
    }
    manifest = canonical_json(value)
    if len(manifest) > MAX_MANIFEST:
        raise ImageError(f"the manifest has {len(manifest)} bytes, a registry takes {MAX_MANIFEST}")
    return manifest


def index_entry(manifest: bytes, architecture: str, tag: str) -> dict[str, Any]:
    """Return the descriptor that names ``manifest`` in an index; ``tag`` may be empty."""
    entry: dict[str, Any] = {
        "mediaType": MANIFEST_TYPE,
        "digest": digest_of(manifest),
        "size": len(manifest),
        "platform": {"architecture": architecture, "os": "linux"},
    }
    if tag:
        entry["annotations"] = {REF_NAME: tag, CONTAINERD_NAME: tag}
    return entry


def index_json(entries: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> bytes:
    """Return an index of ``entries``, ordered by name; ``other`` are further top-level keys to keep."""
    ordered = sorted(entries, key=lambda entry: (entry_name(entry), str(entry.get("digest", ""))))
    return canonical_json({**other, "schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": ordered})


def entry_name(entry: Mapping[str, Any]) -> str:
    """Return the name an index gives to one of its entries, or the empty string."""
    annotations = entry.get("annotations")
    return str(annotations.get(REF_NAME, "")) if isinstance(annotations, dict) else ""


def _base_history(base: BaseImage | None, created: str) -> list[Any]:
    """Return the base's history as it is, or one line a layer where it does not fit the layers."""
    if base is None:
        return []
    history = list(base.config.get("history") or [])
    if sum(not entry.get("empty_layer", False) for entry in history) == len(base.layers):
        return history
    return [{"created": created, "created_by": "base layer"} for _ in base.layers]


def _run_config(base: Mapping[str, Any], config: ImageConfig, packing: str) -> dict[str, Any]:
    out = {key: value for key, value in base.items() if key not in _BASE_KEYS_DROPPED}
    out["Env"] = _merged_env(out.get("Env") or [], config.env)
    if config.entrypoint:
        out["Entrypoint"] = list(config.entrypoint)
        out.pop("Cmd", None)  # it was meant for the base's entrypoint
    if config.cmd:
        out["Cmd"] = list(config.cmd)
    ours = {"User": config.user, "WorkingDir": config.workdir, "StopSignal": config.stop_signal}
    out |= {key: value for key, value in ours.items() if value}
    if config.ports:
        out["ExposedPorts"] = {
            **(out.get("ExposedPorts") or {}),
            **{f"{port}/tcp": {} for port in config.ports},
        }
    out["Labels"] = {**(out.get("Labels") or {}), **config.labels, PACKING_LABEL: packing}
    return out


def _merged_env(base: Sequence[str], ours: Sequence[tuple[str, str]]) -> list[str]:
    values = dict(item.partition("=")[::2] for item in base)
    values.update(ours)
    return [f"{name}={value}" for name, value in values.items()]
