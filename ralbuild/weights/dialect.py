"""What the config says apart from sizes: names, types and positions, in both dialects of transformers.

Version 4 writes ``torch_dtype``, ``rope_theta`` and ``rope_scaling``; version 5 writes ``dtype`` and
``rope_parameters``. Loaders of one version ignore or prefer the words of the other, so a config that
has both and disagrees is read differently by different engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any

from ralbuild.weights.architecture import is_benign
from ralbuild.weights.families import Family
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import Tensor, majority_dtype

CONFIG = "config.json"
DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "half": "F16",
    "float": "F32",
    "double": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_EPSILON = (1e-12, 1e-4)
_SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "proportional", "mrope")
"""Kinds of rotary scaling; ``su`` and ``mrope`` are old words that loaders still take."""
_WITH_FACTOR = ("linear", "dynamic", "yarn", "llama3")


def check_names(config: Mapping[str, Any], known: Mapping[str, Family], findings: Findings) -> Family | None:
    """Check model type and architecture; return the family's table when there is one."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        findings.add("W301", "lacks model_type", file=CONFIG)
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        findings.add("W302", "lacks architectures", file=CONFIG)
        architectures = []
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        what = f"vocab_size must be a positive number, found {str(vocab_size)[:40]}"
        findings.add("W304", what, file=CONFIG, found=str(vocab_size)[:40])
    if not isinstance(model_type, str) or not model_type:
        return None
    family = known.get(model_type)
    if family is None:
        what = f"no table for model_type {model_type!r}: only structure and values were checked"
        findings.add("W305", what, file=CONFIG, found=model_type, hint=f"tables: {', '.join(sorted(known))}")
        return None
    if architectures and architectures[0] not in family.classes:
        what = f"architectures says {architectures[0]!r}, model_type {model_type!r}"
        findings.add("W303", what, file=CONFIG, found=architectures[0], needed=family.classes[0])
    return family


def check_settings(config: Mapping[str, Any], family: Family | None, findings: Findings) -> None:
    """Check what a loader takes from the config without a tensor to hold against it."""
    _check_dtype_words(config, findings)
    _check_rope(config, family, findings)
    flags = [optional.when for optional in family.optional] if family is not None else []
    for key in ("tie_word_embeddings", *flags):
        _has_type(config, key, bool, "true or false", findings)
    if family is None:
        return
    for key in family.epsilon_keys:
        value = config.get(key)
        if not _has_type(config, key, int | float, "a number", findings):
            continue
        if value is not None and not _EPSILON[0] <= value <= _EPSILON[1]:
            what = f"{key} is {str(value)[:40]}"
            findings.add("W321", what, file=CONFIG, found=str(value)[:40], needed="1e-12 to 1e-4")
    for key in family.activation_keys:
        value = config.get(key)
        if not _has_type(config, key, str, "a name", findings):
            continue
        if value is not None and value not in family.activations:
            needed = " or ".join(family.activations)
            what = f"{key} is {str(value)[:40]!r}; {family.name} uses {needed}"
            findings.add("W322", what, file=CONFIG, found=str(value)[:40], needed=needed)


def _has_type(
    config: Mapping[str, Any], key: str, kind: type | UnionType, needed: str, findings: Findings
) -> bool:
    """Tell whether a setting is of the type that loaders take, or not given."""
    value = config.get(key)
    good = value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
    if not good:
        what = f"{key} must be {needed}, found {str(value)[:40]!r}"
        findings.add("W325", what, file=CONFIG, found=str(value)[:40], needed=needed)
    return good


def _check_dtype_words(config: Mapping[str, Any], findings: Findings) -> None:
    new, old = config.get("dtype"), config.get("torch_dtype")
    for key, value in (("dtype", new), ("torch_dtype", old)):
        if value is not None and not (isinstance(value, str) and value.removeprefix("torch.") in DTYPES):
            what = f"{key} is {str(value)[:40]!r}, which names no type of floats"
            findings.add("W325", what, file=CONFIG, found=str(value)[:40], needed="such as bfloat16")
    if new is not None and old is not None and _dtype(new) != _dtype(old):
        what = f"dtype says {str(new)[:40]}, torch_dtype {str(old)[:40]}"
        findings.add("W316", what, file=CONFIG, found=str(old)[:40], needed=str(new)[:40])
    elif new is not None and old is None and "torch_dtype" in config:
        findings.add("W323", f"dtype says {str(new)[:40]}, torch_dtype is null", file=CONFIG)
    elif new is None and old is None:
        findings.add("W318", "neither dtype nor torch_dtype", file=CONFIG)


