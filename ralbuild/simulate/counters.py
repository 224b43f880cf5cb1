"""How often instructions ran."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ralbuild.simulate.ptx.model import Instruction

if TYPE_CHECKING:
    from ralbuild.simulate.machine import Bound


@dataclass(frozen=True, slots=True)
class Counters:
    """What a session executed.

    Attributes:
        groups: instructions as the simulator executed them, once a group of lanes.
        warps: instructions as warps issue them.
        threads: instructions times active threads.
        by_line: line of the PTX to warp instructions.
        by_name: instruction with its modifiers to warp instructions.
    """

    groups: int
    warps: int
    threads: int
    by_line: dict[int, int]
    by_name: dict[str, int]


def count(bounds: Iterable[Bound]) -> Counters:
    """Add up the blocks of machines that ran the same function."""
    groups = warps = threads = 0
    by_line: dict[int, int] = {}
    by_name: dict[str, int] = {}
    for bound in bounds:
        code: list[Instruction] = [*bound.block.code, *([bound.block.leave] if bound.block.leave else [])]
        groups += bound.groups * len(code)
        warps += bound.warps * len(code)
        threads += bound.lanes * len(code)
        for item in code:
            if bound.warps:
                by_line[item.line] = by_line.get(item.line, 0) + bound.warps
                by_name[item.name] = by_name.get(item.name, 0) + bound.warps
    return Counters(groups, warps, threads, by_line, dict(sorted(by_name.items())))
