"""State spaces of memory, each access checked for bounds and alignment.

Global buffers are NumPy arrays bound in place, with unmapped gaps between them, so an address that
leaves its buffer lies in no other one. Shared memory exists once a block, local memory once a thread.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ralbuild.simulate.lanes import Array

FIRST_ADDRESS = 0x7F00_0000_0000
GAP = 1 << 20
SHARED_BASE = 1024
"""Address of the first shared byte in a block's own space; 0 is a null pointer."""
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
"""Where generic addresses of these spaces begin."""
_WINDOW_SIZE = 1 << 32


class Buffer:
    """Bytes that instructions can reach; ``stride`` is the size of a block's or thread's own part, else 0."""

    __slots__ = ("_views", "base", "bytes", "name", "size", "stride")

    def __init__(self, name: str, base: int, data: Array, stride: int = 0) -> None:
        self.name = name
        self.stride = stride
        self.base = base
        self.bytes: Array = data.reshape(-1).view(np.uint8)
        self.size = self.bytes.size
        self._views: dict[tuple[str, int], Array] = {}

    def view(self, dtype: np.dtype[np.generic], count: int) -> Array:
        """Return the bytes as rows of ``count`` elements, shape [rows, count]."""
        key = (dtype.char, count)
        found = self._views.get(key)
        if found is None:
            row = dtype.itemsize * count
            found = self.bytes[: self.size // row * row].view(dtype).reshape(-1, count)
            self._views[key] = found
        return found


class Piece(NamedTuple):
    """Some lanes of one access.

    Attributes:
        buffer: where they go.
        offset: byte offset in it, a multiple of the access size, int64 per lane.
        chosen: positions among the access's lanes; None for all of them.
    """

    buffer: Buffer
    offset: Array
    chosen: Array | None


class BadAddress(NamedTuple):
    """The first lane of an access that must not happen."""

    position: int
    misaligned: bool
    detail: str


class Space(Protocol):
    """A state space: finds where addresses lie."""

    def locate(self, site: Site, address: Array, lanes: Array) -> list[Piece] | BadAddress:
        """Check every lane's address and return where it lies."""


@dataclass(slots=True)
class Site:
    """What one instruction always does: bytes a lane; and the buffer that it met last."""

    size: int
    last: Buffer | None = None


def _aligned_within(offset: Array, size: int, limit: int) -> bool:
    """Tell whether all offsets are multiples of ``size`` and leave room for it below ``limit``."""
    if limit < size:
        return False
    inside = int(offset.max()) <= limit - size
    return inside and (size == 1 or not int(np.bitwise_or.reduce(offset)) & (size - 1))


class GlobalMemory:
    """The buffers of a launch, by address."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._bases: list[int] = []
        self._next = FIRST_ADDRESS

    def bind(self, array: Array, name: str) -> int:
        """Make an array reachable and return its address, a multiple of 512.

        Raises:
            ValueError: when the array is not contiguous.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: the array must be contiguous")
        buffer = Buffer(name, self._next, array)
        self.buffers.append(buffer)
        self._bases.append(buffer.base)
        self._next += -(-(buffer.size + GAP) // 512) * 512
        return buffer.base

    def locate(self, site: Site, address: Array, lanes: Array) -> list[Piece] | BadAddress:  # noqa: ARG002
        """See `Space`."""
        buffer = site.last
        if buffer is None:
            buffer = self._below(int(address[0]))
            site.last = buffer
        if buffer is not None:
            offset = address - np.uint64(buffer.base)
            if _aligned_within(offset, site.size, buffer.size):
                return [Piece(buffer, offset.view(np.int64), None)]
        return self._slowly(site, address)

    def _below(self, address: int) -> Buffer | None:
        index = bisect_right(self._bases, address) - 1
        return self.buffers[index] if index >= 0 else None

    def _slowly(self, site: Site, address: Array) -> list[Piece] | BadAddress:
        """Sort lanes by buffer; the first bad one ends it."""
        groups: dict[int, list[int]] = {}
        for position, at in enumerate(address.tolist()):
            index = bisect_right(self._bases, at) - 1
            buffer = self.buffers[index] if index >= 0 else None
            if buffer is None or at + site.size > buffer.base + buffer.size:
                return BadAddress(position, False, f"{site.size} bytes at {at:#x}, {self._where(at)}")
            if at % site.size:
                return BadAddress(position, True, f"{site.size} bytes at {at:#x}, {self._where(at)}")
            groups.setdefault(index, []).append(position)
        pieces = []
        for index, positions in groups.items():
            buffer = self.buffers[index]
            chosen = np.array(positions)
            offset = (address[chosen] - np.uint64(buffer.base)).view(np.int64)
            pieces.append(Piece(buffer, offset, None if len(groups) == 1 else chosen))
        site.last = pieces[0].buffer
        return pieces

    def _where(self, address: int) -> str:
        buffer = self._below(address)
        if buffer is None:
            return "a null pointer" if address < 1 << 16 else "below every buffer"
        offset = address - buffer.base
        if offset < buffer.size:
            return f"byte {offset} of {buffer.name!r} ({buffer.size} bytes)"
        after = next((other for other in self.buffers if other.base > address), None)
        if after is not None and after.base - address <= GAP // 2:
            return f"{after.base - address} bytes before {after.name!r}"
        return f"{offset - buffer.size} bytes past the end of {buffer.name!r} ({buffer.size} bytes)"


class BlockMemory:
    """A space that every block (shared) or thread (local) has its own of; ``row`` maps a lane to its part."""

    def __init__(self, name: str, base: int, size: int, row: Array) -> None:
        self.base = base
        self.size = size
        self.row = row.astype(np.int64)
        self.stride = -(-size // 16) * 16
        rows = int(self.row.max()) + 1 if len(row) else 0
        self.buffer = Buffer(name, base, np.zeros(rows * self.stride, np.uint8), self.stride)

    def locate(self, site: Site, address: Array, lanes: Array) -> list[Piece] | BadAddress:
        """See `Space`."""
        offset = address - np.uint64(self.base)
        if not _aligned_within(offset, site.size, self.size):
            return self._bad(site, address)
        return [Piece(self.buffer, offset.view(np.int64) + self.row[lanes] * self.stride, None)]

    def _bad(self, site: Site, address: Array) -> BadAddress:
        for position, at in enumerate(address.tolist()):
            outside = not self.base <= at <= self.base + self.size - site.size
            if outside or (at - self.base) % site.size:
                where = f"{self.buffer.name} byte {at - self.base} of {self.size}"
                return BadAddress(position, not outside, f"{site.size} bytes at {where}")
        raise AssertionError("no lane is bad")


class GenericMemory:
    """Addresses without a space: windows of shared and local memory, and global memory."""

    def __init__(self, memory: GlobalMemory, shared: BlockMemory, local: BlockMemory) -> None:
        self._global = memory
        self._windows: tuple[tuple[int, BlockMemory], ...] = ((SHARED_WINDOW, shared), (LOCAL_WINDOW, local))

    def locate(self, site: Site, address: Array, lanes: Array) -> list[Piece] | BadAddress:
        """See `Space`."""
        rest = np.ones(len(address), bool)
        pieces: list[Piece] = []
        for window, space in self._windows:
            inside = (address >= np.uint64(window)) & (address < np.uint64(window + _WINDOW_SIZE))
            if inside.any():
                rest &= ~inside
                found = self._part(space, site, address - np.uint64(window), lanes, inside)
                if isinstance(found, BadAddress):
                    return found
                pieces += found
        if rest.any():
            found = self._part(self._global, site, address, lanes, rest)
            if isinstance(found, BadAddress):
                return found
            pieces += found
        return pieces

    @staticmethod
    def _part(
        space: Space, site: Site, address: Array, lanes: Array, inside: Array
    ) -> list[Piece] | BadAddress:
        chosen = np.flatnonzero(inside)
        found = space.locate(site, address[chosen], lanes[chosen])
        if isinstance(found, BadAddress):
            return found._replace(position=int(chosen[found.position]))
        return [
            Piece(piece.buffer, piece.offset, chosen if piece.chosen is None else chosen[piece.chosen])
            for piece in found
        ]
