"""Finds data races: two accesses to a byte, one of them a write, that nothing orders.

What orders accesses: a barrier orders the threads of its block (`bar.sync`) or warp (`bar.warp.sync`)
before it with those after it. Nothing orders two blocks of a grid, and nothing but a barrier orders two
threads of a warp: that they run in step is not promised since Volta. Two atomics never race, nor do two
writes of the same value. Locks made of atomics are not understood: what they protect is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ralbuild.simulate.lanes import WARP, Array
from ralbuild.simulate.memory import Buffer
from ralbuild.simulate.order import Order
from ralbuild.simulate.ptx.model import Instruction
from ralbuild.simulate.services import Access

Scope = Literal["between blocks", "between warps", "within a warp"]
_NONE = -1
_MOST_KEPT = 8_000_000
"""Reads that are kept for later, in threads, before shadows are made after all."""
_NOBODY = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Party:
    """One side of a race: the instruction, and the thread by block and number."""

    line: int
    text: str
    block: int
    thread: int

    def __str__(self) -> str:
        return f"block {self.block} thread {self.thread}, line {self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders.

    Attributes:
        kind: what happened first and then, such as ``read/write``.
        offset: the first byte of the buffer that they share.
        count: how many bytes and times these two instructions met so.
    """

    scope: Scope
    kind: str
    buffer: str
    offset: int
    earlier: Party
    later: Party
    count: int

    def __str__(self) -> str:
        return f"{self.kind} {self.scope} at {self.buffer}+{self.offset}: {self.earlier}; then {self.later}"


class _Shadow:
    """What is known of each byte of a buffer: its last writer, and the span of its readers.

    Readers are kept as the lowest and highest thread: over the whole grid, since the block's last
    barrier, and since the warp's. That is enough to know whether another block, warp or thread is among
    them, for blocks and warps are runs of thread numbers.
    """

    def __init__(self, size: int) -> None:
        self.writer, self.writer_site = np.full((2, size), _NONE, np.int32)
        self.writer_block, self.writer_warp = np.full((2, size), _NONE, np.int32)
        self.atomic = np.zeros(size, bool)
        self.reader_site = np.full(size, _NONE, np.int32)
        self.low, self.block_low, self.warp_low = np.full((3, size), _NOBODY, np.int32)
        self.high, self.block_high, self.warp_high = np.full((3, size), _NONE, np.int32)
        self.block_stamp, self.warp_stamp = np.full((2, size), _NONE, np.int32)


class _Read(NamedTuple):
    """A read, with the intervals its threads were in."""

    access: Access
    block: Array
    warp: Array


