"""The launcher's environment variables: one frozen value, read once by each process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ralbuild.runtime.errors import HostUnfitError
from ralbuild.runtime.variables import read_choice, read_number

FULL_BYTES = 2 << 30
"""Weights that are hashed by default: about a second of one processor, while torch is imported."""

_MONTH = 30 * 86400  # seconds
_SERIAL = (1 << 53) - 1
PREPARE_THREADS = 2
"""Prompts prepared at once; they share one interpreter, so more would only delay the decode loop."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How this process was started; docs/runtime.md has the table.

    Attributes:
        root: put in front of every path of `ralbuild.contract.places`; empty inside a container.
        bundle_sha256: digest that ``bundle.json`` must have; empty to accept any.
        weights_image: digest of the image that must be mounted at `places.MODEL_DIR`; empty when the weights
            are in this image.
        verify: ``full`` hashes all weight files, ``sampled`` compares all sizes and hashes some files,
            drawn anew at each start, ``off`` compares sizes only; ``auto`` is ``full`` for weights of at
            most `FULL_BYTES`, else ``sampled``. Every other file is hashed in any case.
        threads: compute threads; 0 takes what affinity and the cgroup allow.
        queue: requests that may wait for a slot; one more is refused with 429.
        kv_bytes: memory for keys and values; 0 takes what is free once the weights are loaded.
        drain_seconds: how long running requests may take after SIGTERM.
        runtime_rules: signed file with rules of the serving side; empty for none.
        runtime_rules_key: PEM file of the key that must have signed it.
        runtime_rules_least: smallest serial that such a file may have.
        idle_unload: seconds without a request after which memory is released; 0 is never, None is as
            the bundle says.
        keys_file: one API key a line; empty serves everybody.
        admin_file: the token that may unload and load; empty lets nobody.
        compat: ``vllm`` adds vLLM's names to the metrics.
        log_json: log lines are JSON objects.
    """

    root: str = ""
    bundle_sha256: str = ""
    weights_image: str = ""
    verify: str = "auto"
    threads: int = 0
    queue: int = 64
    kv_bytes: int = 0
    drain_seconds: int = 300
    runtime_rules: str = ""
    runtime_rules_key: str = ""
    runtime_rules_least: int = 0
    idle_unload: int | None = None
    keys_file: str = ""
    admin_file: str = ""
    compat: str = ""
    log_json: bool = False

    def verification(self, weight_bytes: int) -> str:
        """Return ``full``, ``sampled`` or ``off`` for weights of this size."""
        if self.verify != "auto":
            return self.verify
        return "full" if weight_bytes <= FULL_BYTES else "sampled"

    def path(self, place: str) -> Path:
        """Return where ``place`` of the image lies for this process."""
        return Path(self.root + place)


def read_settings(env: Mapping[str, str]) -> Settings:
    """Read the ``RAL_*`` variables.

    Raises:
        HostUnfitError: naming the variable that has no meaning.
    """
    usual = Settings()
    rules, key = env.get("RAL_RUNTIME_RULES", ""), env.get("RAL_RUNTIME_RULES_KEY", "")
    if bool(rules) != bool(key):
        missing = "RAL_RUNTIME_RULES_KEY" if rules else "RAL_RUNTIME_RULES"
        raise HostUnfitError("is missing: a file of rules needs the key that signed it", place=missing)
    return Settings(
        root=env.get("RAL_ROOT", "").rstrip("/"),
        bundle_sha256=env.get("RAL_BUNDLE_SHA256", "").removeprefix("sha256:"),
        weights_image=env.get("RAL_WEIGHTS_IMAGE", ""),
        verify=read_choice(env, "RAL_VERIFY", ("auto", "full", "sampled", "off")),
        threads=read_number(env, "RAL_THREADS", usual.threads, 4096),
        queue=read_number(env, "RAL_QUEUE", usual.queue, 1 << 20),
        kv_bytes=read_number(env, "RAL_KV_BYTES", usual.kv_bytes, 1 << 50),
        drain_seconds=read_number(env, "RAL_DRAIN_SECONDS", usual.drain_seconds, 86400),
        runtime_rules=rules,
        runtime_rules_key=key,
        runtime_rules_least=read_number(env, "RAL_RUNTIME_RULES_LEAST", 0, _SERIAL),
        idle_unload=read_number(env, "RAL_IDLE_UNLOAD", 0, _MONTH) if env.get("RAL_IDLE_UNLOAD") else None,
        keys_file=env.get("RAL_API_KEYS_FILE", ""),
        admin_file=env.get("RAL_ADMIN_TOKEN_FILE", ""),
        compat=read_choice(env, "RAL_METRICS_COMPAT", ("", "vllm")),
        log_json=read_choice(env, "RAL_LOG", ("text", "json")) == "json",
    )
