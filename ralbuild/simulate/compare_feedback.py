"""Compares the PTX of `penalize` and `feedback` with plain NumPy, one case a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ralbuild.contract.buffers import BIAS_ROOM, COUNT_MASK, PROMPT_FLAG
from ralbuild.contract.bundle import Kernel
from ralbuild.simulate.buffers import Tables, arguments, slot_buffers, table_buffers
from ralbuild.simulate.compare import Comparison, Difference, guarded
from ralbuild.simulate.lanes import Array
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.services import Observer
from ralbuild.simulate.session import Argument, Options, Session

_Arrays: TypeAlias = dict[str, Array]
_SIZES = {"penalize": (16, 4500), "feedback": (1000, 60)}
"""Slots, and tokens at most: rows of two whole passes and a part of one; all lanes of `feedback` but 24."""
_ULPS = 2.0**-22
"""Difference, relative to the numbers that are added, that fused multiply-adds may make."""


def compare_around(
    module: Module,
    kernel: Kernel,
    tables: Tables,
    launches: int,
    seed: int,
    options: Options | None = None,
    observers: Sequence[Observer] = (),
    slots: int = 0,
) -> Comparison:
    """Run `penalize` or `feedback` over random slots, the state of the last launch kept.

    Args:
        slots: 0 for the usual number.
    """
    rng = np.random.default_rng(seed)
    usual, most = _SIZES[kernel.name]
    slots = slots or usual
    size = min(len(tables.vocab), most)
    state: dict[str, Argument] = table_buffers(tables) | slot_buffers(tables, slots, size + 5)
    state["tokenizer_size"] = size
    own = {param.buffer for param in kernel.params}
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    feedback = kernel.name == "feedback"
    grid = (1 if feedback else slots, 1, 1)
    session = Session(module, kernel.entry, grid, arguments(kernel, state), options or Options(), observers)
    result = Comparison()
    for number in range(launches):
        _fill(arrays, rng, size)
        wanted = {name: array.copy() for name, array in arrays.items() if name in own}
        (_feed_back if feedback else _penalise)(wanted, size)
        if not guarded(result, session.launch):
            break
        result.launches += 1
        result.cases += slots
        result.difference = _first_difference(arrays, wanted, number)
        if result.difference is not None:
            break
    result.finish(session)
    return result


def _fill(arrays: _Arrays, rng: np.random.Generator, size: int) -> None:
    """Fill every slot at random; bias ids differ, and no token and both edges of the row are among them."""
    slots, columns = arrays["logits"].shape
    arrays["logits"][:] = rng.standard_normal((slots, columns)) * 4
    some = rng.random((slots, columns)) < 0.1
    arrays["counts"][some] = rng.choice([1, 2, 7, PROMPT_FLAG, PROMPT_FLAG + 3, 0x7FFF], int(some.sum()))
    arrays["repetition_penalty"][:] = rng.choice([1.0, 1.3, 0.7], slots)
    arrays["presence_penalty"][:] = rng.choice([0.0, 0.5, -2.0], slots)
    arrays["frequency_penalty"][:] = rng.choice([0.0, 0.25], slots)
    edges = [-1, 0, size - 1, size]
    others = np.setdiff1d(np.arange(size + BIAS_ROOM), edges)
    for slot in range(slots):
        some_ids = rng.choice(others, BIAS_ROOM - len(edges), replace=False)
        arrays["bias_ids"][slot] = rng.permutation(np.append(some_ids, edges))
    arrays["bias_values"][:] = rng.choice([-100.0, -1.5, 0.25, 3.0], (slots, BIAS_ROOM))
    arrays["bias_count"][:] = rng.choice([0, 1, 40, BIAS_ROOM - 1, BIAS_ROOM], slots)
    arrays["done"][:] = rng.random(slots) < 0.2
    arrays["token"][:] = rng.integers(-1, size, slots)
    strange = np.flatnonzero(rng.random(slots) < 0.1)  # no token of the row
    arrays["token"][strange] = rng.choice([columns, columns + 1], len(strange))
    arrays["fst_state"][:] = rng.choice([-1, 0, 3], slots)
    arrays["step"][:] = rng.integers(1, 5, slots)
    arrays["max_steps"][:] = rng.integers(1, 9, slots)
    arrays["ban_events"][:] = rng.integers(0, 17, slots)
    arrays["draw_event"][:] = rng.integers(0, 3, slots)


def _penalise(arrays: _Arrays, size: int) -> None:
    for slot in np.flatnonzero(arrays["done"] == 0):
        row, counts = arrays["logits"][slot], arrays["counts"][slot, :size].astype(np.int32)
        for at in range(int(arrays["bias_count"][slot])):
            token = arrays["bias_ids"][slot, at]
            if 0 <= token < size:
                row[token] += arrays["bias_values"][slot, at]
        seen, drawn = np.flatnonzero(counts), counts & COUNT_MASK
        value, repetition = row[seen], arrays["repetition_penalty"][slot]
        value = np.where(value > 0, value / repetition, value * repetition)
        value = value - arrays["frequency_penalty"][slot] * drawn[seen].astype(np.float32)
        row[seen] = np.where(drawn[seen] > 0, value - arrays["presence_penalty"][slot], value)


def _feed_back(arrays: _Arrays, _size: int) -> None:
    active = (arrays["token"] >= 0) & (arrays["done"] == 0)
    last = active & ((arrays["fst_state"] < 0) | (arrays["step"] >= arrays["max_steps"]))
    arrays["input_id"][active] = arrays["token"][active]
    arrays["position"][active] += 1
    for slot in np.flatnonzero(active):
        token = arrays["token"][slot]
        row = arrays["counts"][slot]
        if token < len(row) and row[token] & COUNT_MASK < COUNT_MASK:
            row[token] += 1
    arrays["done"][last] = 1
    event = arrays["draw_event"][active]
    arrays["counters"] += [
        1, active.sum(), last.sum(), arrays["ban_events"][active].sum(), (event > 0).sum(), (event > 1).sum(),
    ]  # fmt: skip


def _first_difference(found: _Arrays, wanted: _Arrays, launch: int) -> Difference | None:
    for name in sorted(wanted):
        one, other = found[name], wanted[name]
        near = _ULPS * (np.abs(other) + 128) if name == "logits" else 0
        wrong = np.argwhere(np.abs(one.astype(np.float64) - other) > near)
        if len(wrong):
            at = tuple(int(index) for index in wrong[0])
            slot = at[0]
            return Difference(
                launch * len(other) + slot, slot, launch, 0, 0, name, f"{other[at]} at {at}", f"{one[at]}"
            )
    return None
