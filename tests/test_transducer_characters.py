"""Redactions never cut a character: a table that could is refused, and one that is read does not.

The oracle is Python's UTF-8: a text of whole characters, from which whole characters are taken away or
replaced by ASCII, is UTF-8 again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ralbuild.contract import transducer_read
from ralbuild.contract.codec import FormatError
from ralbuild.contract.transducer import Front, Transducer, read_transducer, write_transducer
from ralbuild.contract.transducer_table import COPY, DEAD, DONE, NONE, REDACT_BITS
from ralbuild.fold.unicode import word_table

A, OTHER, LEAD2, LEAD3, LEAD4, INNER = range(6)
"""Classes: the letter a, other ASCII and broken bytes, first bytes by length, bytes inside a character."""
HOME = [0] * 6


def klass(byte: int) -> int:
    if 0x80 <= byte < 0xC0:
        return INNER
    if 0xC2 <= byte < 0xF5:
        return LEAD2 if byte < 0xE0 else LEAD3 if byte < 0xF0 else LEAD4
    return A if byte == ord("a") else OTHER


def table(*rows: list[int], final: int = 0) -> bytes:
    """A table of redactions alone: two home states, then ``rows``; list 1 accepts without a check."""
    homes = [list(rows[0]), list(rows[0])]
    following = [entry for row in [*homes, *rows[1:]] for entry in row]
    return write_transducer(
        cls=[0] * 512,
        trans=[0, 0],
        final=[(1, 1), (1, 1)],
        programs=[[(COPY, 1)], []],
        strings=[b"#"],
        starts=[0],
        front=Front(
            modes=[(NONE, 0, 0, NONE, 0)],
            redact_class=[klass(symbol & 255) for symbol in range(512)],
            redact_next=following,
            redact_final=[0, 0, *[final] * (len(rows) - 1)],
            accepts=[(), (0,)],
            redactions=[(0, 0)],
        ),
        words=word_table(),
        max_held=64,
        rules=1,
    )


ACCEPT = 1 << REDACT_BITS
ENDED = [DEAD | ACCEPT] * 6
"""A candidate has ended, whatever comes."""
GIVEN_UP = [DEAD] * 6


def row(base: list[int], **entries: int) -> list[int]:
    """Return ``base`` with the entries of some classes changed, which are named by this module's names."""
    changed = list(base)
    for name, entry in entries.items():
        changed[globals()[name.upper()]] = entry
    return changed


LEGAL = {
    "a letter": [row(HOME, a=2), ENDED],
    "a letter, at once": [row(HOME, a=DONE | ACCEPT)],
    "a character of two bytes": [row(HOME, lead2=2), row(GIVEN_UP, inner=3), ENDED],
    "one of three, at once": [row(HOME, lead3=2), row(GIVEN_UP, inner=3), row(GIVEN_UP, inner=DONE | ACCEPT)],
    "one of four": [row(HOME, lead4=2), *[row(GIVEN_UP, inner=number) for number in (3, 4, 5)], ENDED],
    "what is followed by a first byte": [row(HOME, a=2), row(GIVEN_UP, lead2=DEAD | ACCEPT)],
}
CUTS = {
    "begins inside": [row(HOME, inner=2), ENDED],
    "begins and ends inside": [row(HOME, inner=DONE | ACCEPT)],
    "ends with a first byte": [row(HOME, lead2=DONE | ACCEPT)],
    "ends after a first byte": [row(HOME, lead2=2), ENDED],
    "ends with the second of three": [row(HOME, lead3=2), row(GIVEN_UP, inner=DONE | ACCEPT)],
    "ends after the third of four": [
        row(HOME, lead4=2), row(GIVEN_UP, inner=3), row(GIVEN_UP, inner=4), ENDED,
    ],
    "is forgotten inside": [row(HOME, lead3=2), row(GIVEN_UP, inner=0)],
    "is forgotten behind a letter": [row(HOME, a=2), row(GIVEN_UP, lead3=0)],
    "ends inside, after a letter and round a loop": [
        row(HOME, a=2), row(ENDED, a=2, lead4=3), row(GIVEN_UP, inner=4), row(GIVEN_UP, inner=2),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rows", LEGAL.values(), ids=LEGAL)
def test_redactions_of_whole_characters_are_read(rows: list[list[int]]) -> None:
    machine = Transducer(read_transducer(table(*rows), "test"))
    text = "xa\u00e9\u98ce\U0001f642a\u00e9"
    out, events = machine.rewrite(0, text.encode())
    assert events
    assert out.decode()


@pytest.mark.parametrize("rows", CUTS.values(), ids=CUTS)
def test_a_redaction_that_may_cut_a_character_is_refused(rows: list[list[int]]) -> None:
    with pytest.raises(FormatError, match=r"test: a redaction may (begin|end) inside a character"):
        read_transducer(table(*rows), "test")


def random_tables(seed: int, count: int) -> Iterator[bytes]:
    """Tables of a few states, half of whose entries go on and some of which end a candidate."""
    rng = random.Random(seed)
    for _ in range(count):
        states = rng.randint(1, 4)

        def entry(states: int = states) -> int:
            goal = rng.choice([DEAD, DEAD, DEAD, DONE, *range(2, 2 + states)])
            return goal | (ACCEPT if goal == DONE or rng.random() < 0.2 else 0)

        first = [rng.choice([0, 0, entry()]) for _ in range(5)] + [0 if rng.random() < 0.9 else entry()]
        rows = [[entry() for _ in range(6)] for _ in range(states)]
        # An entry that ends a candidate before a byte inside a character is almost always a cut.
        rows = [[*line[:5], DEAD if rng.random() < 0.6 else line[5]] for line in rows]
        yield table(first, *rows, final=rng.randint(0, 1))


def cuts(machine: Transducer, rng: random.Random) -> bool:
    """Tell whether a text of whole characters comes out broken, whole or in pieces."""
    for _ in range(25):
        text = "".join(rng.choice("aax\u00e9\u98ce\U0001f642") for _ in range(rng.randint(1, 8))).encode()
        slot, pieces = machine.start(0), b""
        at = 0
        while at < len(text):
            step = rng.randint(1, 4)
            pieces += slot.feed(text[at : at + step])
            at += step
        whole = machine.rewrite(0, text)[0]
        try:
            whole.decode()
        except UnicodeDecodeError:
            return True
        assert pieces + slot.finish() == whole
    return False


def test_no_random_table_that_is_read_cuts_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    read, refused, broken = 0, [], 0
    for data in random_tables(7, 500):
        try:
            machine = Transducer(read_transducer(data, "test"))
        except FormatError:
            refused.append(data)
            continue
        read += 1
        assert not cuts(machine, rng)
    monkeypatch.setattr(transducer_read, "_check_characters", lambda *_: None)
    for data in refused:
        broken += cuts(Transducer(read_transducer(data, "test")), rng)
    print(f"{read} read, {len(refused)} refused, of which {broken} cut a character in 25 texts")
    assert read > 60
    assert broken > 60, "the check refuses what texts do not show to be wrong"
