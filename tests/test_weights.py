"""The model folder: headers, index, tokenizer and the digests, against the libraries of the field."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest
import safetensors
from bounds import bounded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_factory import edit_json, edit_tensors, llama_tensors, safetensors_bytes, write_model
from tokenizers import Tokenizer

from ralbuild.digests import DigestCache
from ralbuild.errors import WeightsError
from ralbuild.weights.findings import Findings, FoundError
from ralbuild.weights.safetensors import DTYPE_BITS, Header, parse_header, read_header
from ralbuild.weights.scan import Order, ScannedModel, Verdict, verify_folder
from ralbuild.weights.tokenizer import PROBE, read_vocabulary

pytestmark = pytest.mark.usefixtures("one_worker_a_request")


def scan(folder: Path, cache: DigestCache | None = None, *, own_digests: bool = False) -> ScannedModel:
    order = Order(own_digests=own_digests)
    return good(verify_folder(folder, cache or DigestCache(None), 0, lambda done, total: None, order))


def good(verdict: Verdict) -> ScannedModel:
    if verdict.model is None:
        raise FoundError(verdict.findings)
    return verdict.model


def test_manifest_holds_the_digests_that_openssl_gives(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=3)
    (folder / "README.md").write_text("x")
    model = scan(folder, own_digests=True)
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    assert [item.path for item in model.manifest.weight_files] == list(model.weight_digests) == names
    digests = {item.path: item.sha256 for item in model.manifest.files} | model.weight_digests
    for item in (*model.manifest.weight_files, *model.manifest.files):
        assert digests[item.path] == hashlib.sha256((folder / item.path).read_bytes()).hexdigest()
        assert item.size == (folder / item.path).stat().st_size
    assert scan(folder).manifest == model.manifest, "what is asked for besides changes no image"
    assert scan(folder).weight_digests == {}
    assert model.manifest.eos_token_ids == (0, 2)
    assert model.manifest.tensors == len(llama_tensors())
    assert model.left_out == ("README.md",)


def test_header_agrees_with_the_reference_library(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model") / "model.safetensors"
    header = read_header(path, path.name, Findings())
    assert header is not None
    ours = {tensor.name: tensor for tensor in header.tensors}
    with safetensors.safe_open(path, "np") as theirs:
        assert set(ours) == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118  # the library's object is no mapping
            assert list(ours[name].shape) == theirs.get_slice(name).get_shape()


def parse(text: bytes, size: int) -> tuple[Header | None, set[str]]:
    findings = Findings()
    file = io.BytesIO(struct.pack("<Q", len(text)) + text)
    header = parse_header(file, 8 + len(text) + size, "x.safetensors", findings)
    return header, {item.rule.id for item in findings.sorted() if item.severity == "error"}


def test_a_header_of_220_000_tensors_is_read(tmp_path: Path) -> None:
    count = 220_000
    header = {f"t{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(count)}
    found, errors = parse(json.dumps(header).encode(), count)
    assert not errors
    assert found is not None
    assert len(found.tensors) == count


@pytest.mark.parametrize("filler", [b"0", b"{}", b"[]", b'""'])
def test_a_header_stuffed_with_values_is_refused_before_it_costs_memory(filler: bytes) -> None:
    text = b'{"a":[' + (filler + b",") * 6_000_000 + b"0]}"
    file, findings = io.BytesIO(struct.pack("<Q", len(text)) + text), Findings()
    tracemalloc.start()
    try:
        assert parse_header(file, 8 + len(text), "x.safetensors", findings) is None
        assert findings.has("W109")
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_each_of_the_22_types_is_sized_as_the_reference_library_sizes_it(dtype: str, tmp_path: Path) -> None:
    size = DTYPE_BITS[dtype]  # eight elements
    text = json.dumps({"a": {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with safetensors.safe_open(path, "np") as theirs:
        assert list(theirs.keys()) == ["a"]
    assert parse(text, size)[0] is not None


def test_a_truncated_shard_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    path = folder / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(WeightsError, match="100 bytes too short") as caught:
        scan(folder)
    assert path.name in str(caught.value)


def test_a_broken_folder_is_one_error_with_every_problem(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=3, auto_map={"a": "b"}))
    with pytest.raises(FoundError) as caught:
        scan(folder)
    assert caught.value.exit_code == 3
    assert {finding.rule.id for finding in caught.value.findings} >= {"W311", "W702"}
    assert all("[W" in str(problem) for problem in caught.value.problems)


def test_an_error_that_is_known_keeps_the_weights_from_being_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=3))
    read: list[int] = []
    order = Order(fail_fast=True)
    verdict = verify_folder(folder, DigestCache(None), 0, lambda done, total: read.append(done), order)
    assert verdict.failed
    assert read == []


def test_token_bytes_spell_what_the_tokenizers_library_decodes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model") / "tokenizer.json"
    source = path.read_bytes()
    vocabulary = read_vocabulary(json.loads(source), source, Findings())
    assert vocabulary is not None
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
    assert third.manifest.weights[0].sha256 != first.manifest.weights[0].sha256
    assert scan(folder, own_digests=True).weight_digests["model.safetensors"] == (
        hashlib.sha256(data).hexdigest()
    )


def test_a_file_whose_values_were_not_looked_at_is_read_again(tmp_path: Path) -> None:
    from ralbuild.digests import scan_file

    folder = write_model(tmp_path / "model")
    path = folder / "model.safetensors"
    edit_tensors(path, lambda t: t.update({"model.norm.weight": ("F32", [16], bytes(60) + b"\0\0\xc0\x7f")}))
    time.sleep(2.1)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    time.sleep(2.1)
    cache = DigestCache(tmp_path / "cache")
    scan_file(path, cache, 0)
    assert scan_file(path, cache, 0).cached
    for _ in range(2):  # read, then remembered: found both times
        with pytest.raises(FoundError, match="W401"):
            scan(folder, cache)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_bytes_give_anything_but_a_header_or_findings(data: bytes) -> None:
    with bounded():
        header, errors = parse(data, 64)
    assert (header is None) == bool(errors) or header is not None


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_mutation_of_a_file_gives_a_traceback(data: st.DataObject) -> None:
    raw = bytearray(safetensors_bytes({"a": ("F32", [2], bytes(8)), "b": ("U8", [3], bytes(3))}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(raw)
        file.flush()
        findings = Findings()
        with bounded():
            header = read_header(Path(file.name), "x", findings)
        assert header is not None or findings.failed


NASTY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["F32", "BPE", "ByteLevel", "llama", "LlamaForCausalLM", "<|im_end|>", "model.safetensors"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_value_in_any_json_file_gives_a_traceback(data: st.DataObject, fuzzed: Path) -> None:
    name = data.draw(st.sampled_from(sorted(path.name for path in fuzzed.glob("*.json"))))
    path = fuzzed / name
    before = path.read_bytes()
    value = json.loads(before)
    for _ in range(data.draw(st.integers(1, 2))):
        at = value
        while True:  # walk to some place in the file and put anything there
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys[:12]))
            deeper = isinstance(at[key], dict | list) and len(at[key]) > 0 and data.draw(st.booleans())
            if not deeper:
                at[key] = data.draw(NASTY)
                break
            at = at[key]
    try:
        path.write_text(json.dumps(value))
        with bounded():
            verdict = verify_folder(fuzzed, DigestCache(None), 0, lambda done, total: None)
        assert verdict.failed == (verdict.model is None)
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fuzz") / "model", shards=2)
