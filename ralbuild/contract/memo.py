"""What tokens do to a text, remembered: most tokens meet a state that has seen them before.

A `Step` is exact because a settled slot (`ralbuild.contract.transducer.Slot`) has read all that it
holds: what a token does to it follows from the slot's numbers, the count of held bytes and the token's
bytes, and the held bytes themselves only move. So a step says what is written as slices of "held + token".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Part = slice | bytes
"""Something that is written: a slice of the bytes at hand, or a string of the table."""
PlaceKey = tuple[int, int, int, int]
"""Mode, kind state and rule state of a settled slot, and how many bytes it holds."""

LIMIT = 1 << 16
"""Steps that one table remembers, for all its texts together: at most about 32 MiB."""
LONGEST = 128
"""Bytes of a token that is remembered; whole texts come through the same door."""


class Place(dict[bytes, "Step"]):
    """What a settled slot can be like, and the steps of the tokens that were read there."""


class Step(NamedTuple):
    """What one token does to a settled slot that stays settled.

    Attributes:
        first, more: what is written; nearly always one slice.
        there: the place behind it; mode, kind, state: its numbers.
        keep: how many of the last bytes stay undecided.
        events: ids of the rules that matched.
    """

    first: slice
    more: tuple[Part, ...]
    there: Place
    mode: int
    kind: int
    state: int
    keep: int
    events: tuple[int, ...]


class Memo:
    """The places of a table by what they are; forgets all steps when there are too many.

    Places stay, for slots are in them: there are no more of them than the table has states and modes.
    """

    def __init__(self) -> None:
        self.places: dict[PlaceKey, Place] = {}
        self.steps = 0

    def place(self, key: PlaceKey) -> Place:
        """Return the place that ``key`` describes."""
        found = self.places.get(key)
        return self.places.setdefault(key, Place()) if found is None else found

    def put(self, place: Place, token: bytes, step: Step) -> None:
        """Remember a step."""
        if self.steps >= LIMIT:
            for known in list(self.places.values()):
                known.clear()
            self.steps = 0
        place[token] = step
        self.steps += 1


def first_slice(parts: Sequence[Part]) -> tuple[slice, tuple[Part, ...]]:
    """Return the leading slice of ``parts`` (empty when a string leads) and the rest."""
    if parts and isinstance(parts[0], slice):
        return parts[0], tuple(parts[1:])
    return slice(0, 0), tuple(parts)


def written(text: bytes, parts: Sequence[Part]) -> bytes:
    """Return the bytes that ``parts`` write of ``text``."""
    return b"".join([text[part] if isinstance(part, slice) else part for part in parts])
