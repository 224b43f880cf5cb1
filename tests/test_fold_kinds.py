"""Named kinds: what they match and what they leave, by published examples; nothing leaks at any split."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from rule_reference import rewrite

from ralbuild.config.regex import parse_regex
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.fold.kinds import FORMS
from ralbuild.fold.rules import MARKUP, REDACTION, KindRule, ProfileRules, SpanRule, TextRule
from ralbuild.fold.transducer import TransducerBuilder


@cache
def machine_of(*kinds: str) -> Transducer:
    profile = ProfileRules(kinds=tuple(KindRule(n, kind, b"#") for n, kind in enumerate(kinds)))
    data, _ = TransducerBuilder((profile,)).build(len(kinds))
    return Transducer(read_transducer(data, "test"))


FOUND = {
    "card": [
        # test numbers that card networks and processors publish
        "4111111111111111", "5555555555554444", "378282246310005", "6011111111111117", "30569309025904",
        "3530111333300000", "4222222222222", "6304000000000000", "4111 1111 1111 1111", "3782-822463-10005",
        "4111-1111-1111-1111",
    ],
    "iban": [
        # SWIFT's registry, examples
        "DE89370400440532013000", "DE89 3704 0044 0532 0130 00", "GB29 NWBK 6016 1331 9268 19", "NO9386011117947",
        "FR1420041010050500013M02606", "MT84MALT011000012345MTLCAST001S", "be68 5390 0754 7034",
        "SA03 8000 0000 6080 1016 7519", "CH9300762011623852957",
    ],
    "email": ["ada@example.org", "a.b+c_d@mail.example.co.uk", "josé@example.com", "x@a-b.museum"],
    "phone": ["+49 30 901820", "+1 (212) 555-0100", "(212) 555-0100", "212-555-0100", "020 7946 0958", "0049 30 901820"],
    "ip": ["192.0.2.1", "255.255.255.255", "2001:db8::1", "::1", "fe80::1ff:fe23:4567:890a", "::ffff:192.0.2.128",
           "2001:0db8:0000:0000:0000:ff00:0042:8329"],
    "us_ssn": ["078-05-1120", "219-09-9999", "899 99 9999"],
    "api_key": ["AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "sk-ant-" + "x" * 40, "AIza" + "S" * 35],
}  # fmt: skip
LEFT = {
    "card": ["4111111111111112", "41111111111", "4111  1111 1111 1111", "x4111111111111111", "41111111111111111111111"],
    "iban": ["DE89370400440532013001", "DE8937040044053201300", "XX89370400440532013000", "DE89 37040044 0532 0130 00"],
    "email": ["@example.org", "ada@", "ada@localhost", "a b@x"],
    "phone": ["1234567", "2026-11-30", "12.5", "555-0100"],
    "ip": ["256.1.1.1", "1.2.3", "std::vector", "::", "12:30:45", "1.2.3.04x"],
    "us_ssn": ["000-12-3456", "666-12-3456", "900-12-3456", "123-00-4567", "123-45-0000", "078-05 1120"],
    "api_key": ["AKIA", "sk-short", "ghp_abc"],
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_published_examples_are_found_and_near_misses_are_left(kind: str) -> None:
    machine = machine_of(kind)
    for text in FOUND[kind]:
        assert machine.rewrite(0, f"a {text}, b".encode())[0] == b"a #, b", text
        assert machine.rewrite(0, f"价{text}元".encode())[0] == "价#元".encode(), text
    for text in LEFT[kind]:
        assert machine.rewrite(0, f"a {text}, b".encode())[0].decode() == f"a {text}, b"


def test_a_failed_candidate_loses_no_match_inside_it() -> None:
    machine = machine_of("card", "phone")
    text = b"12 4111 1111 1111 1111 and 1234 5678 4111 1111 1111 1111"
    assert machine.rewrite(0, text)[0] == b"12 # and 1234 5678 #"


def test_no_byte_of_a_secret_leaves_at_any_two_splits() -> None:
    kinds = ("card", "email", "iban")
    machine = machine_of(*kinds)
    profile = ProfileRules(kinds=tuple(KindRule(n, kind, b"#") for n, kind in enumerate(kinds)))
    text = "Pay 4111 1111 1111 1111, é DE89 3704 0044 0532 0130 00 a@b.example.".encode()
    expected = rewrite(profile, text)[0]
    assert expected == "Pay #, é # #.".encode()
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        slot, out = machine.start(0), b""
        for part in (text[:first], text[first:second], text[second:]):
            out += slot.feed(part)
            assert expected.startswith(out)
        assert out + slot.finish() == expected


def test_what_cannot_become_a_kind_is_not_held() -> None:
    machine = machine_of("card", "us_ssn")
    slot = machine.start(0)
    for part in (b"Hello ", b"world. ", "é ".encode(), b"x1 ", b"No ", b"12, "):
        assert slot.feed(part) == part


def redaction_machine(profile: ProfileRules) -> Transducer:
    count = 1 + max(rule.id for rule in (*profile.texts, *profile.kinds, *profile.spans))
    return Transducer(read_transducer(TransducerBuilder((profile,)).build(count)[0], "test"))


def redact(
    number: int, text: str, replacement: str, *, whole_word: bool = False, scope: str = "all"
) -> TextRule:
    pattern = parse_regex(text[1:-1]) if text.startswith("/") else text.encode()
    return TextRule(
        number, REDACTION, pattern, True, whole_word, replacement=replacement.encode(), scope=scope
    )


MY_CARD = ProfileRules((redact(0, "my card 4111", "[t]"),), kinds=(KindRule(2, "card", b"#"),))
OVERLAPS = [
    # a text that begins before a kind and reaches into it, and the kind alone
    (MY_CARD, {}, "my card 4111, my card 4111111111111111, 4111111111111111.", "[t], [t]111111111111, #."),
    # a kind that begins before a text and reaches into it, and the text alone
    (
        ProfileRules((redact(0, "1111 is mine", "[t]"),), kinds=(KindRule(2, "card", b"#"),)),
        {},
        "4111 1111 1111 1111 is mine, 1111 is mine.",
        "# is mine, [t].",
    ),
    # a pattern that begins before a kind, one that is longer, and one that is shorter
    (
        ProfileRules((redact(0, "/id [0-9]{2,6}/", "[p]"),), kinds=(KindRule(2, "us_ssn", b"#"),)),
        {0: "id [0-9]{2,6}"},
        "id 078-05-1120, 078-05-1120 id 12",
        "[p]-05-1120, # [p]",
    ),
    # one start: the longest wins, of one length the first in the file
    (
        ProfileRules(
            (redact(1, "4111 1111 1111 1111 now", "[t]"), redact(3, "4111", "[s]"), redact(4, "ada@example.org", "[m]")),
            kinds=(KindRule(0, "card", b"#"), KindRule(2, "email", b"@")),
        ),
        {},
        "4111 1111 1111 1111 now, 4111 1111 1111 1111, 4111 x ada@example.org",
        "[t], #, [s] x @",
    ),
    # inside a span, where another rule holds than outside
    (
        ProfileRules(
            (redact(0, "my card 4111", "[t]", scope="s"), redact(1, "card 4111", "[o]", scope="outside")),
            kinds=(KindRule(2, "card", b"#"),),
            spans=(SpanRule(3, "s", b"<s>", b"</s>", "keep"),),
        ),
        {},
        "my card 4111111111111111 <s>my card 4111111111111111</s> 4111111111111111",
        "my [o]111111111111 <s>[t]111111111111</s> #",
    ),
    # a match is found at any place in a word, and boundaries are the text's own, also behind a redaction
    (
        ProfileRules(
            (
                redact(0, "secret", "[s]"), redact(1, "plan", "[p]", whole_word=True),
                TextRule(2, MARKUP, b"b", True, True, before=b"<b>", after=b"</b>"),
            )
        ),
        {},
        "bsecretb b secret b secretplan secret plan planb",
        "b[s]b <b>b</b> [s] <b>b</b> [s]plan [s] [p] planb",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "regexes", "text", "expected"), OVERLAPS)
def test_of_redactions_that_overlap_the_leftmost_longest_wins_and_none_of_it_leaves_at_any_two_splits(
    profile: ProfileRules, regexes: dict[int, str], text: str, expected: str
) -> None:
    machine, data = redaction_machine(profile), text.encode()
    assert rewrite(profile, data, regexes)[0].decode() == expected
    assert machine.rewrite(0, data)[0].decode() == expected
    for first, second in itertools.combinations(range(len(data) + 1), 2):
        slot, out = machine.start(0), b""
        for part in (data[:first], data[first:second], data[second:]):
            out += slot.feed(part)
            assert expected.encode().startswith(out), "what was sent is part of the whole text's output"
        assert out + slot.finish() == expected.encode()


def test_markup_stays_outside_of_what_a_kind_matches() -> None:
    rules = (*MY_CARD.texts, TextRule(1, MARKUP, b"pay 41", True, False, before=b"<b>", after=b"</b>"))
    machine = redaction_machine(ProfileRules(rules, kinds=MY_CARD.kinds))
    assert machine.rewrite(0, b"pay 4111111111111111") == (b"pay #", [2])
    assert machine.rewrite(0, b"my card 4111, pay 41") == (b"[t], <b>pay 41</b>", [0, 1])


def test_the_table_is_the_same_bytes_whatever_the_hash_seed() -> None:
    sample = Path(__file__).parents[1] / "samples/redaction/ral-config.yaml"
    code = (
        "import hashlib, pathlib; from ralbuild.config.load import load_config; "
        "from ralbuild.fold.folding import fold; "
        f"folded = fold(load_config(pathlib.Path({str(sample)!r})), [bytes([b]) for b in range(256)]); "
        "print(hashlib.sha256(folded.transducer).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
