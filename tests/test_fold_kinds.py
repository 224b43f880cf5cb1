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

from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.fold.kinds import FORMS
from ralbuild.fold.rules import KindRule, ProfileRules, TextRule
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


def test_kinds_beat_texts_that_overlap_them_and_markup_stays_outside() -> None:
    rules = (
        TextRule(0, 0, b"my card 4111", True, False, replacement=b"[t]"),
        TextRule(1, 1, b"pay 41", True, False, before=b"<b>", after=b"</b>"),
    )
    data, _ = TransducerBuilder((ProfileRules(rules, kinds=(KindRule(2, "card", b"#"),)),)).build(3)
    machine = Transducer(read_transducer(data, "test"))
    assert machine.rewrite(0, b"my card 4111111111111111, pay 4111111111111111") == (
        b"my card #, pay #",
        [2, 2],
    )
    assert machine.rewrite(0, b"my card 4111, pay 41") == (b"[t], <b>pay 41</b>", [0, 1])


def test_where_a_kind_cuts_a_redacted_text_only_the_texts_own_rest_leaves_at_any_two_splits() -> None:
    rules = (TextRule(0, 0, b"my card 4111", True, False, replacement=b"[t]"),)
    profile = ProfileRules(rules, kinds=(KindRule(1, "card", b"#"),))
    machine = Transducer(read_transducer(TransducerBuilder((profile,)).build(2)[0], "test"))
    text = b"my card 4111, my card 4111111111111111, my card 4111111111111112."
    expected = b"[t], my card #, [t]111111111112."
    assert rewrite(profile, text)[0] == expected
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        slot, out = machine.start(0), b""
        for part in (text[:first], text[first:second], text[second:]):
            out += slot.feed(part)
            assert expected.startswith(out)
        assert out + slot.finish() == expected


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
