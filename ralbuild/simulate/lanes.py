"""Registers of many threads as NumPy arrays: one element a lane, warps in rows of 32.

A register is one array for the life of a machine and is written in place, so each instruction is bound
once to the views it reads and writes. A b32 register read as f32 is another view of the same bytes, and
its low half another still; x86 and ARM are little-endian, as GPUs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]

WARP = 32

DTYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64,
    "f16x2": np.uint32, "bf16x2": np.uint32, "pred": np.bool_,
}  # fmt: skip
"""Lane type of each PTX type; bfloat16 and packed types are kept as bits."""


class Lanes:
    """A set of lanes that run together."""

    __slots__ = ("_index", "_warps", "count", "full", "mask")

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask))
        self.full = self.count == len(mask)
        """True when every lane takes part."""
        self._index: NDArray[np.intp] | None = None
        self._warps = -1

    @property
    def index(self) -> NDArray[np.intp]:
        """The numbers of the lanes, ascending."""
        if self._index is None:
            self._index = self.mask.nonzero()[0]
        return self._index

    @property
    def warps(self) -> int:
        """Warps with a lane in the set."""
        if self._warps < 0:
            self._warps = int(np.count_nonzero(self.mask.reshape(-1, WARP).any(axis=1)))
        return self._warps

    def __or__(self, other: Lanes) -> Lanes:
        return Lanes(self.mask | other.mask)


@dataclass(frozen=True, slots=True)
class Step:
    """One bound instruction.

    Attributes:
        full: does it in all lanes.
        part: does it in some lanes.
    """

    full: Callable[[], object]
    part: Callable[[Lanes], object]


def write(target: Array, compute: Callable[[], Array]) -> Step:
    """Return a step that computes in all lanes and writes those that take part."""

    def full() -> None:
        np.copyto(target, compute(), casting="unsafe")

    def part(lanes: Lanes) -> None:
        np.copyto(target, compute(), casting="unsafe", where=lanes.mask)

    return Step(full, part)


def copy(target: Array, source: Array) -> Step:
    """Return a step that moves ``source``, converting whole numbers as C does."""
    move = partial(np.copyto, target, source, casting="unsafe")
    return Step(move, lambda lanes: move(where=lanes.mask))


def ufunc(function: np.ufunc, target: Array, *sources: Array, dtype: type[np.generic] | None = None) -> Step:
    """Return a step that runs one NumPy function, in place when all lanes take part.

    Args:
        dtype: compute in this type, wider than the sources.
    """
    keywords = {} if dtype is None else {"dtype": dtype}
    compute: Callable[..., Array] = partial(function, *sources, **keywords)
    # A temporary and a masked copy: NumPy's own `where=` is several times slower.
    return Step(
        partial(function, *sources, out=target, **keywords),
        lambda lanes: np.copyto(target, compute(), where=lanes.mask),
    )
