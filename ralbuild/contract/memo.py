"""What tokens do to a text, remembered: most tokens meet a place that has seen them before.

A `Step` is exact because a settled slot (`ralbuild.contract.slot.Slot`) is wholly described by its
`Place`: of what it holds, the rules have read all but the last bytes (``tail``: a candidate of the
redactions, an incomplete character), and these are part of the place. So what a token does follows from
the place and the token's bytes, and what is held before the tail only moves. A step says what is written
as slices of "held + token".

A tail is mostly a word, so a token after it would be remembered for each pair of words. Where the token
begins with a separator, which ends the candidate, it is read in two: the separator in the word's place, and
the rest in a place that all words lead to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Part = slice | bytes
"""Something that is written: a slice of the bytes at hand, or a string of the table."""

LIMIT = 1 << 16
"""Steps that one table remembers, for all its texts together: at most about 32 MiB."""
PLACES = 1 << 15
"""Places likewise: a tail can be any bytes, so there is no end of them."""
LONGEST = 128
"""Bytes of a token that is remembered; whole texts come through the same door."""
LONGEST_TAIL = 32
"""Bytes of a tail that is remembered. Longer candidates are rare, and mostly numbers, all different."""
SEPARATORS = frozenset(range(0x80)) - frozenset(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
)
"""First bytes of tokens that are read in two behind a tail."""


class PlaceKey(NamedTuple):
    """What a settled slot is like.

    Attributes:
        mode, redact, state: the mode, and the states of redactions and rules.
        held: bytes that the rules have read and not decided.
        tail: bytes behind them that they have not read.
        best, best_size: the longest accept of the candidate and its length; -1 and 0 for none.
    """

    mode: int
    redact: int
    state: int
    held: int
    tail: bytes
    best: int
    best_size: int


class Place(dict[bytes, "Step"]):
    """A place, and the steps of the tokens that were read there."""

    __slots__ = ("key",)

    def __init__(self, key: PlaceKey) -> None:
        super().__init__()
        self.key = key


class Step(NamedTuple):
    """What one token does to a settled slot that stays settled.

    Attributes:
        first, more: what is written; nearly always one slice.
        there: the place behind it.
        keep: how many of the last bytes stay undecided.
        events: ids of the rules that matched.
    """

    first: slice
    more: tuple[Part, ...]
    there: Place
    keep: int
    events: tuple[int, ...]


class Memo:
    """The places of a table by what they are; forgets everything when there is too much.

    A slot may still be in a place that was forgotten: it goes on from there, to places that are known.
    """

    def __init__(self) -> None:
        self.places: dict[PlaceKey, Place] = {}
        self.steps = 0

    def place(self, key: PlaceKey) -> Place:
        """Return the place that ``key`` describes."""
        found = self.places.get(key)
        if found is None:
            if len(self.places) >= PLACES:
                self._forget()
            found = self.places.setdefault(key, Place(key))
        return found

    def put(self, place: Place, token: bytes, step: Step) -> None:
        """Remember a step."""
        if self.steps >= LIMIT:
            self._forget()
        place[token] = step
        self.steps += 1

    def join(self, place: Place, token: bytes, middle: Place) -> None:
        """Remember as one step what the first byte of ``token`` does to ``place`` and the rest to ``middle``.

        Pairs are many: they may take half of the room.
        """
        one, two = place.get(token[:1]), middle.get(token[1:])
        if one is None or two is None or self.steps >= LIMIT // 2:
            return
        shift = place.key.held + len(place.key.tail) + 1 - one.keep
        parts: list[Part] = []
        for part in (one.first, *one.more):
            add_part(parts, part)
        for part in (two.first, *two.more):
            add_part(parts, part if isinstance(part, bytes) else slice(part.start + shift, part.stop + shift))
        self.put(place, token, Step(*first_slice(parts), two.there, two.keep, one.events + two.events))

    def _forget(self) -> None:
        for place in list(self.places.values()):
            place.clear()  # a place that outlives this must not keep the others
        self.places.clear()
        self.steps = 0


def add_part(parts: list[Part], part: Part) -> None:
    """Append to what is written; a slice that goes on where the last one ends makes it longer."""
    last = parts[-1] if parts else None
    if isinstance(part, slice) and isinstance(last, slice) and last.stop == part.start:
        parts[-1] = slice(last.start, part.stop)
    elif not isinstance(part, slice) or part.start < part.stop:
        parts.append(part)


def first_slice(parts: Sequence[Part]) -> tuple[slice, tuple[Part, ...]]:
    """Return the leading slice of ``parts`` (empty when a string leads) and the rest."""
    if parts and isinstance(parts[0], slice):
        return parts[0], tuple(parts[1:])
    return slice(0, 0), tuple(parts)


def written(text: bytes, parts: Sequence[Part]) -> bytes:
    """Return the bytes that ``parts`` write of ``text``."""
    return b"".join([text[part] if isinstance(part, slice) else part for part in parts])
