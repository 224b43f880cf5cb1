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
    machine, *_ = fold.build(terms, tmp_path)
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
    assert answer["regex_ratio"] > 0
    assert answer["build_seconds"] >= 0
