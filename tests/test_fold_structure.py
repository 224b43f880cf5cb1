"""Stop strings, spans, escapes and bounds, from the config to the text that comes out."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from ralbuild.config.load import load_config
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.errors import CompileError, ConfigError
from ralbuild.fold import budget
from ralbuild.fold.folding import fold

TOKENS = [bytes([byte]) for byte in range(256)] + [b"eeeee", b"risk", b" the", b"\n\n", "é".encode()]


def machine(folder: Path, config: str) -> Transducer:
    path = folder / "c.yaml"
    path.write_text(f'version: "0.3"\nmodel: m\n{config}', "utf-8")
    return Transducer(read_transducer(fold(load_config(path), TOKENS).transducer, "test"))


def output(folder: Path, config: str, text: str) -> str:
    return machine(folder, config).rewrite(0, text.encode())[0].decode()


THINK = """
postprocessing:
  stop: ["###", {text: "END", in: outside}]
  spans: [{name: think, open: "<think>", close: "</think>", do: %s%s}]
  output_transformers:
    - {name: html_enhancer, config: {bold_terms: [risk], in: %s}}
"""


@pytest.mark.parametrize(
    ("do", "begins", "scope", "text", "expected"),
    [
        ("drop", "", "all", "a <think>risk END</think> risk", "a  <b>risk</b>"),
        ("drop", "", "all", "a <think>risk never closed", "a "),
        ("drop", "", "all", "risk<think>x</think>risk", "<b>risk</b><b>risk</b>"),
        ("exempt", "", "all", "<think>risk ###</think>risk", "<think>risk ###</think><b>risk</b>"),
        ("keep", "", "outside", "<think>risk</think>risk", "<think>risk</think><b>risk</b>"),
        ("keep", "", "think", "<think>risk</think>risk", "<think><b>risk</b></think>risk"),
        ("keep", "", "all", "<think>END ### x", "<think>END "),
        ("drop", ", begins: inside", "all", "risk</think>risk", "<b>risk</b>"),
        ("drop", "", "all", "risk ENDLESS", "<b>risk</b> "),
        ("drop", "", "all", "<thin</think>", "<thin</think>"),
    ],
)
def test_spans_and_stop_strings_by_example(
    tmp_path: Path, do: str, begins: str, scope: str, text: str, expected: str
) -> None:
    assert output(tmp_path, THINK % (do, begins, scope), text) == expected


def test_a_marker_split_over_tokens_is_held_only_while_it_can_come(tmp_path: Path) -> None:
    slot = machine(tmp_path, THINK % ("drop", "", "all")).start(0)
    assert slot.feed(b"see <th") == b"see "
    assert slot.feed(b"ou <") == b"<thou "
    assert slot.feed(b"think>") == b""
    assert slot.feed(b"secret") == b""
    assert not slot.pending
    assert slot.feed(b"</think>x ###more") == b"x "
    assert slot.stopped
    assert slot.feed(b"more") == b""
    assert slot.finish() == b""


def test_what_is_appended_follows_a_stop_string(tmp_path: Path) -> None:
    config = "actions: {a: {append: ' bye', stop: [x]}}\nrouting: {rules: [{match: r, action: a}]}"
    assert machine(tmp_path, config).rewrite(1, b"hexy")[0] == b"he bye"


@pytest.mark.parametrize(
    ("kind", "undo"), [("html", html.unescape), ("json", lambda text: json.loads(f'"{text}"'))]
)
def test_escapes_are_undone_by_the_library_that_reads_them(tmp_path: Path, kind: str, undo) -> None:
    text = "".join(map(chr, range(1, 127))) + "é風🙂 </b> \\u0041 &amp;"
    config = f"postprocessing: {{output_transformers: [{{name: html_enhancer, config: {{escape: {kind}}}}}]}}"
    assert undo(output(tmp_path, config, text)) == text


def test_replace_and_markup_write_other_texts_and_tags(tmp_path: Path) -> None:
    config = """
postprocessing:
  output_transformers:
    - {name: replace, config: {rules: [{text: "colour", with: "color"}, {pattern: "v[0-9]{1,2}", with: "vN"}]}}
    - {name: markup, config: {rules: [{text: "Éclair", before: "**", after: "**", whole_words: true}]}}
"""
    assert (
        output(tmp_path, config, "Colour éclair v12 éclairs ÉCLAIR")
        == "color **éclair** vN éclairs **ÉCLAIR**"
    )


def test_markup_that_could_hold_an_escaped_character_is_refused_by_name(tmp_path: Path) -> None:
    config = """
postprocessing:
  output_transformers:
    - {name: html_enhancer, config: {escape: html}}
    - {name: markup, config: {rules: [{pattern: "a.b", before: "*", after: "*"}]}}
"""
    with pytest.raises(CompileError, match="'&'"):
        machine(tmp_path, config)


def test_a_rule_that_could_write_more_than_a_step_may_is_refused_by_name(tmp_path: Path) -> None:
    config = "actions: {a: {redact: [{text: e, with: '%s'}]}}\nrouting: {rules: [{match: r, action: a}]}" % (
        "x" * 1000
    )
    with pytest.raises(CompileError, match="redact 'e' writes 1000 bytes") as caught:
        machine(tmp_path, config)
    assert caught.value.problems[0].place == "3:24"


def test_a_table_that_grows_too_large_names_the_pattern_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "TABLE_BUDGET", 5000)
    config = """
postprocessing:
  output_transformers:
    - {name: html_enhancer, config: {bold_terms: [risk]}}
    - {name: replace, config: {rules: [{pattern: "[^ .]{1,6}!", with: "!"}]}}
"""
    with pytest.raises(CompileError) as caught:
        machine(tmp_path, config)
    assert "heaviest are '/[^ .]{1,6}!/' (7:" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "postprocessing: {stop: [{text: x, in: nowhere}]}",
            "no span that keeps its text is named 'nowhere'",
        ),
        (THINK % ("drop", "", "think"), "no span that keeps its text is named 'think'"),
        (
            "postprocessing: {spans: [{name: all, open: a, close: b, do: keep}]}",
            "the span name 'all' is taken",
        ),
        ("postprocessing: {stop: ['']}", "needs 1 to 128 bytes"),
        ("actions: {a: {redact: [{kind: visa}]}}", "'card'"),
    ],
)
def test_mistakes_in_spans_and_kinds_are_reported(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        machine(tmp_path, config)
    assert any(message in problem.message for problem in caught.value.problems), caught.value.problems
