"""`--buffers`: the article's kernel is shown to write out of bounds and to race; mistakes name their place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from compile_support import ARTICLE_KERNEL, compiled
from model_factory import write_model
from simulate_support import kernel

from ralbuild.cli import main
from ralbuild.compile import aot
from ralbuild.errors import ConfigError, UsageError
from ralbuild.simulate.buffer_file import read_buffer_file

SAMPLE = Path(__file__).parents[1] / "samples/user_kernel/buffers.yaml"
CONFIG = """
version: "0.3"
model: tiny
max_seq_len: 512
postprocessing: {output_transformers: [{name: "html_enhancer", config: {bold_terms: ["risk", "audit"]}}]}
build: {targets: [sm_80]}
"""
RACE = """
blocks: 8
buffers:
  output_ptr: {size: 2056, fill: 7, set: {"255": 42, "256": 42}}
  term_list_ptr: {values: [42]}
  term_count: 1
"""
COMMAND = ("simulate", "--model", "model", "--kernel", "html_enhancer", "--quiet")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(aot, "run_worker", lambda spec, arch, *_, **__: compiled(spec.name, arch))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "ral-config.yaml").write_text(CONFIG)
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/html_enhancer.py").write_bytes(ARTICLE_KERNEL.read_bytes())
    return tmp_path


def test_the_articles_kernel_writes_past_its_buffer(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*COMMAND, "--buffers", str(SAMPLE), "--json"]) == 4
    captured = capsys.readouterr()
    (answer,) = json.loads(captured.out)
    assert answer["fault"].startswith("out of bounds: 1 bytes at")
    assert "0 bytes past the end of 'output_ptr' (2048 bytes); block 7 thread 127" in answer["fault"]
    assert "html_enhancer.py:22: tl.store(output_ptr + offset + 1" in captured.err


def test_the_articles_kernel_races_with_the_next_block(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("race.yaml").write_text(RACE)
    assert main.main([*COMMAND, "--buffers", "race.yaml", "--json"]) == 0, "without --race nothing is wrong"
    assert main.main([*COMMAND, "--buffers", "race.yaml", "--race", "--json"]) == 4
    answers = capsys.readouterr().out.split("]\n[")
    assert "between blocks" in answers[1]


def test_buffers_are_for_a_users_kernel(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["simulate", "--model", "model", "--buffers", str(SAMPLE), "--quiet"]) == 2
    assert "--kernel html_enhancer" in capsys.readouterr().err


def arguments(text: str) -> dict[str, object]:
    Path("b.yaml").write_text(text)
    return read_buffer_file(Path("b.yaml")).arguments(kernel("html_enhancer"), {})


def test_a_buffer_is_filled_as_the_file_says(work: Path) -> None:
    found = arguments(
        'blocks: 2\nbuffers:\n  output_ptr: {size: 6, fill: -1, values: [5, 6], set: {"5": 9}}\n'
        "  term_list_ptr: {size: 400, random: [-3, 3], seed: 4}\n  term_count: 4\n"
    )
    assert found["output_ptr"].tolist() == [5, 6, -1, -1, -1, 9]
    assert found["output_ptr"].dtype == np.int8
    assert set(found["term_list_ptr"].tolist()) == set(range(-3, 4))
    assert list(found) == ["output_ptr", "term_list_ptr", "term_count"]
    assert found["term_count"] == 4


REST = "  term_list_ptr: {values: [1]}\n  term_count: 1\n"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "b.yaml", "empty"),
        ("[1]", "b.yaml:1:1", "needs a mapping with the key 'buffers'"),
        ("buffers: {}\nblock: 3\n", "b.yaml:2:1", "unknown key 'block'"),
        ("buffers: {}\nblocks: 0\n", "b.yaml:2:1", "whole number from 1"),
        ("buffers: {nope: 1}\n", "b.yaml:1:11", "no parameter 'nope'"),
        ("buffers: {output_ptr: 3}\n", "b.yaml:1:11", "needs a mapping with 'size'"),
        ("buffers: {output_ptr: {size: 4, valves: [1]}}\n" , "b.yaml:1:41", "unknown key 'valves'"),
        ("buffers:\n  output_ptr: {size: 0}\n" + REST, "b.yaml:2:22", "elements, found 0"),
        ("buffers:\n  output_ptr: {size: 99999999999}\n" + REST, "b.yaml:2:22", "elements, found 99999999999"),
        ("buffers:\n  output_ptr: {values: [300]}\n" + REST, "b.yaml:2:24", "number of type i8, found 300"),
        ("buffers:\n  output_ptr: {values: [1.5]}\n" + REST, "b.yaml:2:24", "number of type i8, found 1.5"),
        ("buffers:\n  output_ptr: {values: [true]}\n" + REST, "b.yaml:2:24", "found True"),
        ("buffers:\n  output_ptr: {size: 4, random: [4, 1]}\n" + REST, "b.yaml:2:33", "ascending order"),
        ('buffers:\n  output_ptr: {size: 4, set: {"4": 1}}\n' + REST, "b.yaml:2:30", "from 0 to 3"),
        ("buffers:\n  output_ptr: {values: [1]}\n", "b.yaml", "needs a buffer for 'term_list_ptr'"),
        ("buffers:\n  output_ptr: {values: [1], values: [2]}\n", "b.yaml:2:29", "duplicate key"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_place(work: Path, text: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arguments(text)
    problem = caught.value.problems[0]
    assert words in problem.message
    assert problem.place.startswith(place)


def test_a_file_that_is_not_there_is_told(work: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_buffer_file(Path("missing.yaml"))
