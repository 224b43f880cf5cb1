"""Folders made to hang, exhaust or mislead verify: each ends soon, in little memory, with its finding."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import struct
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bounds import bounded
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import edit_json, write_model

from ralbuild.cli.main import main
from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.digests import DigestCache
from ralbuild.errors import HostError
from ralbuild.weights import child, files, members, tokenizer
from ralbuild.weights.files import read_json
from ralbuild.weights.findings import Findings
from ralbuild.weights.members import Members
from ralbuild.weights.safetensors import MAX_TENSORS, parse_header
from ralbuild.weights.scan import Order, Verdict, verify_folder

pytestmark = pytest.mark.usefixtures("one_worker_a_request")

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
MB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def verify(folder: Path) -> Verdict:
    return verify_folder(folder, DigestCache(None), 0, lambda done, total: None)


def ids(verdict: Verdict) -> set[str]:
    return {item.rule.id for item in verdict.findings}


def write_below(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise SystemExit")


def replace(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder / name


def hole(name: str, size: int) -> Callable[[Path], Any]:
    """Replace a file by a hole of ``size`` bytes, which takes no disk."""

    def change(folder: Path) -> None:
        with replace(folder, name).open("wb") as file:
            file.truncate(size)

    return change


def terabyte(folder: Path) -> None:
    with (folder / ONE).open("r+b") as file:
        file.truncate(1 << 40)


CASES: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("a link to an endless device", "W201", lambda f: replace(f, "config.json").symlink_to("/dev/zero")),
    ("a link to itself", "W201", lambda f: replace(f, "config.json").symlink_to("config.json")),
    ("two links in a circle", "W201", lambda f: (replace(f, "config.json").symlink_to("b"), (f / "b").symlink_to("config.json"))),
    ("a link to the folder", "W201", lambda f: (f / "self").symlink_to(".")),
    ("a folder named like a file", "W203", lambda f: replace(f, "config.json").mkdir()),
    ("a tokenizer that is a hole of 60 MB", "W221", hole("tokenizer.json", 60 * MB)),
    ("a tokenizer that is a hole of a terabyte", "W219", hole("tokenizer.json", 1 << 40)),
    ("a config that is a hole", "W221", hole("config.json", MB)),
    ("a template that is a hole of a terabyte", "W219", hole("chat_template.jinja", 1 << 40)),
    ("weights that are a hole of a terabyte", "W109", hole(ONE, 1 << 40)),
    ("a terabyte of hole behind the weights", "W122", terabyte),
    ("a header of empty lists", "W219", lambda f: (f / "tokenizer_config.json").write_bytes(b'{"a":[' + b"[]," * (5 * MB) + b"0]}")),
    ("wide characters", "W219", lambda f: (f / "tokenizer.json").write_bytes('{"a":"🙂'.encode() + b"," * (60 * MB) + b'"}')),
    ("a shard with a NUL in its name", "W208", lambda f: ((f / ONE).rename(f / "a.safetensors"), (f / INDEX).write_text('{"weight_map": {"x": "a\\u0000.safetensors"}}'))),
    ("a shard with a long name", "W208", lambda f: ((f / ONE).rename(f / "a.safetensors"), (f / INDEX).write_text(json.dumps({"weight_map": {"x": "a" * 5000 + ".safetensors"}})))),
    ("a name that is no UTF-8", "W224", lambda f: Path(os.fsdecode(os.fsencode(f) + b"/\xff\xfe.txt")).write_text("x")),
    ("a name that moves the cursor", "W217", lambda f: (f / "\x1b[2J\n.bin").write_text("x")),
    ("a name that is no UTF-8, of a shard", "W217", lambda f: Path(os.fsdecode(os.fsencode(f) + b"/\xff.safetensors")).write_text("x")),
]  # fmt: skip


@pytest.mark.parametrize(("what", "expected", "change"), CASES, ids=[case[0] for case in CASES])
def test_each_hostile_folder_has_its_finding(
    what: str,
    expected: str,
    change: Callable[[Path], Any],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "xdg"))
    change(model)
    with bounded():
        assert main(["verify", "--quiet", "--json", "--model", str(model)]) in (0, 3)
    out = capsysbinary.readouterr().out.decode()
    assert expected in {item["id"] for item in json.loads(out)["findings"]}
    assert "\x1b" not in out


def test_a_folder_of_many_files_is_refused_before_they_are_looked_at(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 20)
    for number in range(30):
        (model / f"{number}.txt").touch()
    assert "W226" in ids(verify(model))
    monkeypatch.setattr(files, "MOST_ENTRIES", 100)
    assert "W226" not in ids(verify(model))
    for number in range(101):
        write_below(model / "below" / f"{number % 3}" / f"{number}.txt")
    assert "W226" in ids(verify(model))


def test_code_in_folders_is_found_however_deep_and_behind_no_link(model: Path, tmp_path: Path) -> None:
    deep = model
    for _ in range(1200):  # Python's own walk of a tree calls itself for each
        deep /= "d"
        deep.mkdir()
    write_below(deep / "x.py")
    write_below(tmp_path / "elsewhere" / "y.py")
    (model / "d" / "link").symlink_to(tmp_path / "elsewhere")
    (model / "d" / "circle").symlink_to(model)
    (model / "d" / "z.so").symlink_to("/nowhere")
    os.mkfifo(model / "d" / "pipe.py")
    found = {item.file for item in verify(model).findings if item.rule.id == "W701"}
    assert found == {"d/pipe.py", "d/z.so", str((deep / "x.py").relative_to(model))}
    (deep / "x.py").unlink()
    while deep != model / "d":  # Python's own removal of a tree calls itself too
        deep.rmdir()
        deep = deep.parent


def test_a_model_path_that_is_too_long_or_a_circle_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / ("x" * 300), tmp_path / "\udcff"):
        assert main(["verify", "--quiet", "--model", str(path)]) == 3
        assert capsys.readouterr().err.count("error:") == 1


def test_a_file_that_may_not_be_read_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ralbuild-test-", dir="/tmp"))
    user = os.geteuid()
    try:
        folder.chmod(0o755)
        verify(write_model(folder / "model"))  # its workers' answers are remembered
        for name in ("generation_config.json", ONE):
            (folder / "model" / name).chmod(0)
        if user == 0:
            os.seteuid(65534)  # root may read everything
        verdict = verify(folder / "model")
        assert {item.file for item in verdict.findings if item.rule.id == "W220"} == {
            "generation_config.json",
            ONE,
        }
    finally:
        os.seteuid(user)
        shutil.rmtree(folder)


def test_a_machine_that_starts_no_process_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    with pytest.raises(HostError, match="cannot be started"):
        child.run_limited("tokenizer_worker.py", b"[]\n{}", 1, 1 << 30)


def test_a_shard_that_goes_away_while_another_is_read_is_a_finding(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=3)
    last = folder / "model-00003-of-00003.safetensors"
    verdict = verify_folder(
        folder, DigestCache(None), 0, lambda done, total: last.unlink(missing_ok=True), Order(jobs=1)
    )
    assert ("W225", last.name) in {(item.rule.id, item.file) for item in verdict.findings}


def test_a_shard_that_grows_while_it_is_read_is_a_finding(model: Path) -> None:
    def grow(done: int, total: int) -> None:
        with (model / ONE).open("ab") as file:
            file.write(b"x")

    assert "W225" in ids(verify_folder(model, DigestCache(None), 0, grow))


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
RUNAWAY: list[tuple[str, str, dict[str, Any]]] = [
    ("a pattern that tries all ways", "W514", {"type": "Replace", "pattern": {"Regex": r"((.+)+)+[^\s\S]"}, "content": "x"}),
    ("a text that grows without end", "W523", functools.reduce(lambda inner, _: {"type": "Sequence", "normalizers": [inner] * 8}, range(5), REPLACE)),
]  # fmt: skip


@pytest.mark.parametrize(("what", "expected", "normalizer"), RUNAWAY, ids=[case[0] for case in RUNAWAY])
def test_a_tokenizer_that_runs_away_is_ended_and_refused(
    what: str, expected: str, normalizer: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "CPU_SECONDS", 2)
    monkeypatch.setattr(tokenizer, "MEMORY_BYTES", 1 << 30)
    edit_json(model / "tokenizer.json", lambda value: value.update(normalizer=normalizer))
    verdict = verify(model)
    assert expected in ids(verdict)
    assert verdict.model is None


def test_a_worker_that_dies_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = child.run_limited.__wrapped__
    assert run("nowhere.py", b"", 1, 1 << 30) is None
    assert run("template_worker.py", b"not JSON", 1, 1 << 30) is None


def test_a_header_of_too_many_tensors_is_refused_in_bounded_memory() -> None:
    one = '"model.layers.%d.mlp.experts.%d.up_proj.weight":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    text = b"".join(
        (one % (n // 100, n, n, n + 1)).encode() + b"," for n in range(2000)
    )  # the same names again and again would be duplicates, so a small cap stands for the large one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ralbuild.weights.safetensors.MAX_TENSORS", 1000)
        findings = Findings()
        data = b"{" + text[:-1] + b"}"
        assert (
            parse_header(io.BytesIO(struct.pack("<Q", len(data)) + data), 8 + len(data) + 2000, "x", findings)
            is None
        )
        assert findings.has("W127")
    assert MAX_TENSORS >= 220_000


def test_the_memory_of_a_header_is_that_of_its_tensors() -> None:
    """Padding, metadata and wide characters cost a window, not the header's length."""
    note = json.dumps({"__metadata__": {"format": "pt", "x": "🙂"}}, ensure_ascii=False)[:-1]
    text = note.encode() + b" " * (40 * MB) + b"}"
    file = io.BytesIO(struct.pack("<Q", len(text)) + text)
    tracemalloc.start()
    try:
        assert parse_header(file, 8 + len(text), "x", Findings()) is not None
        assert tracemalloc.get_traced_memory()[1] < 8 * MB
    finally:
        tracemalloc.stop()