class RaceDetector:
    """An observer that collects races of one launch."""

    def __init__(self, threads: int, blocks: int) -> None:
        """Watch a grid of ``blocks`` blocks of ``threads`` threads."""
        self.threads = threads
        self.order = Order(threads, blocks)
        self._shadows: dict[Buffer, _Shadow] = {}
        self._unwritten: dict[Buffer, list[_Read]] = {}
        """Reads of buffers that nothing has written: most are tables, and never need a shadow."""
        self._kept = 0
        self._code: dict[int, Instruction] = {}
        self._found: dict[tuple[str, str, str, int, int], Race] = {}

    @property
    def races(self) -> tuple[Race, ...]:
        """What was found, in the order of first sight."""
        return tuple(self._found.values())

    def forget(self) -> None:
        """Start a new launch: what came before it is ordered before it."""
        self._shadows.clear()
        self._unwritten.clear()
        self._kept = 0

    def emptied(self, buffer: Buffer) -> None:
        """Forget a buffer; see `Observer`."""
        self._shadows.pop(buffer, None)
        self._unwritten.pop(buffer, None)

    def synchronized(self, threads: Array, *, block: bool) -> None:
        """See `Observer`."""
        self.order.synchronized(threads, block=block)

    def arrived(self, threads: Array) -> None:
        """See `Observer`."""
        self.order.arrived(threads)

    def joined(self, waiting: Array, arrived: Array) -> None:
        """See `Observer`."""
        self.order.joined(waiting, arrived)

    def access(self, access: Access) -> None:
        """Compare an access with what is known of its bytes, and remember it; see `Observer`."""
        self._code[access.instruction.index] = access.instruction
        shadow = self._shadows.get(access.buffer)
        if shadow is None:
            if access.kind == "read" and self._kept < _MOST_KEPT:
                self._keep(access)
                return
            shadow = self._shadow(access.buffer)
        at, thread = _bytes_of(access)
        if access.kind == "read":
            harmless: Array = np.zeros(len(at), bool)
        elif access.kind == "atomic":
            harmless = shadow.atomic[at]
        else:
            assert access.values is not None
            harmless = ~shadow.atomic[at] & (access.buffer.bytes[at] == access.values.reshape(-1))
        self._against_writer(access, shadow, at, thread, harmless)
        if access.kind == "read":
            old = ~self._unordered_readers(shadow, at, thread)
            _note_read(access, shadow, at, thread, self.order.block[thread], self.order.warp[thread], old)
        else:
            self._against_readers(access, shadow, at, thread)
            self._note_write(access, shadow, at, thread)

    def _keep(self, access: Access) -> None:
        threads = access.threads
        read = _Read(access, self.order.block[threads], self.order.warp[threads])
        self._unwritten.setdefault(access.buffer, []).append(read)
        self._kept += len(threads)

    def _shadow(self, buffer: Buffer) -> _Shadow:
        """Make a buffer's shadow, with the reads that were kept for it."""
        shadow = self._shadows[buffer] = _Shadow(buffer.size)
        for access, block, warp in self._unwritten.pop(buffer, []):
            at, thread = _bytes_of(access)
            block, warp = np.repeat(block, access.size), np.repeat(warp, access.size)
            _note_read(access, shadow, at, thread, block, warp, shadow.block_stamp[at] != block)
            self._kept -= len(access.threads)
        return shadow

    def _against_writer(
        self, access: Access, shadow: _Shadow, at: Array, thread: Array, harmless: Array
    ) -> None:
        writer = shadow.writer[at]
        other = (writer != _NONE) & (writer != thread) & ~harmless
        if not other.any():
            return
        blocks = writer // self.threads != thread // self.threads
        warps = writer // WARP != thread // WARP
        kind = f"{'write'}/{'read' if access.kind == 'read' else 'write'}"
        found: tuple[tuple[Scope, Array], ...] = (
            ("between blocks", blocks),
            (
                "between warps",
                ~blocks & warps & self.order.unordered(shadow.writer_block[at], writer, thread),
            ),
            ("within a warp", ~warps & (shadow.writer_warp[at] == self.order.warp[thread])),
        )
        for scope, mask in found:
            self._report(access, scope, kind, at, thread, other & mask, writer, shadow.writer_site[at])

    def _against_readers(self, access: Access, shadow: _Shadow, at: Array, thread: Array) -> None:
        block, warp = thread // self.threads, thread // WARP
        spans: tuple[tuple[Scope, Array, Array, Array, Array, int], ...] = (
            ("between blocks", shadow.high[at] != _NONE,
             shadow.low[at], shadow.high[at], block, self.threads),
            ("between warps", self._unordered_readers(shadow, at, thread),
             shadow.block_low[at], shadow.block_high[at], warp, WARP),
            ("within a warp", shadow.warp_stamp[at] == self.order.warp[thread],
             shadow.warp_low[at], shadow.warp_high[at], thread, 1),
        )  # fmt: skip
        for scope, current, low, high, mine, unit in spans:
            below, above = low // unit != mine, high // unit != mine
            mask = current & (below | above)
            if mask.any():
                reader = np.where(below, low, high)
                self._report(access, scope, "read/write", at, thread, mask, reader, shadow.reader_site[at])

    def _unordered_readers(self, shadow: _Shadow, at: Array, thread: Array) -> Array:
        """Tell which bytes were read in this interval; of a part's readers, the lowest and highest count."""
        stamp = shadow.block_stamp[at]
        low, high = shadow.block_low[at], shadow.block_high[at]
        return self.order.unordered(stamp, low, thread) | self.order.unordered(stamp, high, thread)

    def _note_write(self, access: Access, shadow: _Shadow, at: Array, thread: Array) -> None:
        shadow.writer[at] = thread
        shadow.writer_site[at] = access.instruction.index
        shadow.writer_block[at] = self.order.block[thread]
        shadow.writer_warp[at] = self.order.warp[thread]
        shadow.atomic[at] = access.kind == "atomic"
        last = shadow.writer[at]
        if access.values is None or not (last != thread).any():
            return
        # Several threads of this very instruction write one byte: harmless if all write the same value.
        values = access.values.reshape(-1)
        cells, inverse = np.unique(at, return_inverse=True)
        final = np.zeros(len(cells), np.uint8)
        final[inverse] = values
        clash = (last != thread) & (values != final[inverse])
        blocks = last // self.threads != thread // self.threads
        warps = last // WARP != thread // WARP
        site = shadow.writer_site[at]
        scopes: tuple[tuple[Scope, Array], ...] = (
            ("between blocks", blocks), ("between warps", ~blocks & warps), ("within a warp", ~warps),
        )  # fmt: skip
        for scope, mask in scopes:
            self._report(access, scope, "write/write", at, thread, clash & mask, last, site)

    def _report(
        self,
        access: Access,
        scope: Scope,
        kind: str,
        at: Array,
        thread: Array,
        mask: Array,
        other: Array,
        site: Array,
    ) -> None:
        hits = np.flatnonzero(mask)
        if not hits.size:
            return
        for index in np.unique(site[hits]).tolist():
            mine = hits[site[hits] == index]
            first = int(mine[0])
            key = (scope, kind, access.buffer.name, int(index), access.instruction.index)
            known = self._found.get(key)
            earlier, later = self._code[int(index)], access.instruction
            self._found[key] = Race(
                scope,
                kind,
                access.buffer.name,
                known.offset if known else int(at[first]) % (access.buffer.stride or access.buffer.size),
                known.earlier if known else self._party(earlier, int(other[first])),
                known.later if known else self._party(later, int(thread[first])),
                len(mine) + (known.count if known else 0),
            )

    def _party(self, instruction: Instruction, thread: int) -> Party:
        block, number = divmod(thread, self.threads)
        return Party(instruction.line, instruction.text, block, number)


