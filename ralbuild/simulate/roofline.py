"""An estimate, and no more than that, of how long a launch takes: three bounds, none of them measured.

Published figures of one board an architecture; caches, latencies and what else runs are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

ISSUE_PER_CYCLE = 4
"""Warp instructions that a multiprocessor issues in a cycle."""
DEPENDENT_CYCLES = 4
"""Cycles between an instruction and one that needs its result, at least."""


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU: multiprocessors, boost clock in Hz, memory bandwidth in bytes a second."""

    name: str
    processors: int
    clock: float
    bandwidth: float


BOARDS = {
    "sm_80": Board("A100 40 GB", 108, 1.41e9, 1.555e12),
    "sm_86": Board("A10", 72, 1.695e9, 0.6e12),
    "sm_89": Board("L40S", 142, 2.52e9, 0.864e12),
    "sm_90": Board("H100 SXM", 132, 1.98e9, 3.35e12),
}
"""From the vendor's data sheets."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Least microseconds of one launch on a board, by what could bind it.

    Attributes:
        memory: every byte of every touched sector comes from device memory.
        issue: the busy multiprocessors issue every cycle.
        chain: a warp's instructions wait for one another.
    """

    board: str
    memory: float
    issue: float
    chain: float

    @property
    def bound(self) -> str:
        """The largest of the three."""
        return max(("memory", "issue", "chain"), key=lambda name: float(getattr(self, name)))


def estimate(arch: str, blocks: int, warps: int, instructions: float, sector_bytes: float) -> Estimate | None:
    """Return the estimate for one launch; None for an architecture without figures.

    Args:
        blocks, warps: of the grid.
        instructions: warp instructions of the launch.
        sector_bytes: bytes of the sectors that it touches in global memory.
    """
    board = BOARDS.get(arch)
    if board is None:
        return None
    busy = min(board.processors, blocks)
    return Estimate(
        board.name,
        1e6 * sector_bytes / board.bandwidth,
        1e6 * instructions / (busy * ISSUE_PER_CYCLE * board.clock),
        1e6 * instructions / max(1, warps) * DEPENDENT_CYCLES / board.clock,
    )
