"""Faults in a real model's weights, each made in place in a copy and found by its values."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_factory import edit_json

from ralbuild.digests import DigestCache
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import Header, read_header
from ralbuild.weights.scan import Verdict, verify_folder

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ralbuild"
MODEL = CACHE / "models" / "smollm2-135m-instruct"
DOWN = "model.layers.11.mlp.down_proj.weight"

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    assert MODEL.is_dir(), "run ci/fetch_model.py first"
    folder = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("smollm2") / "model"))
    yield folder
    shutil.rmtree(folder)


def verify(folder: Path) -> Verdict:
    return verify_folder(folder, DigestCache(None), 0, lambda done, total: None)


def errors(verdict: Verdict) -> list[tuple[str, str]]:
    return [(item.rule.id, item.tensor) for item in verdict.findings if item.severity != "info"]


def header_of(folder: Path) -> Header:
    header = read_header(folder / "model.safetensors", "model.safetensors", Findings())
    assert header is not None
    return header


def patch(folder: Path, at: int, data: bytes) -> bytes:
    """Overwrite bytes of the weight file; return what was there."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(at)
        before = file.read(len(data))
        file.seek(at)
        file.write(data)
    return before


def test_the_real_model_has_nothing_above_info(copy: Path) -> None:
    assert errors(verify(copy)) == []


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        ("W401", lambda old: b"\xc0\x7f" + old[2:]),
        ("W402", lambda old: b"\x80\xff" + old[2:]),
        ("W403", lambda old: bytes([old[0], old[1] | 0x40]) + old[2:]),
        ("W404", lambda old: bytes(len(old))),
        ("W401", lambda old: b"".join(old[at : at + 2][::-1] for at in range(0, len(old), 2))),
    ],
    ids=["one NaN", "one infinity", "one exponent bit", "zeroed", "bytes swapped"],
)
def test_a_fault_in_one_matrix_is_found_and_named(rule: str, make: object, copy: Path) -> None:
    header = header_of(copy)
    tensor = next(item for item in header.tensors if item.name == DOWN)
    start, size = header.data_start + tensor.begin, tensor.end - tensor.begin
    with (copy / "model.safetensors").open("rb") as file:
        file.seek(start)
        before = file.read(size)
    patch(copy, start, make(before))
    try:
        assert (rule, DOWN) in errors(verify(copy))
    finally:
        patch(copy, start, before)


def test_a_config_of_another_size_is_found(copy: Path) -> None:
    text = (copy / "config.json").read_text()
    try:
        edit_json(copy / "config.json", lambda c: c.update(num_hidden_layers=29))
        assert [rule for rule, _ in errors(verify(copy))] == ["W312"]
        (copy / "config.json").write_text(text)
        edit_json(copy / "config.json", lambda c: c.update(tie_word_embeddings=False))
        assert errors(verify(copy)) == [("W314", "lm_head.weight")]
    finally:
        (copy / "config.json").write_text(text)


def test_a_header_that_changes_while_the_data_is_read_is_noticed(copy: Path, tmp_path: Path) -> None:
    path = copy / "model.safetensors"
    length = struct.unpack("<Q", path.open("rb").read(8))[0]
    head = json.loads(path.open("rb").read(8 + length)[8:])
    assert "model.norm.weight" in head
    changed: list[bytes] = []

    def once(done: int, total: int) -> None:
        if not changed:
            changed.append(patch(copy, path.stat().st_size - 2, b"\x01\x01"))

    try:
        verdict = verify_folder(copy, DigestCache(None), 0, once)
        assert ("W225", "") in errors(verdict)
    finally:
        patch(copy, path.stat().st_size - 2, changed[0])
