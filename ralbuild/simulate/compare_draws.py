"""Compares the `sample` kernel's PTX with the formulas of docs/kernels.md, one draw a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from ralbuild.contract.bans import BANNED, BanTable
from ralbuild.contract.bundle import Kernel
from ralbuild.simulate.buffers import Tables, arguments, slot_buffers, table_buffers
from ralbuild.simulate.compare import SLOTS, Comparison, Difference, guarded
from ralbuild.simulate.draws import Draw, draw
from ralbuild.simulate.lanes import Array
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.services import Observer
from ralbuild.simulate.session import Argument, Options, Session

_Wrong: TypeAlias = "tuple[str, str, str]"
TIE = 4e-6
"""Scores nearer than this, relative to their size, may change places: `exp`, `log` and fused multiply-adds
of a device and of NumPy may differ in the last bit (docs/kernels.md)."""


@dataclass(frozen=True, slots=True)
class DrawCase:
    """A row to draw from, and the slot's state before it."""

    logits: Array
    temperature: float
    top_p: float
    seed: int
    step: int
    ban_state: int
    done: int = 0
    top_k: int = 0
    min_p: float = 0.0
    ban_strict: int = 0


def compare_sample(
    module: Module,
    kernel: Kernel,
    tables: Tables,
    cases: Sequence[DrawCase],
    options: Options | None = None,
    slots: int = SLOTS,
    observers: Sequence[Observer] = (),
) -> Comparison:
    """Draw once for every case with the `sample` kernel; rows of logits must be of one length."""
    columns = len(cases[0].logits)
    slots = min(slots, len(cases))
    fixed = table_buffers(tables)
    state = slot_buffers(tables, slots, columns)
    bound = arguments(kernel, fixed | state)
    session = Session(module, kernel.entry, (slots, 1, 1), bound, options or Options(), observers)
    result = Comparison()
    for first in range(0, len(cases), slots):
        batch = cases[first : first + slots]
        _fill(state, batch)
        if not guarded(result, session.launch):
            break
        result.launches += 1
        result.cases += len(batch)
        for slot, case in enumerate(batch):
            difference = _check_draw(state, tables, slot, case, result)
            if difference is not None:
                wanted, found, name = difference
                result.difference = Difference(
                    first + slot, slot, case.step, 0, case.ban_state, name, wanted, found
                )
                break
        if result.difference is not None:
            break
    result.finish(session)
    return result


def _fill(state: dict[str, Argument], batch: Sequence[DrawCase]) -> None:
    names = (
        "temperature", "top_k", "top_p", "min_p", "seed", "step", "ban_state", "ban_strict", "done",
    )  # fmt: skip
    arrays = {name: state[name] for name in (*names, "logits", "ban_events", "draw_event")}
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray)
        array[:] = 1 if name == "done" else 0
    for slot, case in enumerate(batch):
        for name in names:
            array = arrays[name]
            assert isinstance(array, np.ndarray)
            array[slot] = getattr(case, name)
        logits = arrays["logits"]
        assert isinstance(logits, np.ndarray)
        logits[slot] = case.logits


def _check_draw(
    state: dict[str, Argument], tables: Tables, slot: int, case: DrawCase, result: Comparison
) -> _Wrong | None:
    """Return (wanted, found, buffer) of the first difference of a slot."""

    def found(name: str) -> int:
        array = state[name]
        assert isinstance(array, np.ndarray)
        return int(array[slot])

    row = state["logits"]
    assert isinstance(row, np.ndarray)
    if case.done:
        wanted = {"token": -1, "ban_state": case.ban_state, "ban_events": 0, "step": case.step}
        return _first_wrong(wanted, found) or _wrong_row(row[slot], case.logits)
    drawn = draw(_draw_of(case, tables), partial(_legal, tables, case))
    token = found("token")
    if token != drawn.token and _tied(drawn.scores, token, drawn.token):
        result.ties += 1
        return None
    moved = case.ban_state
    if drawn.event < 2 and drawn.token not in tables.eos_ids:
        moved = _walk(tables.bans, moved, tables.vocab[drawn.token])
    wanted = {
        "token": drawn.token,
        "ban_state": moved,
        "ban_events": drawn.refused,
        "draw_event": drawn.event,
        "step": case.step + 1,
    }
    result.tokens += 1
    logits = case.logits
    if drawn.legal is not None:
        logits = logits.copy()
        logits[: len(drawn.legal)][~drawn.legal] = -np.inf
    return _first_wrong(wanted, found) or _wrong_row(row[slot], logits)


def _draw_of(case: DrawCase, tables: Tables) -> Draw:
    return Draw(
        case.logits,
        len(tables.vocab),
        case.temperature,
        case.top_p,
        case.seed,
        case.step,
        tables.eos_ids[0],
        case.top_k,
        case.min_p,
        bool(case.ban_strict),
    )


def _first_wrong(wanted: Mapping[str, int], found: Callable[[str], int]) -> _Wrong | None:
    for name, value in wanted.items():
        if found(name) != value:
            return str(value), str(found(name)), name
    return None


def _wrong_row(found: Array, wanted: Array) -> _Wrong | None:
    """Compare a row bit for bit: what is masked is minus infinity, all else is as it was."""
    wrong = np.flatnonzero(found.view(np.uint32) != wanted.view(np.uint32))
    if not len(wrong):
        return None
    at = int(wrong[0])
    return f"{wanted[at]} for id {at}", str(found[at]), "logits"


def _legal(tables: Tables, case: DrawCase, token: int) -> bool:
    """Tell whether a token may come next: an end where a text may end, text that completes no phrase."""
    if token in tables.eos_ids:
        return bool(tables.bans.accepts[case.ban_state])
    data = tables.vocab[token]
    return _walk(tables.bans, case.ban_state, data) != BANNED and (bool(data) or not case.ban_strict)


def _walk(bans: BanTable, state: int, data: bytes) -> int:
    """Return the ban automaton's state after the bytes of a token."""
    for byte in data:
        if state != BANNED:
            state = bans.trans[state * bans.classes + bans.cls[byte]]
    return state


def _tied(scores: Array, one: int, other: int) -> bool:
    if not (0 <= one < len(scores) and 0 <= other < len(scores)):
        return False
    a, b = float(scores[one]), float(scores[other])
    return abs(a - b) <= TIE * max(1.0, abs(a), abs(b))
