"""The launcher's environment variables: one frozen value, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ralbuild.contract import places
from ralbuild.runtime.errors import HostUnfitError

FULL_BYTES = 2 << 30
"""Weights that are hashed by default: about a second of one processor, while torch is imported."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How this process was started; docs/runtime.md has the table.

    Attributes:
        root: put in front of every path of `ralbuild.contract.places`; empty inside a container.
        host, port: where to listen; port 0 takes a free one.
        bundle_sha256: digest that ``bundle.json`` must have; empty to accept any.
        weights_image: digest of the image that must be mounted at `places.MODEL_DIR`; empty when the weights
            are in this image.
        verify: ``full`` hashes the weight files, ``size`` compares their sizes only, ``auto`` takes
            ``full`` for weights of at most `FULL_BYTES`.
        threads: compute threads; 0 takes what affinity and the cgroup allow.
        queue: requests that may wait for a slot; one more is refused with 429.
        kv_bytes: memory for keys and values; 0 takes what is free once the weights are loaded.
        drain_seconds: how long running requests may take after SIGTERM.
        runtime_rules: signed file with rules of the serving side; empty for none.
        runtime_rules_key: PEM file of the key that must have signed it.
    """

    root: str = ""
    host: str = "0.0.0.0"  # noqa: S104 - a container listens on all of its own interfaces
    port: int = places.PORT
    bundle_sha256: str = ""
    weights_image: str = ""
    verify: str = "auto"
    threads: int = 0
    queue: int = 64
    kv_bytes: int = 0
    drain_seconds: int = 300
    runtime_rules: str = ""
    runtime_rules_key: str = ""

    def hashes(self, weight_bytes: int) -> bool:
        """Tell whether weights of this size are hashed at start."""
        return self.verify == "full" or (self.verify == "auto" and weight_bytes <= FULL_BYTES)

    def path(self, place: str) -> Path:
        """Return where ``place`` of the image lies for this process."""
        return Path(self.root + place)


def read_settings(env: Mapping[str, str]) -> Settings:
    """Read the ``RAL_*`` variables.

    Raises:
        HostUnfitError: naming the variable that has no meaning.
    """
    usual = Settings()
    verify = env.get("RAL_VERIFY") or usual.verify
    if verify not in ("auto", "size", "full"):
        raise HostUnfitError(f"needs 'auto', 'size' or 'full', found {verify!r}", place="RAL_VERIFY")
    rules, key = env.get("RAL_RUNTIME_RULES", ""), env.get("RAL_RUNTIME_RULES_KEY", "")
    if bool(rules) != bool(key):
        missing = "RAL_RUNTIME_RULES_KEY" if rules else "RAL_RUNTIME_RULES"
        raise HostUnfitError("is missing: a file of rules needs the key that signed it", place=missing)
    return Settings(
        root=env.get("RAL_ROOT", "").rstrip("/"),
        host=env.get("RAL_HOST", usual.host),
        port=_number(env, "RAL_PORT", usual.port, 65535),
        bundle_sha256=env.get("RAL_BUNDLE_SHA256", "").removeprefix("sha256:"),
        weights_image=env.get("RAL_WEIGHTS_IMAGE", ""),
        verify=verify,
        threads=_number(env, "RAL_THREADS", usual.threads, 4096),
        queue=_number(env, "RAL_QUEUE", usual.queue, 1 << 20),
        kv_bytes=_number(env, "RAL_KV_BYTES", usual.kv_bytes, 1 << 50),
        drain_seconds=_number(env, "RAL_DRAIN_SECONDS", usual.drain_seconds, 86400),
        runtime_rules=rules,
        runtime_rules_key=key,
    )


def _number(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or int(text) > most:
        raise HostUnfitError(f"needs a number from 0 to {most}, found {text!r}", place=name)
    return int(text)
