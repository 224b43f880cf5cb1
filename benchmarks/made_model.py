"""A Llama folder of a wanted size that `ralbuild image` takes: real headers, made-up weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.model_factory import TEMPLATE, VOCAB, llama_config, tokenizer_json

HIDDEN, WIDE, LAYER_BYTES = 1024, 4096, 2 * (4 * 1024**2 + 3 * 1024 * 4096)
"""Width, inner width, and about the bytes of one layer in BF16: 32 MB."""


def write_model(folder: Path, shards: int, shard_mb: int) -> int:
    """Write a model with ``shards`` weight files of about ``shard_mb`` MB; return the bytes of all."""
    folder.mkdir(parents=True)
    each = max(1, round(shard_mb * 1e6 / LAYER_BYTES))
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        shapes: dict[str, list[int]] = {}
        for layer in range(number * each, (number + 1) * each):
            shapes |= _layer(f"model.layers.{layer}.")
        if number == 0:
            shapes |= {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        total += _write(folder / name, shapes)
        weight_map.update(dict.fromkeys(shapes, name))
    config = llama_config() | {
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": each * shards,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "torch_dtype": "bfloat16",
    }
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, value in (
        ("model.safetensors.index.json", index),
        ("config.json", config),
        ("generation_config.json", {"eos_token_id": [2, 0]}),
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
    ):
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _layer(at: str) -> dict[str, list[int]]:
    square = {f"{at}self_attn.{name}_proj.weight": [HIDDEN, HIDDEN] for name in "qkvo"}
    wide = {f"{at}mlp.{name}_proj.weight": [WIDE, HIDDEN] for name in ("gate", "up")}
    norms = {f"{at}{name}.weight": [HIDDEN] for name in ("input_layernorm", "post_attention_layernorm")}
    return square | wide | {f"{at}mlp.down_proj.weight": [HIDDEN, WIDE]} | norms


def _write(path: Path, shapes: dict[str, list[int]]) -> int:
    """Write BF16 tensors like weights, no two blocks of 32 KiB the same; return their bytes."""
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(len(path.name) + at)
    block = 1 << 22
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, 2 * block):
            values = rng.standard_normal(block, dtype=np.float32) * np.float32(0.02)
            data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
            file.write(data[: at - start])
    return at
