"""What must not be in a model folder: code, keys that fetch or run code, adapters, quantised weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
QUANT_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
QUANT_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
}
_PACKED = (".qweight", ".qzeros", ".weight_packed", ".g_idx", ".absmax", ".quant_map", "_blocks")
_SCALES = ("_scale", "_scale_inv")


def check_code(folder: Folder, configs: Mapping[str, dict[str, Any]], findings: Findings) -> None:
    """Refuse a folder that carries code or asks a loader to run some."""
    for name in folder.files:
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


def check_formats(
    folder: Folder, config: dict[str, Any], tensors: Iterable[Tensor], findings: Findings
) -> bool:
    """Recognise adapters and quantised checkpoints; return whether the tensors are plain weights."""
    names = {tensor.name: tensor for tensor in tensors}
    plain = True
    if "adapter_config.json" in folder.files or any(".lora_A." in name for name in names):
        findings.add("W704", "this is a LoRA adapter", file="adapter_config.json", needed="a whole model")
        plain = False
    reason = _quantised(folder, config, names)
    if reason:
        findings.add(
            "W703", f"{reason}; only unquantised weights are served", file=reason_file(folder, config)
        )
        plain = False
    for name, tensor in names.items():
        has_scale = any(f"{name}{suffix}" in names for suffix in _SCALES)
        if tensor.dtype.startswith("F8_") and name.endswith(".weight") and not has_scale:
            needed = f"{name}_scale or {name}_scale_inv"
            findings.add("W705", f"{tensor.dtype} weights without a scale", tensor=name, needed=needed)
            plain = False
    return plain


def reason_file(folder: Folder, config: dict[str, Any]) -> str:
    """Return the file that says that a checkpoint is quantised."""
    if config.get("quantization_config"):
        return "config.json"
    return next((name for name in QUANT_FILES if name in folder.files), "")


def _quantised(folder: Folder, config: dict[str, Any], names: Mapping[str, Tensor]) -> str:
    quantisation = config.get("quantization_config")
    if quantisation:
        method = str(quantisation.get("quant_method", "")) if isinstance(quantisation, dict) else ""
        details = _details(quantisation) if isinstance(quantisation, dict) else ""
        return f"a {QUANT_METHODS.get(method, method or 'quantised')} checkpoint{details}"
    found = next((name for name in QUANT_FILES if name in folder.files), "")
    if found:
        return f"a quantised checkpoint ({found})"
    packed = next((name for name in names if name.endswith(_PACKED)), "")
    return f"packed weights such as {packed!r}, though config.json does not say how" if packed else ""


def _details(quantisation: dict[str, Any]) -> str:
    known = ("bits", "group_size", "desc_act", "sym", "zero_point", "activation_scheme", "weight_block_size")
    parts = [f"{key} {str(quantisation[key])[:20]}" for key in known if key in quantisation]
    return f" ({', '.join(parts)})" if parts else ""