# --- the reader of large objects, against the reader of small ones ---

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def read_members(data: bytes) -> list[tuple[str, Any]]:
    return list(Members(io.BytesIO(data).read, "x"))


@given(
    value=st.dictionaries(st.text(max_size=8), VALUES, max_size=8),
    window=st.integers(1, 40),
    pretty=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_members_are_those_of_the_whole_text_whatever_the_window(
    value: dict[str, Any], window: int, pretty: bool
) -> None:
    data = json.dumps(value, indent=1 if pretty else None, ensure_ascii=pretty).encode(
        "utf-8", "surrogatepass"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "CHUNK", window)
        try:
            expected = parse_json(data, "x")
        except FormatError:
            with pytest.raises(FormatError):
                read_members(data)
            return
        assert dict(read_members(data)) == expected == value


@given(data=st.data(), window=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_members_refuse_what_is_no_object(data: st.DataObject, window: int) -> None:
    text = bytearray(
        b'{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}, "b": 1e5 }'
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from(b'{}[]",:\\0-.eE \x00\xff\xc3nu9'))
    if data.draw(st.booleans()):
        del text[data.draw(st.integers(0, len(text))) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "CHUNK", window)
        try:
            expected = parse_json(bytes(text), "x")
        except FormatError:
            expected = None
        if isinstance(expected, dict):
            with bounded():
                assert dict(read_members(bytes(text))) == expected
        else:
            # A duplicate key is for the caller to find: members come one by one.
            try:
                with bounded():
                    keys = [key for key, _ in read_members(bytes(text))]
            except FormatError:
                return
            assert len(set(keys)) < len(keys)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_of_a_json_file_give_anything_but_an_object_or_a_finding(data: bytes) -> None:
    findings = Findings()
    with bounded():
        value = read_json(data, "config.json", findings)
    assert (value is None) == findings.failed
