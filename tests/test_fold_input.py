"""Token filters: what becomes of users' text, and which lengths are accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ralbuild

from ralbuild.config.load import load_config
from ralbuild.contract.bundle import CHARACTERS, RUN, TOKENS, InputLimit
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.errors import ConfigError
from ralbuild.fold.folding import fold

LETTERS = [bytes([byte]) for byte in range(256)]
NORMALIZER = "financial_terminology_normalizer"


def config(tmp_path: Path, filters: str) -> Path:
    path = tmp_path / "ral-config.yaml"
    lines = "".join(f"    - {line}\n" for line in filters.splitlines())
    path.write_text(f"{MINIMAL}{NO_KERNELS}preprocessing:\n  token_filters:\n{lines}")
    return path


def rewritten(tmp_path: Path, filters: str, text: str) -> str:
    folded = fold(load_config(config(tmp_path, filters)), LETTERS)
    machine = Transducer(read_transducer(folded.transducer, "t"))
    return machine.rewrite(folded.rule_set.input_profile, text.encode())[0].decode()


@pytest.mark.parametrize(
    ("settings", "text", "found"),
    [
        (
            'terms: {"roi": "return on investment"}',
            "The ROI, not heroic.",
            "The return on investment, not heroic.",
        ),
        ('terms: {"roi": "X"}, case_sensitive: true', "ROI roi", "ROI X"),
        ('terms: {"roi": "X"}, whole_words: false', "heroic", "heXc"),
        (
            'synonyms: {"earnings": ["profit", "net income"]}',
            "Net income and profit",
            "earnings and earnings",
        ),
        ('synonyms: {"b": ["a"]}, terms: {"b": "c"}', "a b", "b c"),
        ('terms: {"net": "N", "net income": "I"}', "net income, net loss", "I, N loss"),
    ],
)
def test_the_normalizer_writes_canonical_terms(tmp_path: Path, settings: str, text: str, found: str) -> None:
    assert rewritten(tmp_path, f"{{name: {NORMALIZER}, config: {{{settings}}}}}", text) == found


def test_replace_takes_literals_and_patterns_as_re_does(tmp_path: Path) -> None:
    filters = (
        "{name: replace, config: {rules: [{pattern: '[0-9]{4}-[0-9]{2}-[0-9]{2}', with: DATE}, "
        "{text: '—', with: '-'}, {text: foo, with: '', case_sensitive: true, whole_words: true}]}}"
    )
    text = "on 2024-01-31—foo food FOO 2024-1-31"
    wanted = re.sub(r"\bfoo\b", "", re.sub(r"\d{4}-\d\d-\d\d", "DATE", text).replace("—", "-"))
    assert rewritten(tmp_path, filters, text) == wanted


def test_filters_apply_together_and_never_to_each_others_output(tmp_path: Path) -> None:
    filters = "{name: replace, config: {rules: [{text: a, with: b}]}}\n{name: replace, config: {rules: [{text: b, with: c}]}}"
    assert rewritten(tmp_path, filters, "ab") == "bc"


def test_limits_are_told_apart(tmp_path: Path) -> None:
    filters = (
        f"{{name: {NORMALIZER}, config: {{max_length: 64}}}}\n"
        "{name: max_length, config: {characters: 5000}}\n"
        "{name: max_length, config: {tokens: 700, characters: 6000}}"
    )
    folded = fold(load_config(config(tmp_path, filters)), LETTERS)
    assert folded.input_limits == (
        InputLimit(NORMALIZER, 64, RUN),
        InputLimit("max_length", 5000, CHARACTERS),
        InputLimit("max_length", 6000, CHARACTERS),
        InputLimit("max_length", 700, TOKENS),
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{name: max_length, config: {}}", "needs 'characters', 'tokens' or both"),
        ("{name: max_length, config: {tokens: 0}}", "greater than or equal to 1"),
        ("{name: max_lenght}", "no token filter is named 'max_lenght' (did you mean 'max_length'?)"),
        ("{name: replace, config: {rules: [{text: a}]}}", "lacks the key 'with'"),
        ("{name: replace, config: {rules: [{with: a}]}}", "needs exactly one of 'text' and 'pattern'"),
        ("{name: replace, config: {rules: [{pattern: '.*', with: a}]}}", "must match at least one character"),
        (f"{{name: {NORMALIZER}, config: {{synonyms: {{a: b}}}}}}", "needs a list, found"),
    ],
)
def test_a_filter_that_makes_no_sense_is_named_with_its_place(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config(tmp_path, line))
    assert message in str(caught.value)
    assert "ral-config.yaml:7:" in str(caught.value)


def test_explain_lists_input_rules_and_limits(tmp_path: Path) -> None:
    config(
        tmp_path,
        "{name: max_length, config: {tokens: 700}}\n{name: replace, config: {rules: [{text: a, with: b}]}}",
    )
    shown = ralbuild("explain", cwd=tmp_path).out
    assert 'input    "a"' in shown
    assert "at most 700 tokens of prompt  max_length" in shown
