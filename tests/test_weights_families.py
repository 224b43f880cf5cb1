"""Healthy folders of every family, written by transformers itself: nothing above a note is found."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_factory import TEMPLATE, VOCAB, tokenizer_json

from ralbuild.digests import DigestCache
from ralbuild.weights.families import evaluate, families
from ralbuild.weights.scan import Verdict, verify_folder

pytestmark = pytest.mark.usefixtures("one_worker_a_request")

COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("llama-tied", "llama", {"tie_word_embeddings": True}),
    ("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", "mistral", {}),
    ("mistral-nemo-heads", "mistral", {"head_dim": 16}),
    ("qwen2", "qwen2", {}),
    ("qwen3", "qwen3", {"head_dim": 16}),
    ("qwen3-bias", "qwen3", {"head_dim": 16, "attention_bias": True}),
    ("gemma", "gemma", {"head_dim": 16}),
    ("gemma2", "gemma2", {"head_dim": 16}),
    ("gemma3_text", "gemma3_text", {"head_dim": 16, "num_hidden_layers": 7}),
    ("phi", "phi", {"num_key_value_heads": 4}),
    ("phi-norms", "phi", {"num_key_value_heads": 2, "qk_layernorm": True}),
    ("phi3", "phi3", {}),
    ("mixtral", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ("qwen3_moe", "qwen3_moe", {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ("qwen3_moe-dense", "qwen3_moe", {"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0], "num_hidden_layers": 3, "decoder_sparse_step": 2}),
    ("gpt2", "gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    ("gpt2-inner", "gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 40}),
]  # fmt: skip


def save(folder: Path, model_type: str, settings: dict[str, Any], **how: Any) -> Path:
    """Write a random model of ``model_type`` as transformers writes it, with our tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    common = dict(COMMON)
    if model_type == "gpt2":
        common = {key: common[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(model_type, **common | settings)
        model = AutoModelForCausalLM.from_config(config, dtype=how.pop("dtype", torch.float32))
        model.save_pretrained(folder, **how)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a case's name to its folder, made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            _, model_type, settings = next(case for case in CASES if case[0] == name)
            made[name] = save(tmp_path_factory.mktemp(name) / "model", model_type, settings)
        return made[name]

    return folder


def verify(folder: Path) -> Verdict:
    return verify_folder(folder, DigestCache(None), 0, lambda done, total: None)


def above_info(verdict: Verdict) -> list[str]:
    return [
        f"{item.rule.id} {item.place}: {item.message}" for item in verdict.findings if item.severity != "info"
    ]


@pytest.mark.parametrize(("name", "model_type", "settings"), CASES, ids=[case[0] for case in CASES])
def test_a_healthy_folder_has_no_finding_above_info(
    name: str, model_type: str, settings: dict[str, Any], saved: Callable[[str], Path]
) -> None:
    verdict = verify(saved(name))
    assert above_info(verdict) == []
    assert verdict.model is not None
    assert verdict.model.manifest.model_type == model_type


def test_every_family_of_the_tables_is_tried() -> None:
    assert {case[1] for case in CASES} == set(families())


def test_a_healthy_sharded_bf16_folder_has_no_finding_above_info(tmp_path: Path) -> None:
    import torch

    settings = {"intermediate_size": 4096}
    folder = save(tmp_path / "model", "llama", settings, max_shard_size="500KB", dtype=torch.bfloat16)
    assert (folder / "model.safetensors.index.json").exists()
    verdict = verify(folder)
    assert above_info(verdict) == []
    assert verdict.model is not None
    assert verdict.model.manifest.dtype == "BF16"
    assert len(verdict.model.shards) > 1


@pytest.mark.parametrize("model_type", sorted(families()))
def test_a_missing_and_a_renamed_tensor_are_found_in_every_family(
    model_type: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    name = next(case[0] for case in CASES if case[1] == model_type)
    folder = Path(shutil.copytree(saved(name), tmp_path / "model"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    victim = next(name for name in sorted(tensors) if ".1." in name)
    tensors[victim.replace(".1.", ".1.odd.")] = tensors.pop(victim)
    save_file(tensors, path, {"format": "pt"})
    found = {(item.rule.id, item.tensor) for item in verify(folder).findings}
    assert ("W308", victim) in found
    assert ("W309", victim.replace(".1.", ".1.odd.")) in found


def test_old_gpt2_names_and_buffers_are_accepted(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    folder = save(tmp_path / "model", "gpt2", CASES[-1][2])
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): item for name, item in load_file(path).items()}
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        tensors[f"h.{layer}.attn.masked_bias"] = np.array(-1e9, np.float32)
    save_file(tensors, path, {"format": "pt"})
    assert above_info(verify(folder)) == []


def test_the_formulas_are_sums_of_products() -> None:
    sizes = {"A": 4, "K": 2, "D": 8}
    assert evaluate("A*D+2*K*D", sizes) == 64
    assert evaluate("D", sizes) == 8
