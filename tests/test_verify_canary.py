"""The canary finds what no shape or value shows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from model_factory import edit_json, edit_tensors
from test_weights_families import above_info, save, verify

from ralbuild.cli.main import main
from ralbuild.contract.codec import to_plain
from ralbuild.errors import HostError, WeightsError
from ralbuild.weights import child
from ralbuild.weights.canary import (
    SCHEMA,
    Canary,
    CanaryRun,
    compare_canaries,
    read_canary,
    record,
    write_canary,
)
from ralbuild.weights.findings import Findings

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"num_key_value_heads": 4, "initializer_range": 0.5, "max_position_embeddings": 1024}
    return save(tmp_path_factory.mktemp("canary") / "model", "llama", settings)


@pytest.fixture(scope="module")
def recorded(model: Path) -> Path:
    file = model.parent / "canary.json"
    write_canary(model, file)
    return file


def transpose(folder: Path) -> None:
    def change(tensors: dict) -> None:
        dtype, (rows, columns), data = tensors[QUERY]
        items = [data[at : at + 4] for at in range(0, len(data), 4)]
        turned = b"".join(items[row * columns + column] for column in range(columns) for row in range(rows))
        tensors[QUERY] = (dtype, [columns, rows], turned)

    edit_tensors(folder / "model.safetensors", change)


def split_heads(folder: Path) -> None:
    """Two heads of 16 in place of four of 8: the same shapes everywhere."""

    def change(config: dict) -> None:
        config.update(num_attention_heads=2, num_key_value_heads=2, head_dim=16)

    edit_json(folder / "config.json", change)


def rope(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c["rope_parameters"].update(rope_theta=50.0))


def test_the_same_model_gives_the_same_tokens(model: Path, recorded: Path) -> None:
    findings = Findings()
    compare_canaries(read_canary(recorded), record(model), findings)
    assert findings.sorted() == ()


@pytest.mark.parametrize("change", [transpose, split_heads, rope])
def test_the_canary_finds_what_the_static_checks_cannot(
    change: Callable[[Path], None], model: Path, recorded: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    change(folder)
    assert above_info(verify(folder)) == []
    findings = Findings()
    compare_canaries(read_canary(recorded), record(folder), findings)
    assert findings.has("W801")


def canary(tokens: tuple[int, ...], margins: tuple[float, ...], prompt: tuple[int, ...] = (1,)) -> Canary:
    return Canary(SCHEMA, "0", "0", (CanaryRun(prompt, tokens, margins),))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (canary((5, 6, 7), (1.0, 1.0, 1.0)), False),
        (canary((5, 9, 7), (1.0, 1.0, 1.0)), True),
        (canary((5, 6, 8), (1.0, 1.0, 1.0)), False),  # the recorded choice was nearly a tie
        (canary((5, 6, 7), (1.0, 1.0, 1.0), prompt=(2,)), True),
        (Canary(SCHEMA, "0", "0", ()), True),
    ],
)
def test_only_a_clear_choice_counts(found: Canary, expected: bool) -> None:
    findings = Findings()
    compare_canaries(canary((5, 6, 7), (1.0, 1.0, 0.001)), found, findings)
    assert findings.has("W801") == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "\xff", json.dumps(to_plain(Canary("other", "0", "0", ())))]
)
def test_a_file_that_is_no_canary_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightsError):
        read_canary(tmp_path / "c.json")


@pytest.mark.parametrize("file", [".", "/", "no/such/folder/c.json", "a-file/c.json"])
def test_a_place_that_cannot_hold_the_file_is_known_before_the_model_runs(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("")
    monkeypatch.setattr("ralbuild.weights.canary.record", lambda folder: pytest.fail("the model was run"))
    with pytest.raises(HostError):
        write_canary(tmp_path, Path(file))


@pytest.mark.parametrize(("action", "code"), [("check", 3), ("write", 7)])
def test_a_wrong_canary_file_is_known_before_the_weights_are_read(
    action: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ralbuild.checking.check_model", lambda *_, **__: pytest.fail("weights were read"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (tmp_path / "no" / "c.json", tmp_path, *([pipe] if action == "check" else [])):
        assert main(["verify", "--quiet", "--model", str(tmp_path), "--canary", action, str(file)]) == code


def test_a_missing_extra_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(child.__file__).with_name("bound_worker.py"), tmp_path)
    worker = tmp_path / "model_worker.py"
    worker.write_text("import transformers_is_not_here\n")
    monkeypatch.setattr(child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(HostError) as caught:
        record(tmp_path)
    assert "ralbuild[runtime]" in caught.value.problems[0].hint
