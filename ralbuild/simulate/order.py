"""What barriers order: every thread is in an interval that ends at its next barrier.

A barrier of the whole block orders all that its threads did before with all that they do after: two accesses
in one interval are unordered, others are ordered. A barrier of a part of the block orders its own warps;
from the first one on, every warp remembers up to which interval it has seen each other one.
"""

from __future__ import annotations

import numpy as np

from ralbuild.simulate.lanes import WARP, Array


class Order:
    """The intervals of a grid's threads.

    Attributes:
        block: interval since the last barrier of the block, or of a part of it, by thread.
        warp: interval since the last barrier of the warp or the block, by thread.
    """

    def __init__(self, threads: int, blocks: int) -> None:
        self.threads = threads
        self.warps = threads // WARP
        total = threads * blocks
        self.block = (np.arange(total) // threads).astype(np.int32)
        self.warp = (np.arange(total) // WARP).astype(np.int32)
        self._next = total
        self._seen: Array | None = None
        self._pending: dict[int, tuple[int, Array]] = {}

    def _advance(self) -> int:
        first = self._next
        self._next += len(self.warp)
        if self._next > 1 << 30:
            raise OverflowError("too many barriers for one run of the race detector")
        return first

    def synchronized(self, threads: Array, *, block: bool) -> None:
        """All of a block's threads that still run met, or all of a warp's."""
        first = self._advance()
        if block:
            self.block[threads] = first + threads // self.threads
            if self._seen is not None:
                for warp in np.unique(threads // WARP).tolist():
                    self._seen[warp] = first + warp * WARP // self.threads
        self.warp[threads] = first + threads // WARP

    def arrived(self, threads: Array) -> None:
        """Threads arrived at a barrier and went on (``bar.arrive``)."""
        seen = self._matrix()
        first = self._advance()
        for warp in np.unique(threads // WARP).tolist():
            self._pending[warp] = (first, seen[warp].copy())
        self.block[threads] = first

    def joined(self, waiting: Array, arrived: Array) -> None:
        """A barrier of a part of one block opened: those that waited come after all that arrived."""
        seen = self._matrix()
        first = self._advance()
        known = np.full(self.warps, 0, seen.dtype)
        waiters = np.unique(waiting // WARP).tolist()
        for warp in waiters:
            known = np.maximum(known, seen[warp])
        for warp in np.unique(arrived // WARP).tolist():
            interval, row = self._pending.pop(warp)
            known = np.maximum(known, row)
            known[warp % self.warps] = max(known[warp % self.warps], interval)
        known[[warp % self.warps for warp in waiters]] = first
        seen[waiters] = known
        self.block[waiting] = first
        self.warp[waiting] = first + waiting // WARP

    def unordered(self, interval: Array, other: Array, thread: Array) -> Array:
        """Tell where what ``other`` did in an interval is not ordered before what ``thread`` does now.

        Args:
            other: threads of other warps; those of other blocks count as ordered.
        """
        if self._seen is None:
            same: Array = interval == self.block[thread]
            return same
        later = interval >= self._seen[thread // WARP, other // WARP % self.warps]
        near: Array = later & (other // self.threads == thread // self.threads)
        return near

    def _matrix(self) -> Array:
        """Return, by warp and warp of its block, the first interval of the other that it has not seen."""
        if self._seen is None:
            mine = self.block[::WARP]
            self._seen = np.repeat(mine[:, None], self.warps, axis=1)
        return self._seen
