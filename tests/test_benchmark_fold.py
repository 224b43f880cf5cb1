"""The benchmark of the rules measures what it says: same tokens, same matches, both ways."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from benchmarks import fold


def test_ours_and_the_baseline_rewrite_the_benchmarks_text_alike(tmp_path: Path) -> None:
    rng = random.Random(1)
    terms = fold.words(rng, 30, 4, 12)
    tokens = fold.make_text(rng, terms[0])
    machine, *_ = fold.build(fold.bold_rules(terms), tmp_path)
    out, events = machine.rewrite(0, "".join(tokens).encode())
    pattern = re.compile(rf"\b(?:{'|'.join(sorted(terms, key=len, reverse=True))})\b", re.IGNORECASE)
    assert out.decode() == pattern.sub(r"<b>\g<0></b>", "".join(tokens))
    assert len(events) >= fold.TOKENS // fold.MATCH_EVERY - fold.TOKENS // 900 - 1


def test_the_last_line_is_one_object_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fold, "COUNTS", (1, 5))
    monkeypatch.setattr(fold, "TOKENS", 200)
    monkeypatch.setattr(fold, "BASELINE", 5)
    monkeypatch.setattr("sys.argv", ["fold", "--json", "--repeat", "3"])
    fold.main()
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["flatness"] >= 1
    assert answer["time_flatness"] >= 1
    assert answer["mixed"]["flatness"] >= 1
    assert answer["regex_ratio"] > 0
    assert answer["build_seconds"] >= 0


def test_instructions_are_counted_and_not_what_is_written_in_c() -> None:
    def twenty() -> None:
        for _ in range(20):
            sorted(range(100))

    def forty() -> None:
        for _ in range(40):
            sorted(range(200))

    few, many = fold.instructions(twenty), fold.instructions(forty)
    assert few > 20
    per_turn = (many - few) / 20
    assert per_turn == int(per_turn) < 20


def test_the_mixed_series_has_a_rule_for_each_term_and_they_match(tmp_path: Path) -> None:
    terms = fold.words(random.Random(1), 70, 4, 12)
    rules = fold.mixed_rules(terms)
    found = [*rules["actions"]["guard"]["redact"]]
    for transformer in rules["postprocessing"]["output_transformers"]:
        found += transformer["config"].get("rules") or transformer["config"]["bold_terms"]
    assert len(found) == len(terms)
    machine, *_ = fold.build(rules, tmp_path)
    text = f"{terms[0]}, {terms[1]} {terms[0]} {terms[2]}-1234 {terms[3]}ing {terms[4]} 12 4111111111111111"
    expected = f"<b>{terms[0]}</b>, [redacted] [redacted] {terms[3]} <i>{terms[4]} 12</i> [redacted]"
    assert machine.rewrite(1, text.encode())[0].decode() == expected