def _bytes_of(access: Access) -> tuple[Array, Array]:
    """Return every byte of an access and the thread that touches it; threads ascend."""
    if access.size == 1:
        return access.offset, access.threads.astype(np.int32)
    at = (access.offset[:, None] + np.arange(access.size)).reshape(-1)
    return at, np.repeat(access.threads, access.size).astype(np.int32)


def _note_read(
    access: Access, shadow: _Shadow, at: Array, thread: Array, block: Array, warp: Array, old: Array
) -> None:
    """Widen the spans. Threads ascend, so of equal bytes the last one written is the highest.

    Args:
        old: bytes whose readers so far a barrier has ordered before this read.
    """
    shadow.reader_site[at] = access.instruction.index
    _widen(shadow.low, shadow.high, at, thread, None)
    _widen(shadow.block_low, shadow.block_high, at, thread, old)
    _widen(shadow.warp_low, shadow.warp_high, at, thread, shadow.warp_stamp[at] != warp)
    shadow.block_stamp[at], shadow.warp_stamp[at] = block, warp


def _widen(low: Array, high: Array, at: Array, thread: Array, fresh: Array | None) -> None:
    """Extend spans by ``thread``; where ``fresh``, the old span is over."""
    if fresh is not None:
        low[at[fresh]] = _NOBODY
        high[at[fresh]] = _NONE
    least = np.minimum(low[at], thread)
    most = np.maximum(high[at], thread)
    low[at[::-1]] = least[::-1]
    high[at] = most
