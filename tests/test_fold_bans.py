"""Bans against plain substring search, and over every segmentation of a phrase."""

from __future__ import annotations

import random

from ralbuild.contract.bans import BanSlot, read_bans
from ralbuild.fold.bans import build_bans


def test_a_text_is_allowed_exactly_when_no_phrase_is_in_it() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        phrases = tuple(
            "".join(rng.choice("abC é") for _ in range(rng.randint(1, 4))).encode()
            for _ in range(rng.randint(0, 4))
        )
        table = read_bans(build_bans((phrases, (), (b"zz",))), "test")
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
    table = read_bans(build_bans(((b"risk-free",),)), "test")
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