def _dtype(word: Any) -> str:
    text = str(word).removeprefix("torch.")
    return DTYPES.get(text, text)


def check_dtypes(
    config: Mapping[str, Any], family: Family | None, tensors: Iterable[Tensor], findings: Findings
) -> None:
    """Compare the element types of unquantised weights with each other and with the config."""
    tensors = list(tensors)
    for tensor in tensors:
        if tensor.dtype not in _FLOATS and _is_weight(tensor, family):
            what = f"has {tensor.dtype} elements, which no layer computes with"
            findings.add("W326", what, tensor=tensor.name, found=tensor.dtype, needed=" or ".join(_FLOATS))
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1 and tensor.dtype in _FLOATS]
    if not matrices:
        return
    kinds = sorted({tensor.dtype for tensor in matrices})
    if len(kinds) > 1:
        example = next(tensor for tensor in matrices if tensor.dtype != majority_dtype(matrices))
        what = f"the matrices are {' and '.join(kinds)}"
        findings.add("W320", what, tensor=example.name, found=example.dtype, needed=majority_dtype(matrices))
    word = config.get("dtype") or config.get("torch_dtype")
    if word is not None and _dtype(word) != majority_dtype(matrices):
        what = f"the config says {str(word)[:40]}, most weights are {majority_dtype(matrices)}"
        findings.add("W319", what, file=CONFIG, found=majority_dtype(matrices), needed=str(word)[:40])


def _is_weight(tensor: Tensor, family: Family | None) -> bool:
    """Tell whether a tensor is one that layers compute with, as far as its name tells."""
    if tensor.name.endswith(".weight"):
        return not tensor.dtype.startswith("F8_")  # those lack a scale, which is another finding
    return family is not None and tensor.name.endswith(".bias") and not is_benign(family, tensor.name)


def _check_rope(config: Mapping[str, Any], family: Family | None, findings: Findings) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            found = str(config[key])[:40]
            findings.add("W324", f"{key} must be an object, found {found!r}", file=CONFIG, found=found)
    new = _by_layer_type(config.get("rope_parameters"))
    scaling = config.get("rope_scaling")
    _compare(config, "rope_theta", [item.get("rope_theta") for item in new], findings)
    _compare(config, "partial_rotary_factor", [item.get("partial_rotary_factor") for item in new], findings)
    if isinstance(scaling, dict) and new:
        for old_key, new_key in (("rope_type", "rope_type"), ("type", "rope_type"), ("factor", "factor")):
            _compare(scaling, old_key, [item.get(new_key) for item in new], findings, "rope_scaling.")
    bases = [config.get("rope_theta"), *(item.get("rope_theta") for item in new)]
    given = [base for base in bases if base is not None]
    for base in given:
        if not _is_positive(base):
            findings.add("W324", f"the rotary base is {str(base)[:40]}", file=CONFIG, found=str(base)[:40])
    if family is None or not family.rope:
        return
    for item in ([scaling] if isinstance(scaling, dict) else []) + new:
        _check_scaling(item, findings)
    if not given:
        findings.add("W317", "gives neither rope_theta nor rope_parameters.rope_theta", file=CONFIG)


def _check_scaling(item: Mapping[str, Any], findings: Findings) -> None:
    kind = item.get("rope_type", item.get("type"))
    if kind is None:
        return
    if kind not in _SCALINGS:
        found, needed = str(kind)[:40], " or ".join(_SCALINGS)
        findings.add("W324", f"the rotary scaling is {found!r}", file=CONFIG, found=found, needed=needed)
    elif kind in _WITH_FACTOR and not _is_positive(item.get("factor")):
        found = str(item.get("factor"))[:40]
        what = f"the factor of the rotary scaling {kind!r} is {found}"
        findings.add("W324", what, file=CONFIG, found=found, needed="a positive number")


def _is_positive(value: Any) -> bool:
    """Tell whether a value of JSON is a number above 0 that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _by_layer_type(parameters: Any) -> list[dict[str, Any]]:
    """Return rope parameters as a list: one set, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return []
    nested = [item for item in parameters.values() if isinstance(item, dict)]
    return nested if nested and "rope_theta" not in parameters else [parameters]


def _compare(
    config: Mapping[str, Any], key: str, new: list[Any], findings: Findings, prefix: str = ""
) -> None:
    old = config.get(key)
    said = [value for value in new if value is not None]
    if old is None or not said or old in said:
        return
    text = ", ".join(sorted({str(value)[:40] for value in said}))
    what = f"{prefix}{key} says {str(old)[:40]}, rope_parameters say {text}"
    findings.add("W316", what, file=CONFIG, found=str(old)[:40], needed=text)
