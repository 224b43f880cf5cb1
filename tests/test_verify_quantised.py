"""Quantised checkpoints: healthy ones pass their tables, and every part that is wrong has its finding.

The shapes are written out here for a matrix of 16 inputs and 16 or 32 outputs, from the methods' own
descriptions (eight 4-bit numbers in a word of 32 bits, four of 8 bits), not from our formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_factory import edit_json, edit_tensors, read_tensors, write_model

from ralbuild.digests import DigestCache
from ralbuild.weights.scan import Verdict, verify_folder

pytestmark = pytest.mark.usefixtures("one_worker_a_request")

WIDTH = {"I32": 4, "F16": 2, "F32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1, "BF16": 2}
Parts = dict[str, tuple[str, list[int]]]
UP = "model.layers.0.mlp.up_proj"  # 16 inputs, 32 outputs
QUERY = "model.layers.0.self_attn.q_proj"  # 16 by 16
DOWN = "model.layers.0.mlp.down_proj"  # 32 inputs, 16 outputs


def by_size(square: Parts, up: Parts, down: Parts) -> Callable[[str], Parts]:
    return lambda stem: up if stem.endswith(("up_proj", "gate_proj")) else down if "down" in stem else square


GPTQ4 = by_size(
    {
        "qweight": ("I32", [2, 16]),
        "qzeros": ("I32", [2, 2]),
        "scales": ("F16", [2, 16]),
        "g_idx": ("I32", [16]),
    },
    {
        "qweight": ("I32", [2, 32]),
        "qzeros": ("I32", [2, 4]),
        "scales": ("F16", [2, 32]),
        "g_idx": ("I32", [16]),
    },
    {
        "qweight": ("I32", [4, 16]),
        "qzeros": ("I32", [4, 2]),
        "scales": ("F16", [4, 16]),
        "g_idx": ("I32", [32]),
    },
)
GPTQ8_ONE_GROUP = by_size(
    {"qweight": ("I32", [4, 16]), "qzeros": ("I32", [1, 4]), "scales": ("F16", [1, 16])},
    {"qweight": ("I32", [4, 32]), "qzeros": ("I32", [1, 8]), "scales": ("F16", [1, 32])},
    {"qweight": ("I32", [8, 16]), "qzeros": ("I32", [1, 4]), "scales": ("F16", [1, 16])},
)
AWQ = by_size(
    {"qweight": ("I32", [16, 2]), "qzeros": ("I32", [2, 2]), "scales": ("F16", [2, 16])},
    {"qweight": ("I32", [16, 4]), "qzeros": ("I32", [2, 4]), "scales": ("F16", [2, 32])},
    {"qweight": ("I32", [32, 2]), "qzeros": ("I32", [4, 2]), "scales": ("F16", [4, 16])},
)
FP8_BLOCK = by_size(  # blocks of 12 outputs by 8 inputs
    {"weight": ("F8_E4M3", [16, 16]), "weight_scale_inv": ("F32", [2, 2])},
    {"weight": ("F8_E4M3", [32, 16]), "weight_scale_inv": ("F32", [3, 2])},
    {"weight": ("F8_E4M3", [16, 32]), "weight_scale_inv": ("F32", [2, 4])},
)
FP8_TENSOR = by_size(
    {"weight": ("F8_E4M3", [16, 16]), "weight_scale": ("F32", [])},
    {"weight": ("F8_E4M3", [32, 16]), "weight_scale": ("F32", []), "input_scale": ("F32", [1])},
    {"weight": ("F8_E4M3", [16, 32]), "weight_scale": ("F32", [1])},
)
FP8_ROW = by_size(
    {"weight": ("F8_E4M3", [16, 16]), "weight_scale": ("F32", [16, 1])},
    {"weight": ("F8_E4M3", [32, 16]), "weight_scale": ("F32", [32, 1])},
    {"weight": ("F8_E4M3", [16, 32]), "weight_scale": ("F32", [16, 1])},
)
PACKED = by_size(
    {"weight_packed": ("I32", [16, 2]), "weight_scale": ("BF16", [16, 2]), "weight_shape": ("I64", [2])},
    {"weight_packed": ("I32", [32, 2]), "weight_scale": ("BF16", [32, 2]), "weight_shape": ("I64", [2]), "weight_zero_point": ("I32", [4, 2])},
    {"weight_packed": ("I32", [16, 4]), "weight_scale": ("BF16", [16, 4]), "weight_shape": ("I64", [2])},
)  # fmt: skip
INT8 = by_size(
    {"weight": ("I8", [16, 16]), "weight_scale": ("BF16", [16, 1])},
    {"weight": ("I8", [32, 16]), "weight_scale": ("BF16", [32, 1])},
    {"weight": ("I8", [16, 32]), "weight_scale": ("BF16", [16, 1])},
)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


METHODS: dict[str, tuple[dict[str, Any], Callable[[str], Parts]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}, GPTQ4),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, GPTQ8_ONE_GROUP),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}, AWQ),
    "fp8-block": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [12, 8]}, FP8_BLOCK),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, FP8_TENSOR),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, FP8_ROW),
    "packed": (compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8), PACKED),
    "int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), INT8),
    "fp8-channel": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), FP8_ROW),
    "fp8-one": (compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"), FP8_TENSOR),
    "fp8-blocks": (compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[12, 8]),
                   lambda stem: {name.removesuffix("_inv"): part for name, part in FP8_BLOCK(stem).items()}),
}  # fmt: skip


def fill(dtype: str, shape: list[int]) -> bytes:
    """Return values that no check minds: small, finite, not all alike."""
    count = 1
    for dim in shape:
        count *= dim
    one = {"F16": b"\x00\x20", "BF16": b"\x00\x3c", "F32": b"\x00\x00\x80\x3c"}.get(dtype)
    other = {"F16": b"\x00\x24", "BF16": b"\x80\x3c", "F32": b"\x00\x00\x00\x3d"}.get(dtype)
    width = WIDTH[dtype]
    pair = (one, other) if one and other else (b"\x01" + bytes(width - 1), b"\x02" + bytes(width - 1))
    return b"".join(pair[number % 2] for number in range(count))


def quantise(folder: Path, said: dict[str, Any], parts: Callable[[str], Parts]) -> Path:
    """Replace every matrix of the layers by its parts."""
    write_model(folder)
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=said))

    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            del tensors[name]
            stem = name.removesuffix(".weight")
            for suffix, (dtype, shape) in parts(stem).items():
                tensors[f"{stem}.{suffix}"] = (dtype, shape, fill(dtype, shape))

    edit_tensors(folder / "model.safetensors", change)
    return folder


def verify(folder: Path) -> Verdict:
    return verify_folder(folder, DigestCache(None), 0, lambda done, total: None)


def found(folder: Path) -> set[tuple[str, str]]:
    return {(item.rule.id, item.tensor) for item in verify(folder).findings if item.severity != "info"}


@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_quantised_folder_is_recognised_and_nothing_else_is_said(
    method: str, tmp_path: Path
) -> None:
    folder = quantise(tmp_path / "model", *METHODS[method])
    verdict = verify(folder)
    assert {(item.rule.id, item.severity) for item in verdict.findings if item.severity != "info"} == {
        ("W706", "warning")
    }
    assert verdict.model is not None
    assert verdict.model.quantised


def resize(name: str, shape: list[int], dtype: str = "") -> Callable[[Path], Any]:
    def change(tensors: dict[str, Any]) -> None:
        kind = dtype or tensors[name][0]
        tensors[name] = (kind, shape, fill(kind, shape))

    return lambda folder: edit_tensors(folder / "model.safetensors", change)


def drop(name: str) -> Callable[[Path], Any]:
    return lambda folder: edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop(name))


def zero(name: str) -> Callable[[Path], Any]:
    def change(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes(len(data)))

    return lambda folder: edit_tensors(folder / "model.safetensors", change)


def said(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: edit_json(
        folder / "config.json", lambda config: config["quantization_config"].update(changes)
    )


BROKEN: list[tuple[str, str, tuple[str, str], Callable[[Path], Any]]] = [
    ("gptq", "no scales", ("W308", f"{UP}.scales"), drop(f"{UP}.scales")),
    ("gptq", "no zeros", ("W308", f"{UP}.qzeros"), drop(f"{UP}.qzeros")),
    ("gptq", "no packed weight", ("W308", f"{UP}.qweight"), drop(f"{UP}.qweight")),
    ("gptq", "too few scales", ("W310", f"{QUERY}.scales"), resize(f"{QUERY}.scales", [1, 16])),
    ("gptq", "a wrong order", ("W310", f"{QUERY}.g_idx"), resize(f"{QUERY}.g_idx", [8])),
    ("gptq", "a transposed weight", ("W310", f"{UP}.qweight"), resize(f"{UP}.qweight", [32, 2])),
    ("gptq", "another type of weight", ("W707", f"{UP}.qweight"), resize(f"{UP}.qweight", [2, 32], "F32")),
    ("gptq", "scales that are whole numbers", ("W707", f"{UP}.scales"), resize(f"{UP}.scales", [2, 32], "I32")),
    ("gptq", "a config of eight bits", ("W310", f"{UP}.qweight"), said(bits=8)),
    ("gptq", "a config of other groups", ("W310", f"{UP}.scales"), said(group_size=16)),
    ("gptq", "a weight that is all zero", ("W404", f"{UP}.qweight"), zero(f"{UP}.qweight")),
    ("gptq", "scales that are all zero", ("W404", f"{UP}.scales"), zero(f"{UP}.scales")),
    ("gptq", "a group of zero", ("W703", ""), said(group_size=0)),
    ("gptq", "Marlin's form", ("W703", ""), said(checkpoint_format="marlin")),
    ("gptq", "the other method's config", ("W310", f"{UP}.qweight"), said(quant_method="awq", version="gemm")),
    ("awq", "too few zeros", ("W310", f"{UP}.qzeros"), resize(f"{UP}.qzeros", [2, 2])),
    ("awq", "no scales", ("W308", f"{DOWN}.scales"), drop(f"{DOWN}.scales")),
    ("fp8-block", "a scale too few", ("W310", f"{UP}.weight_scale_inv"), resize(f"{UP}.weight_scale_inv", [2, 2])),
    ("fp8-block", "no scale", ("W308", f"{UP}.weight_scale_inv"), drop(f"{UP}.weight_scale_inv")),
    ("fp8-block", "no scale, said twice", ("W705", f"{UP}.weight"), drop(f"{UP}.weight_scale_inv")),
    ("fp8-block", "other blocks", ("W310", f"{UP}.weight_scale_inv"), said(weight_block_size=[16, 16])),
    ("fp8-block", "a block of nothing", ("W703", ""), said(weight_block_size=[0, 8])),
    ("fp8-tensor", "a scale of zero", ("W404", f"{QUERY}.weight_scale"), zero(f"{QUERY}.weight_scale")),
    ("fp8-tensor", "a scale by channel", ("W310", f"{QUERY}.weight_scale"), resize(f"{QUERY}.weight_scale", [16, 1])),
    ("packed", "no scale", ("W308", f"{UP}.weight_scale"), drop(f"{UP}.weight_scale")),
    ("packed", "a shape of three", ("W310", f"{UP}.weight_shape"), resize(f"{UP}.weight_shape", [3])),
    ("packed", "another format", ("W703", ""), said(format="nvfp4-pack-quantized")),
    ("packed", "a quantised cache", ("W703", ""), said(kv_cache_scheme={"num_bits": 8})),
    ("packed", "no groups", ("W703", ""), said(config_groups={})),
    ("int8", "a scale too few", ("W310", f"{UP}.weight_scale"), resize(f"{UP}.weight_scale", [31, 1])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "what", "expected", "change"), BROKEN, ids=[f"{case[0]}: {case[1]}" for case in BROKEN]
)
def test_each_broken_part_has_its_finding(
    method: str, what: str, expected: tuple[str, str], change: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = quantise(tmp_path / "model", *METHODS[method])
    change(folder)
    # Every layer is wrong in the same way when the config is: one finding stands for all.
    rules = {
        (rule, tensor.replace("layers.1", "layers.0").replace("gate_proj", "up_proj"))
        for rule, tensor in found(folder)
    }
    assert expected in rules
    assert verify(folder).model is None


def test_a_matrix_that_stays_as_it_is_may(tmp_path: Path) -> None:
    folder = quantise(tmp_path / "model", *METHODS["gptq"])
    plain = write_model(tmp_path / "plain")

    def change(tensors: dict[str, Any]) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{DOWN}.{suffix}"]
        tensors[f"{DOWN}.weight"] = read_tensors(plain / "model.safetensors")[f"{DOWN}.weight"]

    edit_tensors(folder / "model.safetensors", change)
    assert {rule for rule, _ in found(folder)} == {"W706"}


def test_numbers_that_do_not_pack_are_said(tmp_path: Path) -> None:
    folder = quantise(tmp_path / "model", *METHODS["gptq"])
    edit_json(folder / "config.json", lambda config: config.update(intermediate_size=33))
    assert "W708" in {rule for rule, _ in found(folder)}


def test_an_old_gptq_config_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    folder = quantise(tmp_path / "model", *METHODS["gptq"])
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    assert "W703" in {rule for rule, _ in found(folder)}
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 8, "desc_act": false}')
    assert {rule for rule, _ in found(folder)} == {"W706"}
