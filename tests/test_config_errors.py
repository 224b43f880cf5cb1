"""Every mistake in a file that people write has its place, what was found, what was needed and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ralbuild.config.load import load_config
from ralbuild.config.probes import load_probes
from ralbuild.config.runtime_rules import load_runtime_rules
from ralbuild.errors import ConfigError
from ralbuild.simulate.buffer_file import read_buffer_file

ROOT = Path(__file__).parent.parent / "ralbuild"
SOURCES = sorted(ROOT.rglob("*.py"))
CONFIG = 'version: "0.3"\nmodel: m\n'
RULES = 'version: "0.3"\nserial: 1\n'
TRANSFORM = "postprocessing: {{output_transformers: [{{name: {}, config: {}}}]}}\n"
FILTER = "preprocessing: {{token_filters: [{{name: {}, config: {}}}]}}\n"


def errors_without_a_hint(source: str) -> list[str]:
    """Return the calls that make a problem of a config and give no hint, or an empty one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        hints = [word.value for word in node.keywords if word.arg == "hint"]
        if node.func.id == "Problem":
            hints += node.args[2:3]
        elif node.func.id != "ConfigError":
            continue
        if not hints or (isinstance(hints[0], ast.Constant) and not hints[0].value):
            found.append(ast.unparse(node))
    return found


def test_no_error_of_a_config_is_made_without_a_hint() -> None:
    assert errors_without_a_hint("ConfigError('a', place='b')") == ["ConfigError('a', place='b')"]
    rooms = [path for path in SOURCES if "ConfigError" in path.read_text() and path.name != "errors.py"]
    assert len(rooms) >= 4
    assert [(path.name, call) for path in rooms for call in errors_without_a_hint(path.read_text())] == []


MISTAKES = [
    ("", "", "empty", ""),
    ("[1]", "1:1", "a mapping", "a list"),
    (CONFIG + "max_batch_size: 0\n", "3:17", "greater than or equal to 1", "0"),
    (CONFIG + "max_batch_size: many\n", "3:17", "a whole number", '"many"'),
    (CONFIG + "colour: red\n", "3:1", "unknown key", "'colour'"),
    (CONFIG + "build: {targets: [sm_10]}\n", "3:19", "one of sm_80", "'sm_10'"),
    (CONFIG + "actions: {a: {ban: [' ']}}\n", "3:21", "text that is not blank", "' '"),
    (CONFIG + "actions: {a: {redact: [{with: x}]}}\n", "3:24", "exactly one of 'text'", "none"),
    (CONFIG + "actions: {a: {sampling: {top_p: {}}}}\n", "3:33", "'min', 'max' or both", "neither"),
    (CONFIG + "actions: {a: {sampling: {top_p: [1]}}}\n", "3:33", "a number, or a mapping", "[1]"),
    (CONFIG + "actions: {a: {sampling: {top_p: 7}}}\n", "3:33", "a number from", "7"),
    (CONFIG + "actions: {a: {sampling: {greedy: true, temperature: 1}}}\n", "3:25", "'greedy'", "both"),
    (
        CONFIG + "actions: {a: {sampling: {logit_bias: [{bias: 1}]}}}\n",
        "3:39",
        "one of 'text'",
        "neither",
    ),
    (CONFIG + "actions: {a: {allow: {}}}\n", "3:22", "'texts', 'characters' or both", "neither"),
    (CONFIG + FILTER.format("max_length", "{}"), "3:60", "'characters', 'tokens' or both", "neither"),
    (CONFIG + FILTER.format("shout", "{}"), "3:40", "no token filter", "'shout'"),
    (CONFIG + TRANSFORM.format("html_enhancer", "{bold_terms: red}"), "3:83", "a list", '"red"'),
    (CONFIG + "routing: {rules: [{match: a, action: b}]}\n", "3:38", "no action is named", "'b'"),
    (CONFIG + "runtime: {idle_unload: 5 minutes}\n", "3:24", "a time with its unit", "'5 minutes'"),
]
PROBE_MISTAKES = [
    ("golden: 3\n", "1:9", "a list", "3"),
    ("guardrails: [{name: a, prompt: b}]\n", "1:14", "'absent' or 'present'", "neither"),
    ("latency: {total: -1}\n", "1:18", "greater than 0", "-1"),
]
RULE_MISTAKES = [
    ('version: "0.3"\n', "", "lacks the key", "'serial'"),
    (RULES + "redact: [{text: a, in: quotes}]\n", "3:9", "needs spans", "'in'"),
    (RULES + "stop: ['']\n", "3:8", "1 to", "0"),
]


@pytest.mark.parametrize(
    ("load", "text", "place", "needed", "found"),
    [
        *((load_config, *mistake) for mistake in MISTAKES),
        *((load_probes, *mistake) for mistake in PROBE_MISTAKES),
        *((load_runtime_rules, *mistake) for mistake in RULE_MISTAKES),
    ],
)
def test_a_mistake_in_a_config_in_probes_and_in_rules_of_the_serving_side_says_all_four(
    tmp_path: Path, load: Callable[[Path], object], text: str, place: str, needed: str, found: str
) -> None:
    (tmp_path / "f.yaml").write_text(text)
    check(lambda: load(tmp_path / "f.yaml"), f"f.yaml:{place}", needed, found)


@pytest.mark.parametrize(
    ("text", "needed", "found"),
    [
        ("blocks: 1\n", "the key 'buffers'", "blocks"),
        ("buffers: {}\nblocks: 0\n", "a whole number from 1", "0"),
        ("buffers: {}\nrounds: 1\n", "unknown key", "'rounds'"),
    ],
)
def test_a_mistake_in_buffers_says_all_four(tmp_path: Path, text: str, needed: str, found: str) -> None:
    (tmp_path / "b.yaml").write_text(text)
    check(lambda: read_buffer_file(tmp_path / "b.yaml"), str(tmp_path / "b.yaml"), needed, found)


def check(load: Callable[[], object], place: str, needed: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load()
    (problem,) = caught.value.problems
    assert problem.place.startswith(place.removesuffix(":")), problem
    assert needed in problem.message, problem
    assert found in problem.message, problem
    assert re.search(r"\w", problem.hint), problem
