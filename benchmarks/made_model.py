"""A Llama folder of a wanted size that `ralbuild image` takes: real headers, made-up weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ralbuild.checking import LAYER_MTIME
from ralbuild.contract.codec import canonical_json, sha256_hex, to_plain
from ralbuild.contract.tarball import WeightLayer
from ralbuild.digests import DigestCache, StatKey
from ralbuild.weights.values import KIND, Verdict
from tests.model_factory import TEMPLATE, VOCAB, llama_config, tokenizer_json

HIDDEN, WIDE = 1024, 4096
"""Width and inner width: a layer has 32 MB in BF16."""
SPARSE_HIDDEN, SPARSE_WIDE = 4096, 14336
"""Those of a sparse model, which is larger: 436 MB a layer."""


def write_model(folder: Path, shards: int, shard_mb: int, *, sparse: bool = False) -> int:
    """Write a model with ``shards`` weight files of about ``shard_mb`` MB; return the bytes of all.

    A ``sparse`` one has real headers and a hole for data: nobody may read it, see `remember_digests`.
    """
    folder.mkdir(parents=True)
    hidden, wide = (SPARSE_HIDDEN, SPARSE_WIDE) if sparse else (HIDDEN, WIDE)
    each = max(1, round(shard_mb * 1e6 / (2 * (4 * hidden**2 + 3 * hidden * wide))))
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        shapes: dict[str, list[int]] = {}
        for layer in range(number * each, (number + 1) * each):
            shapes |= _layer(f"model.layers.{layer}.", hidden, wide)
        if number == 0:
            shapes |= {"model.embed_tokens.weight": [VOCAB, hidden], "model.norm.weight": [hidden]}
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        total += _write(folder / name, shapes, sparse=sparse)
        weight_map.update(dict.fromkeys(shapes, name))
    config = llama_config() | {
        "hidden_size": hidden,
        "intermediate_size": wide,
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


def remember_digests(folder: Path, cache: DigestCache) -> dict[str, int]:
    """Make ``cache`` know the weights, as after one read of them; return layer digest to size in bytes.

    The digests are made up: a build that reads a byte of the weights finds others.
    """
    layers: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            start = file.read(8)
            header = start + file.read(int.from_bytes(start, "little"))
        info, frame = path.stat(), WeightLayer(LAYER_MTIME)
        frame.start(path.name, info.st_size)
        frame.end()
        digest = sha256_hex(str(path).encode())
        values = {
            "layer_sha256": digest,
            "layer_size": str(frame.size),
            "observer": KIND,
            "verdict": canonical_json(to_plain(Verdict(sha256_hex(header), (), 0, {}))).decode(),
        }
        cache.put(path, f"weight-layer:{path.name}:{LAYER_MTIME}", StatKey.of(info), values)
        layers[f"sha256:{digest}"] = frame.size
    return layers


def _layer(at: str, hidden: int, wide: int) -> dict[str, list[int]]:
    square = {f"{at}self_attn.{name}_proj.weight": [hidden, hidden] for name in "qkvo"}
    inner = {f"{at}mlp.{name}_proj.weight": [wide, hidden] for name in ("gate", "up")}
    norms = {f"{at}{name}.weight": [hidden] for name in ("input_layernorm", "post_attention_layernorm")}
    return square | inner | {f"{at}mlp.down_proj.weight": [hidden, wide]} | norms


def _write(path: Path, shapes: dict[str, list[int]], *, sparse: bool) -> int:
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
        if sparse:
            file.truncate(8 + len(text) + at)
            return at
        for start in range(0, at, 2 * block):
            values = rng.standard_normal(block, dtype=np.float32) * np.float32(0.02)
            data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
            file.write(data[: at - start])
    return at
