"""Barriers of a part of a block: a number of threads that must arrive, some of which may not wait.

PTX ISA, "bar, barrier": threads are counted by whole warps, and all must name the same number of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ralbuild.simulate.lanes import WARP, Array, Lanes, Mask
from ralbuild.simulate.ptx.model import Immediate, Instruction
from ralbuild.simulate.services import Services

if TYPE_CHECKING:
    from ralbuild.simulate.machine import Bound


@dataclass(slots=True)
class _Gathering:
    """One barrier of one block: who has come so far."""

    expected: int
    first: Instruction
    arrived: Mask
    waiting: list[tuple[Bound, Mask]] = field(default_factory=list)


def expected_threads(instruction: Instruction) -> int:
    """Return how many threads a barrier names; 0 for all of the block."""
    count = instruction.operands[1] if len(instruction.operands) > 1 else Immediate(0)
    assert isinstance(count, Immediate)
    return count.value


class PartialBarriers:
    """The barriers of a machine's blocks that do not need all threads."""

    def __init__(self, services: Services, live: Mask) -> None:
        self.services = services
        self.live = live
        self._open: dict[tuple[int, int], _Gathering] = {}

    def arrive(self, bound: Bound, lanes: Lanes, ready: dict[int, Lanes]) -> None:
        """Take lanes that came to a barrier; those that may go on are put into ``ready``."""
        item = bound.block.code[0]
        number = item.operands[0]
        assert isinstance(number, Immediate)
        threads = self.services.threads
        going = np.zeros(self.services.lanes, bool)
        for block in np.unique(lanes.index // threads).tolist():
            mine = lanes.mask & (np.arange(self.services.lanes) // threads == block)
            self._gather(bound, (block, number.value), mine)
            if "arrive" in item.modifiers:
                going |= mine
                self._tell_arrived(mine)
            self._open_if_full((block, number.value), ready)
        if going.any():
            count_and_go(bound, going, ready)

    def _gather(self, bound: Bound, key: tuple[int, int], mask: Mask) -> None:
        item = bound.block.code[0]
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = _Gathering(expected_threads(item), item, np.zeros_like(mask))
        if found.expected != expected_threads(item):
            detail = f"{expected_threads(item)} threads here, {found.expected} at line {found.first.line}"
            raise self.services.fault("divergent barrier", detail, item, int(mask.argmax()))
        twice = found.arrived & mask
        if twice.any():
            detail = "a thread comes twice before the barrier opens"
            raise self.services.fault("divergent barrier", detail, item, int(twice.argmax()))
        found.arrived |= mask
        if "arrive" not in item.modifiers:
            found.waiting.append((bound, mask))

    def release(self, ready: dict[int, Lanes]) -> None:
        """Look again: threads of a warp that have ended are not waited for."""
        for key in list(self._open):
            self._open_if_full(key, ready)

    def _open_if_full(self, key: tuple[int, int], ready: dict[int, Lanes]) -> None:
        found = self._open[key]
        here = found.arrived.reshape(-1, WARP)
        warps = here.any(axis=1) & (here | ~self.live.reshape(-1, WARP)).all(axis=1)
        count = int(np.count_nonzero(warps)) * WARP
        if count < found.expected:
            return
        if count > found.expected:
            detail = f"{count} threads came, {found.expected} were expected"
            raise self.services.fault("divergent barrier", detail, found.first, int(found.arrived.argmax()))
        del self._open[key]
        self._tell_joined(found)
        for bound, mask in found.waiting:
            count_and_go(bound, mask, ready)

    def waits(self) -> list[tuple[Instruction, Mask]]:
        """Return who waits where."""
        return [(bound.block.code[0], mask) for found in self._open.values() for bound, mask in found.waiting]

    def _tell_arrived(self, mask: Mask) -> None:
        for observer in self.services.observers:
            observer.arrived(self._threads(mask))

    def _tell_joined(self, found: _Gathering) -> None:
        waiting = np.zeros_like(found.arrived)
        for _, mask in found.waiting:
            waiting |= mask
        for observer in self.services.observers:
            observer.joined(self._threads(waiting), self._threads(found.arrived & ~waiting))

    def _threads(self, mask: Mask) -> Array:
        return np.flatnonzero(mask) + self.services.first_block * self.services.threads


def count_and_go(bound: Bound, mask: Mask, ready: dict[int, Lanes]) -> None:
    """Let lanes go on behind a barrier."""
    lanes = Lanes(mask)
    bound.groups += 1
    bound.warps += lanes.warps
    bound.lanes += lanes.count
    other = ready.get(bound.following)
    ready[bound.following] = lanes if other is None else lanes | other
