"""What tokens do to a text, remembered: most tokens meet a place that has seen them before.

A `Step` is exact because a settled slot (`ralbuild.contract.slot.Slot`) is wholly described by its
`Place`, the bytes that it holds among it: what a token writes and where it leads is one look-up, however
much is held. The last of these bytes, which the rules have not read, are the tail: a candidate of the
redactions, or an incomplete character.

A tail is mostly a word, so a token after it would be remembered for each pair of words. Where the token
begins with a separator, which ends the candidate, it is read in two: the separator in the word's place, and
the rest in a place that all words lead to.
"""

from __future__ import annotations

from typing import NamedTuple

LIMIT = 1 << 16
"""Steps that one table remembers, for all its texts together: at most about 32 MiB."""
PLACES = 1 << 15
"""Places likewise: a tail can be any bytes, so there is no end of them."""
LONGEST = 128
"""Bytes of a token that is remembered; whole texts come through the same door."""
LONGEST_HELD = 32
"""Bytes that a place may hold. More are rare, and mostly numbers, all different."""
SEPARATORS = frozenset(range(0x80)) - frozenset(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
)
"""First bytes of tokens that are read in two behind a tail."""


class PlaceKey(NamedTuple):
    """What a settled slot is like.

    Attributes:
        mode, redact, state: the mode, and the states of redactions and rules.
        raw: the bytes that are not decided; held: how many of them the rules have read.
        best, best_size: the longest accept of the candidate and its length; -1 and 0 for none.
    """

    mode: int
    redact: int
    state: int
    raw: bytes
    held: int
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
        out: what is written.
        there: the place behind it.
        events: ids of the rules that matched.
    """

    out: bytes
    there: Place
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
        if one is not None and two is not None and self.steps < LIMIT // 2:
            self.put(place, token, Step(one.out + two.out, two.there, one.events + two.events))

    def _forget(self) -> None:
        for place in list(self.places.values()):
            place.clear()  # a place that outlives this must not keep the others
        self.places.clear()
        self.steps = 0
