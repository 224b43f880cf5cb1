"""Banned phrases as one byte-level automaton (Aho and Corasick 1975), and the executor that defines it.

A token is allowed in a state when walking its bytes never enters the accepting sink. Because the
walk is over bytes, every way to split a phrase into tokens is covered by the same table. The
sampler asks `BanSlot.allows` for candidates in order of their perturbed score and takes the first
that is allowed: an exact draw from the masked distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

from ralbuild.contract.arrays import make_array, read_arrays, write_arrays
from ralbuild.contract.codec import FormatError

FORMAT = "ralbuild.bans/1"
BANNED = 0
"""State 0 is the sink: a banned phrase is complete. No start state is ever 0."""


@dataclass(frozen=True, slots=True)
class BanTable:
    """A compiled set of banned phrases.

    Attributes:
        classes: C, number of byte classes.
        cls: byte to class, 256 entries.
        trans: S * C next states.
        starts: start state per profile.
    """

    classes: int
    cls: bytes
    trans: memoryview
    starts: memoryview


def write_bans(*, cls: list[int], rows: list[list[int]], starts: list[int]) -> bytes:
    """Serialise a ban automaton; row 0 must be the sink."""
    classes = max(cls) + 1
    arrays = {
        "cls": make_array("U8", cls),
        "trans": make_array("U32", [entry for row in rows for entry in row], (len(rows), classes)),
        "starts": make_array("U32", starts),
    }
    return write_arrays(arrays, {"format": FORMAT})


def read_bans(data: bytes, where: str) -> BanTable:
    """Parse and check a ban automaton, or raise FormatError."""
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
    return BanTable(classes, cls, trans, starts)


class BanSlot:
    """The ban automaton's state for one text."""

    __slots__ = ("active", "state", "table")

    def __init__(self, table: BanTable, profile: int) -> None:
        self.table = table
        self.state = table.starts[profile]
        row = table.trans[self.state * table.classes : (self.state + 1) * table.classes]
        self.active = any(entry != self.state for entry in row)
        """False when the profile bans nothing: its start state has only loops."""

    def step(self, data: bytes) -> int:
        """Return the state after ``data`` without moving; `BANNED` when a phrase completes."""
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
        """Tell whether a token with the bytes ``data`` may come next."""
        return self.step(data) != BANNED

    def advance(self, data: bytes) -> None:
        """Move past a token that was chosen; it must be allowed."""
        self.state = self.step(data)
