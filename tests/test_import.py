"""`ralbuild import`: a small GGUF file, written by the gguf library, to a folder that verify accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_factory import tokenizer_json

from ralbuild.cli.main import main

HIDDEN, HEADS, INNER = 64, 4, 96


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer in 8-bit blocks, with a byte-level vocabulary."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    writer = GGUFWriter(path, "llama")
    vocab = tokenizer_json()["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(words))])
    writer.add_token_merges(tokenizer_json()["model"]["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(3)
    shapes = {
        "token_embd.weight": (len(words), HIDDEN), "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN), "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN), "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN), "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }  # fmt: skip
    for name, shape in shapes.items():
        data = rng.normal(0, 0.1, shape).astype(np.float32)
        packed = quants.quantize(data, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_verified_folder(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main(["import", "--gguf", str(gguf), "--out", str(out), "--quiet"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip() == str(out)
    assert main(["verify", "--model", str(out), "--quiet", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert manifest["model_type"] == "llama"
    assert manifest["dtype"] == "BF16"
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("content", "code"), [(b"", 3), (b"GGUF\x03\x00\x00\x00" + bytes(64), 3), (b"\x80\x04]q", 3), (None, 3)]
)
def test_what_is_no_gguf_file_is_one_error_and_leaves_nothing(
    content: bytes | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    if content is not None:
        file.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert main(["import", "--gguf", str(file), "--out", str(tmp_path / "out"), "--quiet"]) == code
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_folder_is_not_touched(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert main(["import", "--gguf", str(gguf), "--out", str(tmp_path / "out"), "--quiet"]) == 2
