"""The transducer against the independent reference (tests/rule_reference.py), and its promises."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_reference import matches, rewrite

from ralbuild.config.regex import parse_regex
from ralbuild.contract.codec import FormatError
from ralbuild.contract.transducer import Transducer, TransducerTable, read_transducer
from ralbuild.errors import CompileError
from ralbuild.fold import budget
from ralbuild.fold.rules import HTML_ENTITIES, MARKUP, REDACTION, KindRule, ProfileRules, TextRule
from ralbuild.fold.transducer import TransducerBuilder

SEED = 20261130
RULE_SETS = 300
PIECES = [b"a", b"b", b"A", b" ", b".", b"<", "é".encode(), "风".encode(), b"\xf0", b"\x9f"]


def build(*profiles: ProfileRules) -> tuple[Transducer, TransducerTable]:
    rules = [rule for profile in profiles for rule in (*profile.texts, *profile.kinds)]
    count = 1 + max([rule.id for rule in rules] + [profile.append_id for profile in profiles])
    data, _ = TransducerBuilder(profiles).build(count)
    table = read_transducer(data, "test")
    return Transducer(table), table


def bold(number: int, literal: str, **options: bool) -> TextRule:
    values = {"ignore_case": True, "whole_word": True} | options
    return TextRule(number, MARKUP, literal.encode(), before=b"<b>", after=b"</b>", **values)


def redact(number: int, literal: str, replacement: str = "[x]") -> TextRule:
    return TextRule(number, REDACTION, literal.encode(), True, False, replacement=replacement.encode())


def random_rules(rng: random.Random, pieces: list[bytes]) -> tuple[TextRule, ...]:
    rules = []
    for number in range(rng.randint(0, 5)):
        literal = b"".join(rng.choice(pieces) for _ in range(rng.randint(1, 5))).strip()
        literal = literal.decode("utf-8", "ignore").encode() or b"a"  # a config holds whole characters only
        level = rng.choice([REDACTION, MARKUP, MARKUP])
        replaced = level == REDACTION or rng.random() < 0.3
        rules.append(
            TextRule(
                number,
                level,
                literal,
                rng.random() < 0.5,
                rng.random() < 0.4,
                replacement=rng.choice([b"", b"[X]", b"a"]) if replaced else None,
                before=b"<b>",
                after=b"</b>",
                escaped=rng.choice([(), HTML_ENTITIES]),
            )
        )
    if rng.random() < 0.3:
        rules += [
            TextRule(5, MARKUP, text, False, False, replacement=entity) for text, entity in HTML_ENTITIES
        ]
    return tuple(rules)


def test_random_rule_sets_agree_with_the_reference_whatever_the_chunks() -> None:
    rng = random.Random(SEED)
    cases = matched = 0
    for _ in range(RULE_SETS):
        pieces = rng.sample(PIECES, rng.randint(2, 4))
        profiles = (
            ProfileRules(random_rules(rng, pieces), rng.choice([b"", b"END"]), 6),
            ProfileRules(random_rules(rng, pieces)),
        )
        machine, table = build(*profiles)
        for index, _ in itertools.product((0, 1), range(6)):
            text = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 14)))
            slot, out, at = machine.start(index), b"", 0
            while at < len(text):
                step = rng.randint(1, 4)
                out += slot.feed(text[at : at + step])
                at += step
                assert len(slot.pending) <= table.max_held
            out += slot.finish()
            assert (out, slot.events) == rewrite(profiles[index], text), (text, profiles[index])
            cases += 1
            matched += bool(slot.events)
    print(f"seed {SEED}: {cases} cases, {matched} with a match, 0 mismatches")
    assert matched > cases // 4


ATOMS = ["a", "b", "[ab]", "[^a]", "[0-2]", "\\d", "é", "风", "[à-ö]", ".", "-"]


def random_regex(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        atom = rng.choice(ATOMS)
        if rng.random() < 0.3:
            atom = f"(?:{atom}|{rng.choice(ATOMS)}{rng.choice(ATOMS)})"
        low = rng.randint(0, 2)
        parts.append(atom + rng.choice(["", "", "?", f"{{{low},{low + rng.randint(0, 2)}}}"]))
    return "".join(parts)


def test_random_regular_expressions_agree_with_re_whatever_the_chunks() -> None:
    rng = random.Random(SEED + 1)
    pieces = [b"a", b"b", b"B", b"0", b"1", b"-", b" ", "é".encode(), "風".encode(), "风".encode(), b"\xe9"]
    cases = matched = 0
    for _ in range(16):
        rules, regexes = [], {}
        for number in range(rng.randint(1, 2)):
            level, text = rng.choice([REDACTION, MARKUP]), random_regex(rng)
            try:
                pattern = parse_regex(text) if rng.random() < 0.8 else b"ab"
            except ValueError:
                pattern = b"b-"
            regexes[number] = text
            rules.append(
                TextRule(number, level, pattern, rng.random() < 0.5, rng.random() < 0.4,
                         replacement=b"[X]" if level == REDACTION else None, before=b"<b>", after=b"</b>")
            )  # fmt: skip
        profile = ProfileRules(tuple(rules))
        machine, _ = build(profile)
        for _ in range(25):
            text = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 10)))
            slot, out = machine.start(0), b""
            for at in range(0, len(text), 2):
                out += slot.feed(text[at : at + 2])
            out += slot.finish()
            assert (out, slot.events) == rewrite(profile, text, regexes), (text, regexes, profile)
            cases += 1
            matched += bool(slot.events)
    print(f"seed {SEED}: {cases} cases with regular expressions, {matched} with a match, 0 mismatches")
    assert matched > cases // 5


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        ((bold(0, "risk"),), "Risk, risky risk_ RISK", "<b>Risk</b>, risky risk_ <b>RISK</b>"),
        ((bold(0, "risk"), bold(1, "risk appetite")), "risk appetites", "<b>risk</b> appetites"),
        ((bold(0, "risk"), bold(1, "risk appetite")), "risk appetite", "<b>risk appetite</b>"),
        ((bold(0, "风险", whole_word=False),), "高风险", "高<b>风险</b>"),
        ((bold(0, "C++"),), "C++, C++x xC++", "<b>C++</b>, <b>C++</b>x xC++"),
        ((redact(0, "secret"), bold(1, "secret plan")), "the secret plan", "the [x] plan"),
        ((redact(0, "plan b"), bold(1, "secret plan")), "secret plan b", "secret [x]"),
        (
            (redact(0, "d"), bold(1, "abcd", whole_word=False), bold(2, "bc", whole_word=False)),
            "abcd",
            "a<b>bc</b>[x]",
        ),
        ((redact(0, "abc"), redact(1, "cd")), "abcd", "[x]d"),
    ],
)
def test_semantics_by_example(rules: tuple[TextRule, ...], text: str, expected: str) -> None:
    machine, _ = build(ProfileRules(rules))
    assert machine.rewrite(0, text.encode())[0].decode() == expected


def test_no_byte_of_a_redacted_match_leaves_at_any_split() -> None:
    secret = "insider information"
    machine, _ = build(ProfileRules((redact(0, secret, "#"), bold(1, "information"), bold(2, "the insider"))))
    text = f"Only the {secret.upper()} counts: {secret}.".encode()
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        slot = machine.start(0)
        out = slot.feed(text[:first])
        seen = [out]
        out += slot.feed(text[first:second])
        seen.append(out)
        out += slot.feed(text[second:]) + slot.finish()
        assert out == b"Only the # counts: #."
        for part in seen:
            assert out.startswith(part), "what was sent is never taken back"


def test_text_that_no_rule_can_touch_is_never_held() -> None:
    machine, _ = build(ProfileRules((bold(0, "risk"), redact(1, "secret"))))
    slot = machine.start(0)
    for word in (b"Hello", b" world", b".", " naïve 🙂".encode(), b"\n"):
        assert slot.feed(word) == word
        assert not slot.pending


def decision(profile: ProfileRules, text: bytes, at: int) -> tuple[int, int, int] | None:
    """Return the match that covers byte ``at``, by the reference."""
    redactions = [rule for rule in profile.texts if rule.level == REDACTION]
    fixed = [(begin, end, rule.id) for begin, end, rule in matches(redactions, {}, text, 0, len(text))]
    gaps = zip(
        [0, *(end for _, end, _ in fixed)], [*(begin for begin, _, _ in fixed), len(text)], strict=True
    )
    markup = [rule for rule in profile.texts if rule.level == MARKUP]
    found = fixed + [
        (b, e, rule.id) for low, high in gaps for b, e, rule in matches(markup, {}, text, low, high)
    ]
    return next((item for item in found if item[0] <= at < item[1]), None)


def test_nothing_is_held_a_byte_longer_than_it_can_still_match() -> None:
    marked = (bold(0, "ab"), bold(1, "ab cab"), bold(4, "bb", whole_word=False))
    hidden = (redact(2, "bb"), redact(3, "ac"), redact(5, "acb b"))
    for rules in (marked, hidden):
        assert held_too_long(ProfileRules(rules)) == []
    # Markup also waits while a redaction is open behind it, and for nothing else.
    assert b"aa" in held_too_long(ProfileRules(marked + hidden))


def held_too_long(profile: ProfileRules) -> list[bytes]:
    """Return the texts at whose end a byte is held that every continuation decides alike."""
    machine, _ = build(profile)
    alphabet, checked, found = b"abc ", 0, []
    tails = [bytes(tail) for length in range(4) for tail in itertools.product(alphabet, repeat=length)]
    for text in (bytes(t) for length in range(1, 5) for t in itertools.product(alphabet, repeat=length)):
        slot = machine.start(0)
        slot.feed(text)
        if slot.pending:
            checked += 1
            first = len(text) - len(slot.pending)
            decisions = {decision(profile, text + tail, first) for tail in tails}
            if len(decisions) == 1:
                found.append(text)
                slot.registers(len(text))
                assert slot.start < len(text), "no redaction is open"
    assert checked > 60
    return found


def test_the_table_is_the_same_bytes_in_every_process_and_rule_order_only_matters_for_ties() -> None:
    profile = ProfileRules(tuple(bold(n, word) for n, word in enumerate(["risk", "audit", "risk appetite"])))
    data = {TransducerBuilder((profile, ProfileRules())).build(3)[0] for _ in range(3)}
    assert len({hashlib.sha256(item).hexdigest() for item in data}) == 1


@pytest.mark.parametrize("make", [bold, redact])
def test_a_table_over_budget_is_an_error_that_names_the_longest_rules(
    make: Callable[[int, str], TextRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "TABLE_BUDGET", 1000)
    with pytest.raises(CompileError) as caught:
        build(ProfileRules((make(0, "a rather long term to match"), make(1, "risk"))))
    assert "a rather long term" in caught.value.problems[0].hint


def test_actions_that_redact_the_same_share_the_automaton() -> None:
    words = ["secret", "insider information", "plan"]
    one = ProfileRules(tuple(redact(n, word) for n, word in enumerate(words)))
    other = ProfileRules(tuple(redact(n + 3, word, "[y]") for n, word in enumerate(words)))
    turned = ProfileRules(tuple(redact(n + 6, word, "[z]") for n, word in enumerate(reversed(words))))
    alone, both = build(one)[1], build(one, other)[1]
    assert alone.redact_next.tobytes() == both.redact_next.tobytes()
    machine, _ = build(one, other, turned)
    texts = [machine.rewrite(profile, b"the plan is secret") for profile in range(3)]
    assert texts == [
        (b"the [x] is [x]", [2, 0]), (b"the [y] is [y]", [5, 3]), (b"the [z] is [z]", [6, 8]),
    ]  # fmt: skip


def test_actions_with_texts_of_their_own_share_the_kinds_behind_them() -> None:
    def action(number: int, word: str) -> ProfileRules:
        return ProfileRules((redact(2 * number, word),), kinds=(KindRule(2 * number + 1, "api_key", b"[k]"),))

    alone = len(build(action(0, "plan"))[1].redact_final)
    words = ["plan", "secret", "merger", "bonus", "layoff"]
    together = len(build(*(action(number, word) for number, word in enumerate(words)))[1].redact_final)
    assert alone > 1000
    assert together < alone + 100


def test_each_action_keeps_its_own_order_where_several_redactions_match_the_same_text() -> None:
    """Five ways to match ``abc``, in another order, some of them twice, for each of six actions."""
    rng = random.Random(SEED)
    sources = ["[a-c]{3}", "(?:abc|ab)", "a[b-d]c", "[^x]{3}"]
    for _ in range(12):
        numbers, regexes, profiles = itertools.count(), {}, []
        for _ in range(6):
            texts = []
            for choice in rng.choices(range(5), k=rng.randint(1, 6)):
                number = next(numbers)
                rule = redact(number, "abc", f"[{number}]")
                if choice:
                    regexes[number] = sources[choice - 1]
                    rule = replace(rule, pattern=parse_regex(sources[choice - 1]))
                texts.append(rule)
            profiles.append(ProfileRules(tuple(texts), append_id=next(numbers)))
        machine, _ = build(*profiles)
        for number, profile in enumerate(profiles):
            for text in (b"xabc abd", b"abcabxadc", b"ab"):
                assert machine.rewrite(number, text) == rewrite(profile, text, regexes)


@given(st.binary(max_size=64), st.integers(0, 4000), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_damaged_table_is_refused_or_still_in_bounds(noise: bytes, at: int, value: int) -> None:
    data, _ = TransducerBuilder((ProfileRules((bold(0, "risk"), redact(1, "secret"))),)).build(2)
    damaged = bytearray(data)
    damaged[at % len(data)] = value
    for candidate in (bytes(damaged), data[: at % len(data)], noise, data + noise[:1]):
        try:
            table = read_transducer(candidate, "damaged")
        except FormatError:
            continue
        Transducer(table).rewrite(0, b"risk secret x")
