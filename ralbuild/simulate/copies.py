"""Asynchronous copies into shared memory: what `cp.async` started and nobody has waited for yet.

A copy may write its bytes at any time between its start and the wait, so until then nobody may read or
write them; here the bytes arrive at the wait, and any access before it is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ralbuild.simulate.lanes import Array
from ralbuild.simulate.memory import Buffer, Piece
from ralbuild.simulate.ptx.model import Instruction


@dataclass(frozen=True, slots=True)
class Copy:
    """What one instruction started for some lanes: rows of bytes, and the group that each belongs to."""

    instruction: Instruction
    lanes: Array
    offset: Array
    values: Array
    group: Array


@dataclass(slots=True)
class Copies:
    """Copies on their way, of one machine.

    Attributes:
        shared: the buffer that they write to.
        committed: groups that each lane has committed.
        flying: whether a copy will write a byte; made at first use.
    """

    lanes: int
    shared: Buffer
    open: list[Copy] = field(default_factory=list)
    committed: Array = field(init=False)
    flying: Array | None = None

    def __post_init__(self) -> None:
        self.committed = np.zeros(self.lanes, np.int64)

    def reset(self) -> None:
        """Forget everything: other blocks run now."""
        self.open.clear()
        self.committed[:] = 0
        if self.flying is not None:
            self.flying[:] = False

    def start(self, instruction: Instruction, lanes: Array, offset: Array, values: Array) -> None:
        """Begin copies of ``values``, [lanes, bytes], to ``offset`` in the buffer."""
        if self.flying is None:
            self.flying = np.zeros(self.shared.size, bool)
        self.flying[_bytes(offset, values.shape[1])] = True
        self.open.append(Copy(instruction, lanes, offset, values, self.committed[lanes]))

    def commit(self, lanes: Array) -> None:
        """End the group that each lane is filling."""
        self.committed[lanes] += 1

    def due(self, lanes: Array, most: int) -> list[Copy]:
        """Take out all groups but the last ``most`` of each lane; nothing is written yet."""
        waiting = np.zeros(self.lanes, bool)
        waiting[lanes] = True
        finished, left = [], []
        for copy in self.open:
            done = waiting[copy.lanes] & (copy.group < self.committed[copy.lanes] - most)
            if done.any():
                finished.append(_part(copy, done))
            if not done.all():
                left.append(_part(copy, ~done))
        self.open = left
        return finished

    def land(self, copy: Copy) -> None:
        """Write the bytes of a copy."""
        where = _bytes(copy.offset, copy.values.shape[1])
        self.shared.bytes[where] = copy.values
        assert self.flying is not None
        self.flying[where] = False

    def touched(self, piece: Piece, size: int) -> Array | None:
        """Return which lanes of an access meet bytes on their way; None for none."""
        if not self.open or piece.buffer is not self.shared or self.flying is None:
            return None
        met: Array = np.asarray(self.flying[_bytes(piece.offset, size)].any(axis=1))
        return met if met.any() else None


def _bytes(offset: Array, size: int) -> Array:
    where: Array = offset[:, None] + np.arange(size)
    return where


def _part(copy: Copy, chosen: Array) -> Copy:
    return Copy(
        copy.instruction, copy.lanes[chosen], copy.offset[chosen], copy.values[chosen], copy.group[chosen]
    )
