"""Bans and allowed texts against plain substring search and `re`, and over every segmentation of a phrase."""

from __future__ import annotations

import random
import re

import pytest

from ralbuild.config.regex import parse_class
from ralbuild.contract.bans import BanSlot, BanTable, read_bans, write_bans
from ralbuild.contract.codec import FormatError
from ralbuild.errors import CompileError
from ralbuild.fold.bans import Limits, build_bans


def table_of(*limits: Limits) -> BanTable:
    return read_bans(build_bans(limits), "test")


def test_a_text_is_allowed_exactly_when_no_phrase_is_in_it() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        phrases = tuple(
            "".join(rng.choice("abC é") for _ in range(rng.randint(1, 4))).encode()
            for _ in range(rng.randint(0, 4))
        )
        table = table_of(Limits(phrases), Limits(), Limits((b"zz",)))
        text = "".join(rng.choice("abcABC dé") for _ in range(12)).encode()
        assert BanSlot(table, 0).allows(text) == all(p.lower() not in text.lower() for p in phrases), (
            phrases,
            text,
        )
        assert BanSlot(table, 1).allows(text)
        assert BanSlot(table, 0).active == bool(phrases)


def segmentations(text: bytes) -> list[list[bytes]]:
    if not text:
        return [[]]
    return [[text[:n], *rest] for n in range(1, len(text) + 1) for rest in segmentations(text[n:])]


def test_every_way_to_split_a_phrase_into_tokens_is_blocked() -> None:
    table = table_of(Limits((b"risk-free",)))
    ways = segmentations(b" RISK-free")
    assert len(ways) == 2 ** (len(b" RISK-free") - 1)
    for way in ways:
        slot = BanSlot(table, 0)
        for token in way[:-1]:
            if not slot.allows(token):
                break
            slot.advance(token)
        else:
            assert not slot.allows(way[-1]), way


def accepted(table: BanTable, text: bytes) -> bool:
    """Walk a text byte by byte, as tokens of one byte would."""
    slot = BanSlot(table, 0)
    for byte in text:
        if not slot.allows(bytes([byte])):
            return False
        slot.advance(bytes([byte]))
    return slot.may_end


@pytest.mark.parametrize("characters", ["", "0-9.,", "aé風🙂", "^a-y", r"\d\]b", "à-ÿ一-鿿"])
def test_an_answer_may_be_exactly_what_re_and_a_list_of_texts_say(characters: str) -> None:
    """Texts of random pieces, broken UTF-8 among them, with bans beside the allow."""
    rng = random.Random(characters)
    texts = (b"yes", b"yes, but", b"a9", "é風".encode())
    bans = (b"99", "風風".encode())
    chosen = texts if rng.random() < 0.5 or not characters else ()
    pattern = re.compile(f"[{characters}]*") if characters else None
    table = table_of(Limits(bans, chosen, parse_class(characters) if characters else None))
    pieces = [
        b"yes",
        b", but",
        b"a",
        b"9",
        b"99",
        "é".encode(),
        "風".encode(),
        "🙂".encode(),
        b"]",
        b"b",
        b"\xe9",
    ]
    seen = set()
    for _ in range(1500):
        text = b"".join(rng.choice(pieces) for _ in range(rng.randint(0, 4)))
        try:
            made_of_them = pattern is not None and pattern.fullmatch(text.decode()) is not None
        except UnicodeDecodeError:
            made_of_them = False
        wanted = (text in chosen or made_of_them) and not any(ban in text for ban in bans)
        assert accepted(table, text) == wanted, text
        seen.add(wanted)
    assert seen == {True, False}


def test_an_allowed_text_never_runs_into_a_dead_end() -> None:
    """Every state that a walk can reach leads on to an end: what bans make impossible is not begun."""
    table = table_of(Limits((b"cd", b"xy"), (b"abce", b"ab"), parse_class("x")))
    slot = BanSlot(table, 0)
    assert not slot.allows(b"y")
    for state in range(1, len(table.accepts)):
        reached = {state}
        while not any(table.accepts[number] for number in reached):
            row = {n for s in reached for n in table.trans[s * table.classes : (s + 1) * table.classes]} - {0}
            assert row
            reached = row
    with pytest.raises(CompileError, match="allows 'abCD' and bans it"):
        table_of(Limits((b"cd",), (b"ab", b"abCD"), name="n"))


def test_a_special_token_is_no_part_of_an_allowed_text() -> None:
    table = table_of(Limits(texts=(b"yes",)), Limits((b"no",)))
    assert not BanSlot(table, 0).allows(b"")
    assert BanSlot(table, 1).allows(b"")
    assert (BanSlot(table, 0).may_end, BanSlot(table, 1).may_end) == (False, True)


def test_the_same_limits_give_the_same_bytes_in_any_order() -> None:
    one = build_bans([Limits((b"ab", b"cd"), (b"x", b"y")), Limits()])
    assert one == build_bans([Limits((b"cd", b"ab"), (b"y", b"x")), Limits()])


def test_a_damaged_table_is_refused() -> None:
    good = {"cls": [0] * 256, "rows": [[0], [1]], "starts": [1]}
    read_bans(write_bans(**good), "test")
    for change in (
        {"starts": [0]},
        {"rows": [[0], [2]]},
        {"accepts": [1, 1]},
        {"strict": [2]},
        {"rows": [[1], [1]]},
    ):
        with pytest.raises(FormatError):
            read_bans(write_bans(**{**good, **change}), "test")
