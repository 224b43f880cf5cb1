"""Device memory that the model and the patch's kernels share: one piece, named arrays in it.

It is taken before any capture and has the sizes of the largest graph. A smaller graph uses the first
rows of the same arrays, so addresses that were captured stay true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes, for each array: more than any hint that a kernel is compiled with."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Element type and shape."""


class Pool:
    """Named arrays, zero at first."""

    def __init__(self, arrays: Mapping[str, Kind], place: torch.device) -> None:
        """Take the memory; an empty array still gets an address of its own."""
        sizes = {name: _size(kind) for name, kind in arrays.items()}
        self.size = sum(sizes.values())
        memory = torch.zeros(self.size + ALIGNMENT, dtype=torch.uint8, device=place)
        at = -memory.data_ptr() % ALIGNMENT
        self.tensors: dict[str, Tensor] = {}
        self.addresses: dict[str, int] = {}
        for name, (dtype, shape) in arrays.items():
            used = math.prod(shape) * dtype.itemsize
            self.tensors[name] = memory[at : at + used].view(dtype).view(shape)
            self.addresses[name] = memory.data_ptr() + at
            at += sizes[name]


def _size(kind: Kind) -> int:
    dtype, shape = kind
    used = max(math.prod(shape) * int(dtype.itemsize), 1)
    return -(-used // ALIGNMENT) * ALIGNMENT
