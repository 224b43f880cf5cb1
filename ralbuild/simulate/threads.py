"""Who a lane is, and lanes that wait for others: barriers of blocks, warp-wide instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ralbuild.simulate.lanes import WARP, Array, Lanes, Mask
from ralbuild.simulate.partial import PartialBarriers, count_and_go
from ralbuild.simulate.ptx.model import Immediate, Instruction
from ralbuild.simulate.services import Services

if TYPE_CHECKING:
    from ralbuild.simulate.machine import Bound


def special_registers(block: tuple[int, int, int], grid: tuple[int, int, int], wave: int) -> dict[str, Array]:
    """Return the special registers of a wave (PTX ISA, "Special Registers"), uint32 a lane."""
    x, y, z = block
    threads = x * y * z
    lanes = np.arange(wave * threads)
    thread, lane = lanes % threads, lanes % WARP
    one = np.uint64(1)
    bit = one << lane.astype(np.uint64)
    everyone = np.uint64(0xFFFFFFFF)
    found = {
        "tid.x": thread % x,
        "tid.y": thread // x % y,
        "tid.z": thread // (x * y),
        "laneid": lane,
        "warpid": thread // WARP,
        "nwarpid": np.full(len(lanes), threads // WARP),
        "smid": np.zeros(len(lanes)),
        "lanemask_eq": bit,
        "lanemask_lt": bit - one,
        "lanemask_le": (bit << one) - one,
        "lanemask_gt": everyone - ((bit << one) - one),
        "lanemask_ge": everyone - (bit - one),
    }
    for number, name in enumerate("xyz"):
        found[f"ntid.{name}"] = np.full(len(lanes), block[number])
        found[f"nctaid.{name}"] = np.full(len(lanes), grid[number])
        found[f"ctaid.{name}"] = np.zeros(len(lanes))
    return {name: value.astype(np.uint32) for name, value in found.items()}


class Waiting:
    """Lanes that have arrived somewhere and wait for their block or warp.

    Threads that have ended are not waited for (PTX ISA, "bar").
    """

    def __init__(self, services: Services, live: Array) -> None:
        self.services = services
        self.live = live
        self.at_barrier: dict[int, list[tuple[Bound, Mask]]] = {}
        self.at_warp: dict[int, tuple[Bound, Mask]] = {}
        self.partial = PartialBarriers(services, live)

    def arrive(self, bound: Bound, state: int, lanes: Lanes, ready: dict[int, Lanes]) -> Lanes | None:
        """Return the lanes that may go on now; the others wait."""
        if bound.block.sync == "warp":
            return self._arrive_warp(bound, state, lanes)
        number = bound.block.code[0].operands[0]
        assert isinstance(number, Immediate)
        if bound.partial:
            self.partial.arrive(bound, lanes, ready)
            return None
        groups = self.at_barrier.setdefault(number.value, [])
        if lanes.full and not groups:
            self._tell(lanes.mask, block=True)
            return lanes
        groups.append((bound, lanes.mask))
        self._open_barrier(number.value, ready)
        return None

    def release(self, ready: dict[int, Lanes]) -> bool:
        """Let go whoever waits only for threads that have ended by now; tell whether anyone did."""
        for number in list(self.at_barrier):
            self._open_barrier(number, ready)
        self.partial.release(ready)
        for state, (bound, mask) in list(self.at_warp.items()):
            del self.at_warp[state]
            lanes = self._arrive_warp(bound, state, Lanes(mask))
            if lanes is not None:
                # They go on inside the block, so they run from its start: all of them have arrived.
                ready[state] = lanes
        return bool(ready)

    def expect_nobody(self) -> None:
        """Raise a deadlock when lanes still wait and nobody can come."""
        waits = [(bound.block.code[0], mask) for bound, mask in self.at_warp.values()]
        waits += self.partial.waits()
        waits += [
            (bound.block.code[0], mask) for groups in self.at_barrier.values() for bound, mask in groups
        ]
        if waits:
            places = sorted({f"line {item.line}: {item.text}" for item, _ in waits})
            item, mask = min(waits, key=lambda wait: wait[0].index)
            detail = f"{sum(int(mask.sum()) for _, mask in waits)} threads wait at {'; '.join(places)}"
            raise self.services.fault("deadlock", detail, item, int(mask.argmax()))

    def _open_barrier(self, number: int, ready: dict[int, Lanes]) -> None:
        groups = self.at_barrier[number]
        arrived = np.zeros(self.services.lanes, bool)
        for _, mask in groups:
            arrived |= mask
        rows = (arrived | ~self.live).reshape(-1, self.services.threads).all(axis=1)
        free = np.repeat(rows, self.services.threads) & arrived
        if not free.any():
            return
        if len(groups) > 1:
            self._expect_whole_warps(groups, free)
        self._tell(free, block=True)
        self.at_barrier[number] = [(bound, left) for bound, mask in groups if (left := mask & ~free).any()]
        for bound, mask in groups:
            going = mask & free
            if going.any():
                count_and_go(bound, going, ready)

    def _expect_whole_warps(self, groups: list[tuple[Bound, Mask]], free: Mask) -> None:
        """``bar.sync`` is aligned: all threads of a warp must execute the same one."""
        first: dict[Instruction, Mask] = {}
        for bound, mask in groups:
            item = bound.block.code[0]
            first[item] = first.get(item, np.zeros_like(mask)) | (mask & free)
        for item, mask in first.items():
            here = mask.reshape(-1, WARP)
            parted = here.any(axis=1) & ~(here | ~self.live.reshape(-1, WARP)).all(axis=1)
            if parted.any() and "barrier" not in item.opcode:
                lane = int(parted.argmax()) * WARP
                detail = "the threads of one warp wait at different barriers"
                raise self.services.fault("divergent barrier", detail, item, lane)

    def _arrive_warp(self, bound: Bound, state: int, lanes: Lanes) -> Lanes | None:
        item = bound.block.code[0]
        if state in self.at_warp:
            lanes = lanes | Lanes(self.at_warp.pop(state)[1])
        elif lanes.full and bound.members is None:
            self._met(item, lanes.mask)
            return lanes
        wanted = self.live
        if bound.members is not None:
            wanted = wanted & self._named(bound.members, lanes, item)
        here = lanes.mask.reshape(-1, WARP)
        whole = np.repeat((here | ~wanted.reshape(-1, WARP)).all(axis=1), WARP)
        going = lanes.mask & whole
        held = lanes.mask & ~whole
        if held.any():
            self.at_warp[state] = (bound, held)
        if not going.any():
            return None
        self._met(item, going)
        return Lanes(going) if held.any() else lanes

    def _named(self, members: Array, lanes: Lanes, item: Instruction) -> Mask:
        """Return the lanes that arrived lanes name; each must name itself."""
        lane = (self.services.numbers % WARP).astype(np.uint32)
        stray = lanes.mask & (members >> lane & np.uint32(1) == 0)
        if stray.any():
            at = int(stray.argmax())
            raise self.services.fault("inactive lane", "a lane that its own mask does not name", item, at)
        rows = np.where(lanes.mask, members, np.uint32(0)).reshape(-1, WARP)
        union = np.repeat(np.bitwise_or.reduce(rows, axis=1), WARP)
        return (union >> lane & np.uint32(1)).astype(bool)

    def _met(self, item: Instruction, mask: Mask) -> None:
        if item.opcode == "bar":
            self._tell(mask, block=False)

    def _tell(self, mask: Mask, *, block: bool) -> None:
        if self.services.observers:
            threads = np.flatnonzero(mask) + self.services.first_block * self.services.threads
            for observer in self.services.observers:
                observer.synchronized(threads, block=block)
