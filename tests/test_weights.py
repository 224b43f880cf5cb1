"""The model folder: headers, index, tokenizer and the digests, against the libraries of the field."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import llama_tensors, safetensors_bytes, write_model
from tokenizers import Tokenizer

from ralbuild.digests import DigestCache
from ralbuild.errors import WeightsError
from ralbuild.weights.safetensors import parse_header, read_header
from ralbuild.weights.scan import ScannedModel, scan_model
from ralbuild.weights.tokenizer import PROBE, read_vocabulary


def scan(folder: Path, cache: DigestCache | None = None) -> ScannedModel:
    return scan_model(folder, cache or DigestCache(None), 0, lambda done, total: None)


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_manifest_holds_the_digests_that_openssl_gives(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=3)
    (folder / "README.md").write_text("x")
    model = scan(folder)
    assert [item.path for item in model.manifest.weights] == sorted(
        p.name for p in folder.glob("*.safetensors")
    )
    for item in (*model.manifest.weights, *model.manifest.files):
        assert item.sha256 == hashlib.sha256((folder / item.path).read_bytes()).hexdigest()
        assert item.size == (folder / item.path).stat().st_size
    assert model.manifest.eos_token_ids == (0, 2)
    assert model.manifest.tensors == len(llama_tensors())
    assert model.left_out == ("README.md",)


def test_header_agrees_with_the_reference_library(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model") / "model.safetensors"
    ours = {tensor.name: tensor for tensor in read_header(path).tensors}
    with safetensors.safe_open(path, "np") as theirs:
        assert set(ours) == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118  # the library's object is no mapping
            assert list(ours[name].shape) == theirs.get_slice(name).get_shape()


def good_header() -> dict[str, object]:
    return {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]},
    }


@pytest.mark.parametrize(
    ("change", "size", "wording"),
    [
        (lambda h: h["a"].update(data_offsets=[0, 12]), 20, "takes 16 bytes, but data_offsets give 12"),
        (lambda h: h["b"].update(data_offsets=[12, 16]), 16, "overlaps 'a'"),
        (lambda h: h["b"].update(data_offsets=[18, 22]), 22, "leaves a hole of 2 bytes after 'a'"),
        (lambda h: h["a"].update(data_offsets=[16, 0]), 20, "takes 16 bytes"),
        (lambda h: h["a"].update(dtype="F31"), 20, "unknown dtype 'F31'"),
        (lambda h: h["a"].update(shape=[2, -2]), 20, "must be a list of sizes"),
        (lambda h: h["a"].update(shape=[2.0, 2]), 20, "must be a list of sizes"),
        (lambda h: h["a"].update(shape=[1 << 62, 1 << 62, 0]), 20, "must be a list of sizes"),
        (lambda h: h["a"].update(shape=[True, 4]), 20, "must be a list of sizes"),
        (lambda h: h["a"].pop("dtype"), 20, "needs dtype, shape and data_offsets"),
        (lambda h: h.update({"__metadata__": {"x": 1}}), 20, "__metadata__ must map text to text"),
        (lambda h: h.update({"": h.pop("a")}), 20, "tensor name"),
        (lambda h: None, 25, "5 bytes follow the last tensor"),
        (lambda h: None, 13, "7 bytes too short"),
        (lambda h: h.clear(), 3, "3 bytes follow"),
    ],
)
def test_every_fault_of_a_header_has_its_own_words(change: Callable, size: int, wording: str) -> None:
    header = good_header()
    change(header)
    with pytest.raises(WeightsError, match=None) as caught:
        parse_header(json.dumps(header).encode(), size, "x.safetensors")
    assert wording in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "wording"),
    [
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "duplicate key 'a'"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "duplicate key 'dtype'"),
        (b'{"a":NaN}', "NaN"),
        (b"[]", "must be a JSON object"),
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested"),
        (b'{"\\ud800":1}', "surrogate"),
    ],
)  # fmt: skip
def test_header_text_is_strict_json(text: bytes, wording: str) -> None:
    with pytest.raises(WeightsError) as caught:
        parse_header(text, 1, "x")
    assert wording in str(caught.value)


@pytest.mark.parametrize(
    ("content", "wording"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
        (b"<!doctype html><html>", "HTML page"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"GGUF" + bytes(60), "GGUF"),
        (b"", "empty"),
        (b"abc", "needs at least 8 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header says"),
    ],
)
def test_a_file_that_is_something_else_is_named(content: bytes, wording: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        scan(folder)
    assert wording in str(caught.value)


def test_a_truncated_shard_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    path = folder / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(WeightsError, match="100 bytes too short") as caught:
        scan(folder)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        (lambda f: (f / "config.json").unlink(), "lacks config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "lacks tokenizer.json"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "needs model.safetensors or shards"),
        (lambda f: (f / "model-00001-of-00002.safetensors").unlink(), "missing"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), "loaders disagree"),
        (lambda f: (f / "modeling_llama.py").write_text("boom"), "Python code"),
        (lambda f: edit_json(f / "config.json", lambda c: c.update(auto_map={"a": "b"})), "auto_map"),
        (lambda f: edit_json(f / "config.json", lambda c: c.update(vocab_size=500)), "has 272 rows"),
        (lambda f: edit_json(f / "config.json", lambda c: c.update(vocab_size=100)), "knows"),
        (lambda f: edit_json(f / "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq"})), "quantised"),
        (lambda f: edit_json(f / "config.json", lambda c: c.pop("model_type")), "lacks model_type"),
        (lambda f: edit_json(f / "generation_config.json", lambda c: c.update(eos_token_id=9999)), "outside"),
        (lambda f: edit_json(f / "model.safetensors.index.json", lambda c: c["weight_map"].update({"model.norm.weight": "model-00002-of-00002.safetensors" if c["weight_map"]["model.norm.weight"].startswith("model-00001") else "model-00001-of-00002.safetensors"})), "the index says"),
        (lambda f: edit_json(f / "model.safetensors.index.json", lambda c: c["weight_map"].pop("model.norm.weight")), "not in the index"),
        (lambda f: edit_json(f / "model.safetensors.index.json", lambda c: c["weight_map"].update(ghost="model-00001-of-00002.safetensors")), "found in no shard"),
        (lambda f: edit_json(f / "model.safetensors.index.json", lambda c: c["weight_map"].update(x="../../etc/passwd")), "not the name of a shard"),
        (lambda f: (f / "config.json").write_text("{" + " " * (5 << 20) + "}"), "at most"),
        (lambda f: (f / "extra.txt").symlink_to("/etc/passwd"), "symbolic link"),
        (lambda f: os.mkfifo(f / "pipe"), "neither a file nor a folder"),
        (lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")), "neither a file nor a folder"),
        (lambda f: edit_json(f / "tokenizer.json", lambda c: c.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}, pre_tokenizer=None)), "neither a byte-level"),
        (lambda f: edit_json(f / "tokenizer.json", lambda c: c["model"]["vocab"].update(zz=5)), "share one id"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused_with_the_reason(change: Callable, wording: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    change(folder)
    with pytest.raises(WeightsError) as caught:
        scan(folder)
    assert wording in str(caught.value)


def test_a_snapshot_of_the_hugging_face_cache_is_accepted_by_its_root(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain")
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    (root / "blobs").mkdir()
    for path in plain.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(root / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    model = scan(root)
    assert [shard.name for shard in model.shards] == ["model.safetensors"]
    assert model.manifest.weights[0].path == "model.safetensors"


def test_token_bytes_spell_what_the_tokenizers_library_decodes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model") / "tokenizer.json"
    vocabulary = read_vocabulary(path)
    library = Tokenizer.from_file(str(path))
    for text in (PROBE, "risk on\n", "🙂"):
        ids = library.encode(text).ids
        assert b"".join(vocabulary.tokens[number] for number in ids).decode() == text
    assert [vocabulary.tokens[number] for number in range(3)] == [b"", b"", b""], (
        "special tokens are not text"
    )


def test_known_digests_are_used_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    past = 1_000_000_000
    for path in folder.iterdir():
        os.utime(path, (past, past))
    cache = DigestCache(tmp_path / "cache")
    import time

    time.sleep(2.1)  # the racy rule: a file whose ctime is this new is not remembered
    first, second = scan(folder, cache), scan(folder, cache)
    assert not first.shards[0].digests.cached
    assert second.shards[0].digests.cached
    assert first.manifest == second.manifest
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    os.utime(folder / "model.safetensors", (past, past))
    third = scan(folder, cache)
    assert not third.shards[0].digests.cached
    assert third.manifest.weights[0].sha256 == hashlib.sha256(data).hexdigest()


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_bytes_give_anything_but_a_header_or_a_weights_error(data: bytes) -> None:
    try:
        parse_header(data, 64, "fuzz")
    except WeightsError as error:
        assert error.problems


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_mutation_of_a_header_gives_a_traceback(data: st.DataObject) -> None:
    raw = bytearray(safetensors_bytes({"a": ("F32", [2], bytes(8)), "b": ("U8", [3], bytes(3))}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = Path("/dev/shm/ralbuild-fuzz.safetensors")
    path.write_bytes(raw)
    try:
        read_header(path)
    except WeightsError as error:
        assert error.problems
    finally:
        path.unlink()
