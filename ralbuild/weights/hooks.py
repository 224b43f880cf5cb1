"""What must not be in a model folder: code, keys that fetch or run code, adapters, weights without scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ralbuild.weights.files import Folder
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import Tensor

CODE_SUFFIXES = (
    ".py",
    ".pyc",
    ".pyo",
    ".pyd",
    ".so",
    ".dll",
    ".dylib",
    ".pyz",
    ".whl",
    ".egg",
    ".ipynb",
    ".sh",
)
CODE_KEYS = (
    "auto_map",
    "custom_pipelines",
    "trust_remote_code",
    "transformers_weights",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "custom_generate",
)
"""Keys with which a config makes a loader run or fetch code, or read weights that we did not check."""
KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation", "kernel_config")
"""Keys that may name a repository of kernels; a plain word such as ``sdpa`` is harmless."""
_SCALES = ("_scale", "_scale_inv")


def check_code(folder: Folder, configs: Mapping[str, dict[str, Any]], findings: Findings) -> None:
    """Refuse a folder that carries code or asks a loader to run some."""
    for name in (*folder.files, *folder.below):
        if name.lower().endswith(CODE_SUFFIXES):
            findings.add("W701", "code in a model folder is never run or shipped", file=name)
    for name, config in configs.items():
        for path, key, value in _walk(config, ""):
            if key in CODE_KEYS and value:
                what = f"the key {path!r} would make a loader run code"
                findings.add("W702", what, file=name, found=str(value)[:80])
            elif key in KERNEL_KEYS and _names_repository(value):
                what = f"the key {path!r} names a repository of kernels, which a loader would run"
                findings.add("W702", what, file=name, found=str(value)[:80])


def _walk(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            here = f"{path}.{key}" if path else key
            yield here, key, item
            yield from _walk(item, here)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, path)


def _names_repository(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_names_repository(item) for item in value.values())
    return isinstance(value, str) and ("/" in value or ":" in value)


def check_adapter(folder: Folder, tensors: Mapping[str, Tensor], findings: Findings) -> bool:
    """Recognise a LoRA adapter, which is no model; return whether it is one."""
    if "adapter_config.json" in folder.files or any(".lora_A." in name for name in tensors):
        findings.add("W704", "this is a LoRA adapter", file="adapter_config.json", needed="a whole model")
        return True
    return False


def check_scales(tensors: Mapping[str, Tensor], findings: Findings) -> None:
    """Report 8-bit weights that lack the scale without which they mean nothing."""
    for name, tensor in tensors.items():
        has_scale = any(f"{name}{suffix}" in tensors for suffix in _SCALES)
        if tensor.dtype.startswith("F8_") and name.endswith(".weight") and not has_scale:
            needed = f"{name}_scale or {name}_scale_inv"
            findings.add("W705", f"{tensor.dtype} weights without a scale", tensor=name, needed=needed)
