"""What a text may be, as one byte-level automaton, and the executor that defines it.

Banned phrases (Aho and Corasick 1975) and `allow` are one table per build. A token is legal in a
state when walking its bytes never enters the sink. Because the walk is over bytes, every way to
split a phrase into tokens is covered by the same table. A text may end in the states that `accepts`
names: in all of them, unless the profile has an `allow`.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.contract.arrays import Array, make_array, read_arrays, write_arrays
from ralbuild.contract.codec import FormatError

FORMAT = "ralbuild.bans/2"
BANNED = 0
"""State 0 is the sink: the text has become one that may not be. No start state is ever 0."""


@dataclass(frozen=True, slots=True)
class BanTable:
    """A compiled set of banned phrases and allowed texts.

    Attributes:
        classes: C, number of byte classes.
        cls: byte to class, 256 entries.
        trans: S * C next states.
        accepts: S flags, 1 where the text may end.
        starts: start state per profile.
        strict: per profile, 1 when it has an `allow`: tokens are masked before anything else looks at
            them, and tokens without bytes (special ones) are not legal.
    """

    classes: int
    cls: bytes
    trans: memoryview
    accepts: bytes
    starts: memoryview
    strict: bytes


def write_bans(
    *,
    cls: list[int],
    rows: Sequence[Sequence[int]],
    starts: list[int],
    accepts: Sequence[int] | None = None,
    strict: Sequence[int] | None = None,
) -> bytes:
    """Serialise an automaton; row 0 must be the sink. By default every other state accepts."""
    classes = max(cls) + 1
    flat = array.array("I")
    for row in rows:
        flat.extend(row)
    if accepts is None:
        accepts = [0] + [1] * (len(rows) - 1)
    arrays = {
        "cls": make_array("U8", cls),
        "trans": make_array("U32", flat, (len(rows), classes)),
        "accepts": Array("U8", (len(rows),), bytes(accepts)),
        "starts": make_array("U32", starts),
        "strict": make_array("U8", list(strict) if strict is not None else [0] * len(starts)),
    }
    return write_arrays(arrays, {"format": FORMAT})


def read_bans(data: bytes, where: str) -> BanTable:
    """Parse and check an automaton, or raise FormatError."""
    file = read_arrays(data, where)
    file.expect_format(FORMAT, where)
    cls = bytes(file.take("cls", "U8", 256))
    trans, starts = file.take("trans", "U32"), file.take("starts", "U32")
    classes = max(cls) + 1
    states = len(trans) // classes
    if states < 2 or len(trans) != states * classes or max(trans) >= states or not len(starts):
        raise FormatError(where, "the ban automaton has a state out of range")
    if max(starts) >= states or min(starts) == BANNED or any(trans[:classes]):
        raise FormatError(where, "state 0 of the ban automaton must be the sink and no start")
    accepts = bytes(file.take("accepts", "U8", states))
    strict = bytes(file.take("strict", "U8", len(starts)))
    if max(accepts) > 1 or max(strict) > 1 or accepts[BANNED]:
        raise FormatError(where, "a flag of the ban automaton is neither 0 nor 1, or its sink accepts")
    return BanTable(classes, cls, trans, accepts, starts, strict)


class BanSlot:
    """The automaton's state for one text."""

    __slots__ = ("active", "state", "strict", "table")

    def __init__(self, table: BanTable, profile: int) -> None:
        self.table = table
        self.state = table.starts[profile]
        self.strict = bool(table.strict[profile])
        """True when the profile has an `allow`."""
        row = table.trans[self.state * table.classes : (self.state + 1) * table.classes]
        self.active = self.strict or any(entry != self.state for entry in row)
        """False when the profile forbids nothing: its start state has only loops."""

    def step(self, data: bytes) -> int:
        """Return the state after ``data`` without moving; `BANNED` when the text may not be."""
        state = self.state
        if not self.active:
            return state
        trans, cls, classes = self.table.trans, self.table.cls, self.table.classes
        for byte in data:
            state = trans[state * classes + cls[byte]]
            if state == BANNED:
                break
        return state

    def allows(self, data: bytes) -> bool:
        """Tell whether a token with the bytes ``data`` may come next; no bytes mean a special token."""
        return self.step(data) != BANNED and (bool(data) or not self.strict)

    @property
    def may_end(self) -> bool:
        """Tell whether the text may end here."""
        return bool(self.table.accepts[self.state])

    def advance(self, data: bytes) -> None:
        """Move past a token that was chosen; it must be allowed."""
        self.state = self.step(data)
