"""Routes: the table takes the rule that `re` would take, tried one after the other; overlaps are named."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ralbuild

from ralbuild.config.regex import parse_route
from ralbuild.contract.codec import FormatError
from ralbuild.contract.routes import read_routes, write_routes
from ralbuild.errors import CompileError
from ralbuild.fold.routes import GROUP_STATES, RoutePatterns

PIECES = [
    "a",
    "b",
    "ab",
    ".",
    "[ab]",
    "[^a]",
    "\\d",
    "\\w",
    "\\.",
    "é",
    "[à-ü]",
    "風",
    "(a|b)",
    "(ab|a)",
    "(?:)",
]
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "*?"]


def random_pattern(rng: random.Random) -> str:
    parts = [rng.choice(PIECES) + rng.choice(REPEATS) for _ in range(rng.randrange(1, 5))]
    text = "".join(parts)
    shape = rng.randrange(6)
    return {0: f"^{text}$", 1: f"(?i){text}", 2: f"({text})*", 3: f"{text}|b"}.get(shape, text)


def test_the_first_rule_that_matches_all_of_the_name_wins_as_with_re() -> None:
    rng = random.Random(4)
    for _ in range(100):
        patterns = [random_pattern(rng) for _ in range(rng.randrange(1, 6))]
        table = read_routes(RoutePatterns(patterns).table(), "t", len(patterns))
        compiled = [re.compile(text, re.ASCII) for text in patterns]
        matching = RoutePatterns(patterns).matching
        for _ in range(40):
            name = "".join(rng.choices("aab.bA1é風\n", k=rng.randrange(6)))
            wins = [number for number, item in enumerate(compiled) if item.fullmatch(name)]
            assert table.first(name) == (wins[0] if wins else None), (patterns, name)
            assert matching(name) == wins, (patterns, name)


def test_a_pattern_that_costs_re_exponential_time_costs_a_walk() -> None:
    table = read_routes(RoutePatterns(["(a+)+", "(a|aa)*b"]).table(), "t", 2)
    begin = time.monotonic()
    assert table.first("a" * 200 + "!") is None
    assert table.first("a" * 200 + "b") == 1
    assert time.monotonic() - begin < 60  # `re` would need longer than the universe is old


def test_a_name_that_is_no_utf_8_is_no_crash() -> None:
    table = read_routes(RoutePatterns(["a.*"]).table(), "t", 1)
    assert table.first("a\ud800") == 0
    assert table.first("\ud800") is None


def test_rules_whose_automaton_would_be_huge_are_split_and_still_agree() -> None:
    words = [f"{first}{second}" for first in "abcd" for second in "xyz"]
    patterns = [f".*{word}.*{word[::-1]}.*" for word in words]
    data = RoutePatterns(patterns).table()
    table = read_routes(data, "t", len(patterns))
    assert len(table.starts) > 1
    assert len(table.accept) < GROUP_STATES * len(patterns)
    assert data == RoutePatterns(patterns).table()
    rng = random.Random(5)
    for _ in range(300):
        name = "".join(rng.choices(words + [word[::-1] for word in words], k=6))
        wins = (number for number, text in enumerate(patterns) if re.fullmatch(text, name))
        assert table.first(name) == next(wins, None)


def test_a_rule_too_large_for_any_table_is_named() -> None:
    with pytest.raises(CompileError, match=r"c\.yaml:7:14: the pattern needs more than 8192 states"):
        RoutePatterns(["ok", "[ab]*a[ab]{20}"], ["c.yaml:6:14", "c.yaml:7:14"]).table()


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["finance.*", "legal.*"], []),
        (["finance\\.retail", "finance\\..*"], [(0, 1, False, "finance.retail")]),
        (["finance.*", "finance\\.retail"], [(0, 1, True, "finance.retail")]),
        (["a|b", "c", "[ab]"], [(0, 2, True, "a")]),
        (["a", "b", "[ab]"], [(0, 2, True, "a"), (1, 2, True, "b")]),
        ([".*a", "b.*"], [(0, 1, False, "ba")]),
        (["a", "a"], [(0, 1, True, "a")]),
        ([".*", "x"], [(0, 1, True, "x")]),
        (["", ".*"], [(0, 1, False, "")]),
    ],
)
def test_rules_that_share_names_are_found_with_an_example(
    patterns: list[str], found: list[tuple[int, int, bool, str]]
) -> None:
    overlaps = RoutePatterns(patterns).overlaps()
    assert [(item.winner, item.loser, item.whole, item.example) for item in overlaps.found] == found
    assert overlaps.complete


def test_many_ordinary_routes_are_all_compared() -> None:
    patterns = [f"team{number}\\.[a-z]+(\\..*)?" for number in range(255)] + ["team7\\.ops"]
    overlaps = RoutePatterns(patterns).overlaps()
    assert [(item.winner, item.loser, item.whole) for item in overlaps.found] == [(7, 255, True)]
    assert overlaps.complete


def test_a_search_that_would_not_end_is_cut_short_and_says_so() -> None:
    patterns = [f"[ab]*a[ab]{{{number}}}" for number in range(10, 16)]
    assert not RoutePatterns(patterns).overlaps().complete


@pytest.mark.parametrize("text", ["a(?=b)", "(a)\\1", "\\bx", "a^b", "(?s)a", "(?x)a", "a{1,9}{1,9999}", "("])
def test_what_a_table_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_route(text)


def test_a_damaged_table_is_refused() -> None:
    good = {"cls": [0] * 256, "rows": [[0], [1]], "accept": [0, 1], "starts": [1]}
    assert read_routes(write_routes(**good), "t", 1).first("x") == 0
    for change in (
        {"rows": [[0], [2]]},
        {"rows": [[1], [1]]},
        {"accept": [1, 1]},
        {"accept": [0, 2]},
        {"starts": [2]},
    ):
        with pytest.raises(FormatError):
            read_routes(write_routes(**(good | change)), "t", 1)


ROUTES = (
    MINIMAL
    + NO_KERNELS
    + """routing:
  rules:
    - {match: 'finance\\..*', action: careful, priority: 10}
    - {match: 'finance\\.retail', action: lively, priority: 20}
    - {match: '.*retail', action: lively, priority: 30}
actions:
  careful: {append: "!"}
  lively: {append: "?"}
"""
)


def test_explain_names_rules_in_order_and_what_can_never_win(tmp_path: Path) -> None:
    (tmp_path / "ral-config.yaml").write_text(ROUTES)
    shown = ralbuild("explain", "--route", "finance.retail", cwd=tmp_path)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    assert lines[0] == "route finance.retail matches finance\\..* (priority 10): careful"
    assert lines[1].startswith("  also matches finance\\.retail (priority 20)")
    assert lines[2].startswith("  also matches .*retail (priority 30)")
    warning = next(line for line in lines if line.startswith("warning: "))
    assert "ral-config.yaml:8:15" in warning
    assert " at 7:15" in warning
    assert any("ral-config.yaml:9:15" in line and "overlaps" in line for line in lines)
