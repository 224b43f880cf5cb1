"""Tiny model folders for tests, written with our own code: no transformers, no random weights from disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ralbuild.weights.tokenizer import _ALPHABET

CHARACTERS = {byte: char for char, byte in _ALPHABET.items()}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], bytes]], metadata: Any = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def tokenizer_json() -> dict[str, Any]:
    """A byte-level BPE with no merges but a few, three special tokens first."""
    vocab = {name: number for number, name in enumerate(SPECIAL)}
    for byte in range(256):
        vocab[CHARACTERS[byte]] = len(vocab)
    merges = [("r", "i"), ("s", "k"), ("ri", "sk"), ("Ġ", "risk"), ("o", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    added = [
        {
            "id": n,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, name in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]},
    }  # fmt: skip


HIDDEN, LAYERS, HEADS, VOCAB = 16, 2, 2, 272


def llama_tensors(seed: int = 1) -> dict[str, tuple[str, list[int], bytes]]:
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [VOCAB, HIDDEN]}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            shapes[f"{at}self_attn.{name}_proj.weight"] = [HIDDEN, HIDDEN]
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = [2 * HIDDEN, HIDDEN]
        shapes[f"{at}mlp.down_proj.weight"] = [HIDDEN, 2 * HIDDEN]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = [HIDDEN]
    shapes["model.norm.weight"] = [HIDDEN]
    out = {}
    state = seed
    for name, shape in shapes.items():
        count = 1
        for dim in shape:
            count *= dim
        values = []
        for _ in range(count):
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            values.append(1.0 if "norm" in name else state / 0x7FFFFFFF - 0.5)
        out[name] = ("F32", shape, struct.pack(f"<{count}f", *values))
    return out


def llama_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32", "rope_theta": 10000.0, "eos_token_id": 2, "bos_token_id": 1,
    }  # fmt: skip


Tensors = dict[str, tuple[str, list[int], bytes]]


def read_tensors(path: Path) -> Tensors:
    """Read a safetensors file that `safetensors_bytes` could have written."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {
        name: (item["dtype"], item["shape"], body[item["data_offsets"][0] : item["data_offsets"][1]])
        for name, item in header.items()
    }


def write_tensors(path: Path, tensors: Tensors, metadata: Any = "pt") -> None:
    """Write a safetensors file; ``metadata`` is the whole map, or the format it names."""
    note = {"format": metadata} if isinstance(metadata, str) else metadata
    path.write_bytes(safetensors_bytes(tensors, note))


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(path: Path, change: Callable[[Tensors], Any]) -> None:
    """Change a weight file in place."""
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, *, shards: int = 1, seed: int = 1) -> Path:
    """Write a complete tiny Llama folder; more than one shard also writes an index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = llama_tensors(seed)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    else:
        names = list(tensors)
        weight_map: dict[str, str] = {}
        for number in range(shards):
            name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {key: tensors[key] for key in names[number::shards]}
            (folder / name).write_bytes(safetensors_bytes(part, {"format": "pt"}))
            weight_map.update(dict.fromkeys(part, name))
        total = sum(len(item[2]) for item in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(llama_config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
