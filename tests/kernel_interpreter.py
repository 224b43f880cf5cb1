"""Runs the built-in Triton kernels on CPU arrays, in a process of its own.

TRITON_INTERPRET must be set before Triton is imported, and must not leak into the process that runs
the other tests; so one spawned child serves all launches.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.interpreter import ReduceOps

    ReduceOps.generic_reduce = _reduce_by_halves


def _reduce_by_halves(self: Any, rows: Any) -> list[Any]:
    """Combine whole halves, where Triton's interpreter combines one element after another in Python."""
    data = [row.handle.data for row in rows]
    while len(data[0]) > 1:
        half = len(data[0]) // 2
        first = [self.to_tensor(part[:half], row.dtype) for part, row in zip(data, rows, strict=True)]
        second = [self.to_tensor(part[half:], row.dtype) for part, row in zip(data, rows, strict=True)]
        data = [part.handle.data for part in self.combine_fn.fn(*first, *second)]
    return [self.to_tensor(part[0], row.dtype) for part, row in zip(data, rows, strict=True)]


def _launch(name: str, grid: int, args: dict[str, Any], constants: dict[str, int]) -> dict[str, np.ndarray]:
    import torch

    kernel = getattr(importlib.import_module(f"ralbuild.kernels.{name}"), name)
    bound = {
        key: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for key, value in args.items()
    }
    kernel[(grid,)](**bound, **constants)
    return {key: value.numpy() for key, value in bound.items() if hasattr(value, "numpy")}


class Interpreter:
    """``launch`` returns the arrays as the kernel left them; its arguments stay as they were."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def launch(
        self, name: str, grid: int, args: dict[str, Any], constants: dict[str, int]
    ) -> dict[str, np.ndarray]:
        return self.pool.submit(_launch, name, grid, args, constants).result()


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_interpret) as pool:
        yield Interpreter(pool)
