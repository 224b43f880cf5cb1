"""Quantised checkpoints: which method, and what stands in the place of each matrix (``data/quantised.toml``).

What a table covers is checked like any other tensor: a missing scale is a missing tensor, a wrong
group size a wrong shape. What none covers is refused with the reason. Nothing is unpacked.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from ralbuild.weights.architecture import Promise
from ralbuild.weights.families import evaluate
from ralbuild.weights.files import Folder, read_json, read_small
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import Tensor

TITLES = {
    "gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "fbgemm_fp8": "FP8", "mxfp4": "MXFP4", "gguf": "GGUF",
    "compressed-tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes", "hqq": "HQQ",
    "modelopt": "ModelOpt",
}  # fmt: skip
OLD_GPTQ = "quantize_config.json"
OTHER_FILES = ("quant_config.json", "hf_quant_config.json")
PACKED = (".qweight", ".qzeros", ".weight_packed", ".g_idx", ".absmax", ".quant_map", "_blocks")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a quantised matrix: element types, the usual shape, and other shapes that occur."""

    dtypes: tuple[str, ...]
    shape: tuple[str, ...]
    also: tuple[tuple[str, ...], ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class Table:
    """One way to store a matrix: see the data file."""

    title: str
    main: str
    bits: tuple[int, ...]
    parts: Mapping[str, Part]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config says of its quantisation: a table and the numbers that its shapes need.

    Attributes:
        group: inputs that share a scale; -1 for all of them.
        block: outputs and inputs of one block.
        file: where it says so.
    """

    table: Table
    bits: int
    group: int
    block: tuple[int, int]
    file: str

    @property
    def text(self) -> str:
        """The method and its numbers, for people."""
        parts = [self.table.title, f"{self.bits} bits"]
        parts += [f"groups of {self.group}"] if self.group > 0 else []
        return ", ".join(parts)


class _RefusedError(Exception):
    """No table covers this; the text says what."""


@functools.cache
def tables() -> dict[str, Table]:
    """Return every table by name."""
    text = resources.files("ralbuild").joinpath("data/quantised.toml").read_text("utf-8")
    return {name: _table(item) for name, item in tomllib.loads(text).items()}


def _table(item: dict[str, Any]) -> Table:
    parts = {
        name: Part(
            tuple(part["dtypes"]),
            tuple(part["shape"]),
            tuple(map(tuple, part.get("also", ()))),
            part.get("optional", False),
        )
        for name, part in item["parts"].items()
    }
    return Table(item["title"], item["main"], tuple(item["bits"]), parts)


def find_plan(
    folder: Folder, config: Mapping[str, Any], tensors: Mapping[str, Tensor], findings: Findings
) -> tuple[bool, Plan | None]:
    """Tell whether the checkpoint is quantised, and how; a finding says why there is no plan for it."""
    said, file = config.get("quantization_config"), "config.json"
    if not said and OLD_GPTQ in folder.files:
        data = read_small(folder.files[OLD_GPTQ], OLD_GPTQ, findings)
        old = read_json(data, OLD_GPTQ, findings) if data is not None else None
        said, file = {"quant_method": "gptq", **(old or {})}, OLD_GPTQ
    try:
        if said:
            return True, _plan(said, file)
        other = next((name for name in OTHER_FILES if name in folder.files), "")
        if other:
            file = other
            raise _RefusedError("a quantised checkpoint, said in a file of its own")
        packed = next((name for name in tensors if name.endswith(PACKED)), "")
        if packed:
            raise _RefusedError(f"packed weights such as {packed!r}, though config.json does not say how")
    except _RefusedError as error:
        findings.add("W703", f"{error}: no table to check it by", file=file)
        return True, None
    return False, None


def _plan(said: Any, file: str) -> Plan:
    if not isinstance(said, dict):
        raise _RefusedError("quantization_config is no object")
    method = str(said.get("quant_method", ""))[:40]
    title = TITLES.get(method, method or "quantised")
    if method == "gptq":
        if said.get("is_marlin_format") or said.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            raise _RefusedError(
                f"a GPTQ checkpoint in {str(said.get('checkpoint_format', 'marlin'))[:40]} form"
            )
        return _packed("gptq", said, file)
    if method == "awq":
        if str(said.get("version", "gemm")).lower() != "gemm":
            raise _RefusedError(f"an AWQ checkpoint of version {str(said.get('version'))[:40]}")
        return _packed("awq", said, file)
    if method == "fp8":
        block = said.get("weight_block_size")
        name = "fp8-block" if block is not None else "fp8-tensor"
        return Plan(tables()[name], 8, -1, _block(block) if block is not None else (1, 1), file)
    if method == "fbgemm_fp8":
        return Plan(tables()["fp8-row"], 8, -1, (1, 1), file)
    if method == "compressed-tensors" and not said.get("kv_cache_scheme"):
        return _compressed(said, file)
    raise _RefusedError(f"a {title} checkpoint")


def _packed(name: str, said: Mapping[str, Any], file: str) -> Plan:
    table = tables()[name]
    bits, group = said.get("bits", 4), said.get("group_size", 128)
    if type(bits) is not int or bits not in table.bits:
        raise _RefusedError(f"a {table.title} checkpoint of {str(bits)[:20]} bits")
    return Plan(table, bits, _group(group), (1, 1), file)


def _group(value: Any) -> int:
    if type(value) is not int or not (value == -1 or value > 0):
        raise _RefusedError(f"a group_size of {str(value)[:20]}")
    return value


def _block(value: Any) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise _RefusedError(f"blocks of {str(value)[:40]}")
    return value[0], value[1]


def _compressed(said: Mapping[str, Any], file: str) -> Plan:
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _RefusedError("a compressed-tensors checkpoint without config_groups")
    weights = [item.get("weights") if isinstance(item, dict) else None for item in groups.values()]
    first = weights[0]
    if not isinstance(first, dict) or any(item != first for item in weights):
        raise _RefusedError("a compressed-tensors checkpoint of several kinds of weights")
    form, strategy = said.get("format"), first.get("strategy")
    bits, group = first.get("num_bits"), first.get("group_size")
    if form == "pack-quantized":
        name, group = "packed-group", group if strategy == "group" else -1
    elif form in ("float-quantized", "int-quantized", "naive-quantized"):
        name, group = f"whole-{strategy}", -1
    else:
        raise _RefusedError(f"a compressed-tensors checkpoint of format {str(form)[:40]}")
    table = tables().get(name)
    if table is None or type(bits) is not int or bits not in table.bits:
        raise _RefusedError(
            f"a compressed-tensors checkpoint of {str(bits)[:20]} bits by {str(strategy)[:20]}"
        )
    block = _block(first.get("block_structure")) if strategy == "block" else (1, 1)
    return Plan(table, bits, _group(group), block, file)


def expand(plan: Plan, promise: Promise, tensors: Mapping[str, Tensor], findings: Findings) -> Promise | None:
    """Return ``promise`` with each quantised matrix replaced by its parts; None when a finding says why not.

    A matrix that is there as it is (``modules_to_not_convert``, ``ignore``) stays as promised.
    """
    if promise.family.transposed:
        findings.add(
            "W703", f"a {plan.table.title} checkpoint of {promise.family.name}: no table", file=plan.file
        )
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    count, start = 0, promise.family.layers.partition("{n}")[0]
    for name, shape in promise.shapes.items():
        stem = name.removesuffix(".weight")
        main = f"{stem}.{plan.table.main}"
        inside = name.startswith(start) and name.endswith(".weight") and len(shape) == 2
        plain = tensors.get(name)
        if (
            not inside
            or (plain is not None and _is_plain(plain, plan))
            or (main != name and plain is not None)
        ):
            shapes[name] = shape
            continue
        count += 1
        shapes |= _parts(plan, stem, shape, tensors, findings)
    if not count:
        findings.add("W708", f"{plan.text}, but no matrix is quantised", file=plan.file)
        return None
    findings.add("W706", f"{plan.text}: {count} matrices were checked as such", file=plan.file)
    return replace(promise, shapes=shapes)


def _is_plain(tensor: Tensor, plan: Plan) -> bool:
    return plan.table.main == "weight" and tensor.dtype not in plan.table.parts["weight"].dtypes


def _parts(
    plan: Plan, stem: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor], findings: Findings
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each part of one matrix of ``shape`` outputs by inputs."""
    outputs, inputs = shape
    group = plan.group if plan.group > 0 else inputs
    used = {dim for part in plan.table.parts.values() if not part.optional for dim in part.shape}
    if ("P" in used and inputs * plan.bits % 32) or ("Q" in used and outputs * plan.bits % 32):
        what = f"{list(shape)} does not pack into words of 32 bits, {plan.bits} bits each"
        findings.add("W708", what, tensor=stem, found=list(shape))
    sizes = {
        "O": outputs,
        "I": inputs,
        "G": math.ceil(inputs / group),
        "P": inputs * plan.bits // 32,
        "Q": math.ceil(outputs * plan.bits / 32),
        "R": math.ceil(outputs / plan.block[0]),
        "C": math.ceil(inputs / plan.block[1]),
    }
    out: dict[str, tuple[int, ...]] = {}
    for suffix, part in plan.table.parts.items():
        name = f"{stem}.{suffix}"
        tensor = tensors.get(name)
        if tensor is None and part.optional:
            continue
        usual, *others = (
            tuple(evaluate(dim, sizes) for dim in formula) for formula in (part.shape, *part.also)
        )
        out[name] = tensor.shape if tensor is not None and tensor.shape in others else usual
        if tensor is not None and tensor.dtype not in part.dtypes:
            needed = " or ".join(part.dtypes)
            findings.add("W707", f"needs {needed}", tensor=name, found=tensor.dtype, needed=needed)
    return out
