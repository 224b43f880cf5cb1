"""Memory traffic by line: bytes, sectors, uncoalesced accesses, bank conflicts; and an estimate from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ralbuild.simulate.lanes import WARP, Array
from ralbuild.simulate.memory import Buffer
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.services import Access

SECTOR = 32
"""Bytes that a GPU moves between its caches at least."""
BANKS = 32
"""Banks of shared memory, 4 bytes wide each."""


@dataclass(slots=True)
class Traffic:
    """What one instruction moved.

    Attributes:
        requests: times that a warp executed it.
        bytes: asked for by threads.
        sectors: 32-byte sectors touched in global memory, counted a warp.
        ideal: sectors that as many distinct bytes need at least.
        scattered: times that a warp touched more sectors than it needed.
        conflicts: further turns that a warp's shared access takes because lanes meet in a bank.
    """

    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    ideal: int = 0
    scattered: int = 0
    conflicts: int = 0

    def add(self, other: Traffic) -> None:
        """Add what another instruction moved."""
        for name in ("requests", "bytes", "sectors", "ideal", "scattered", "conflicts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Profile:
    """Traffic by line of the PTX, with the text of each line, and how many launches it covers."""

    launches: int
    lines: dict[int, tuple[str, Traffic]]

    @property
    def global_bytes(self) -> int:
        """Bytes of the sectors touched, all launches."""
        return SECTOR * sum(traffic.sectors for _, traffic in self.lines.values())

    @property
    def conflicts(self) -> int:
        """Bank conflicts, all launches."""
        return sum(traffic.conflicts for _, traffic in self.lines.values())


@dataclass(slots=True)
class Profiler:
    """An observer that counts traffic."""

    lines: dict[int, Traffic] = field(default_factory=dict)

    def access(self, access: Access) -> None:
        """Count an access; see `Observer`."""
        traffic = self.lines.setdefault(access.instruction.line, Traffic())
        warp = access.threads // WARP
        traffic.requests += len(np.unique(warp))
        traffic.bytes += access.size * len(warp)
        if access.space == "global":
            sectors = _counts(warp, (access.buffer.base + access.offset) // SECTOR)
            ideal = -(-_counts(warp, access.offset) * access.size // SECTOR)
            traffic.sectors += int(sectors.sum())
            traffic.ideal += int(ideal.sum())
            traffic.scattered += int(np.count_nonzero(sectors > ideal))
        else:
            traffic.conflicts += _conflicts(access, warp)

    def emptied(self, buffer: Buffer) -> None:
        """Nothing is remembered of buffers; see `Observer`."""

    def synchronized(self, threads: Array, *, block: bool) -> None:
        """Barriers move no bytes; see `Observer`."""

    def arrived(self, threads: Array) -> None:
        """See `synchronized`."""

    def joined(self, waiting: Array, arrived: Array) -> None:
        """See `synchronized`."""

    def result(self, module: Module, entry: str, launches: int) -> Profile:
        """Return the traffic of every line that had any."""
        function = module.entry(entry)
        texts = {item.line: item.text for item in function.code} if function else {}
        lines = {line: (texts.get(line, ""), self.lines[line]) for line in sorted(self.lines)}
        return Profile(launches, lines)


def _counts(warp: Array, values: Array) -> Array:
    """Return how many distinct values each warp has, in the order of warps."""
    distinct = np.unique(np.stack([warp, values]), axis=1)
    counts: Array = np.unique(distinct[0], return_counts=True)[1]
    return counts


def _conflicts(access: Access, warp: Array) -> int:
    """Count turns beyond the first: in one turn each bank serves one word to any number of lanes."""
    words = np.unique(np.stack([warp, access.offset // 4]), axis=1)
    banks = words[0] * BANKS + words[1] % BANKS
    which, counts = np.unique(banks, return_counts=True)
    turns = np.zeros(int(which.max() // BANKS) + 1, np.int64)
    np.maximum.at(turns, which // BANKS, counts)
    needed = max(1, access.size // 4)  # a lane's 8 or 16 bytes take a turn for each word at least
    return int(np.sum(np.maximum(turns[turns > 0] - needed, 0)))
