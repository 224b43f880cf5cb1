"""Rows of warp-wide instructions, of barriers and branches, and of what changes no value.

A warp-wide instruction runs when all lanes that it names have arrived; the machine sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import WARP, Array, Lanes, Mask, Step
from ralbuild.simulate.ptx.model import Immediate, Instruction, Operand, Pair, Sink
from ralbuild.simulate.semantics.select import third_operand
from ralbuild.simulate.semantics.table import Mods, row

_SECTION = "Parallel Synchronization and Communication Instructions"
_CONTROL = "Control Flow Instructions"


def _rows(values: Array, mask: Mask | None, absent: object) -> Array:
    """Return warps as rows, lanes that do not take part replaced."""
    kept: Array = values if mask is None else np.where(mask, values, values.dtype.type(absent))
    return kept.reshape(-1, WARP)


def _spread(rows: Array) -> Array:
    """Return one value a warp in each of its lanes."""
    return np.repeat(rows, WARP)


def _step(target: Array, compute: Callable[[Mask | None], Array]) -> Step:
    def part(lanes: Lanes) -> None:
        np.copyto(target, compute(lanes.mask), where=lanes.mask)

    return Step(lambda: np.copyto(target, compute(None)), part)


def shuffle_source(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """Return the lane that each lane of a warp reads, and whether that is in range (ISA's own formula)."""
    count, segment, clamp = b & 31, (c >> 8) & 31, c & 31
    low = lane & segment
    most = low | (clamp & ~segment & 31)
    if mode == "up":
        chosen = lane - count
        inside = chosen >= most
    elif mode == "down":
        chosen = lane + count
        inside = chosen <= most
    elif mode == "bfly":
        chosen = lane ^ count
        inside = chosen <= most
    else:
        chosen = low | (count & ~segment & 31)
        inside = chosen <= most
    return np.where(inside, chosen, lane), inside


@row(
    "shfl.sync.mode.b32", "Data Movement and Conversion Instructions: shfl.sync", "5", mode="up down bfly idx"
)
def _shuffle(b: Binder, i: Instruction, m: Mods) -> Step:
    first = i.operands[0]
    result, valid = (first.first, first.second) if isinstance(first, Pair) else (first, Sink())
    target, predicate = b.target(result, "b32"), b.target(valid, "pred")
    source, count, clamp = (b.source(item, "b32") for item in i.operands[1:4])
    numbers = b.services.numbers
    lane, warp = numbers % WARP, numbers // WARP * WARP
    mode = m["mode"]

    def where() -> tuple[Array, Array]:
        chosen, inside = shuffle_source(mode, lane, count.astype(np.int64), clamp.astype(np.int64))
        return warp + chosen, inside

    fixed = where() if all(isinstance(item, Immediate) for item in i.operands[2:4]) else None

    def full() -> None:
        chosen, inside = fixed or where()
        np.copyto(target, source.take(chosen))
        np.copyto(predicate, inside)

    def part(lanes: Lanes) -> None:
        mask = lanes.mask
        chosen, inside = fixed or where()
        absent = mask & ~mask[chosen]
        if absent.any():
            at = int(absent.argmax())
            detail = f"reads lane {int(lane[chosen[at]])}, which does not take part"
            raise b.services.fault("inactive lane", detail, i, at)
        np.copyto(target, source.take(chosen), where=mask)
        np.copyto(predicate, inside, where=mask)

    return Step(full, part)


@row("vote.sync.mode.pred", f"{_SECTION}: vote.sync", "3", mode="all any uni")
@row("vote.sync.mode.b32", f"{_SECTION}: vote.sync", "3", mode="ballot")
def _vote(b: Binder, i: Instruction, m: Mods) -> Step:
    chosen = third_operand(b, i.operands[1])
    mode = m["mode"]
    target = b.target(i.operands[0], "b32" if mode == "ballot" else "pred")

    def compute(mask: Mask | None) -> Array:
        p = chosen()
        if mode == "ballot":
            return _ballot(_rows(p, mask, False))
        every: Array = np.asarray(_rows(p, mask, True).all(axis=1))
        some: Array = np.asarray(_rows(p, mask, False).any(axis=1))
        return _spread({"all": every, "any": some, "uni": every | ~some}[mode])

    return _step(target, compute)


def _ballot(rows: Array) -> Array:
    return _spread(np.packbits(rows, axis=1, bitorder="little").view(np.uint32)[:, 0])


@row("activemask.b32", f"{_SECTION}: activemask", "1")
def _active(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    everyone = np.ones(b.lanes, bool)
    return _step(b.target(i.operands[0], "b32"), lambda mask: _ballot(_rows(everyone, mask, False)))


_REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@row("redux.sync.op.type", f"{_SECTION}: redux.sync", "3", op="add min max", type="u32 s32")
@row("redux.sync.op.type", f"{_SECTION}: redux.sync", "3", op="and or xor", type="b32")
def _redux(b: Binder, i: Instruction, m: Mods) -> Step:
    source = b.source(i.operands[1], m["type"])
    limits = np.iinfo(source.dtype)
    absent = {"min": limits.max, "max": limits.min, "and": limits.max}.get(m["op"], 0)
    reduce = partial(_REDUCTIONS[m["op"]].reduce, axis=1, dtype=source.dtype)
    return _step(
        b.target(i.operands[0], m["type"]), lambda mask: _spread(reduce(_rows(source, mask, absent)))
    )


@row("match.any.sync.type", f"{_SECTION}: match.sync", "3", type="b32 b64")
def _match(b: Binder, i: Instruction, m: Mods) -> Step:
    source = b.source(i.operands[1], m["type"])
    everyone = np.ones(b.lanes, bool)

    def compute(mask: Mask | None) -> Array:
        rows = source.reshape(-1, WARP)
        same = rows[:, :, None] == rows[:, None, :]
        same = same & _rows(everyone, mask, False)[:, None, :]
        return np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1)

    return _step(b.target(i.operands[0], "b32"), compute)


@row("elect.sync", f"{_SECTION}: elect.sync", "2")
def _elect(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    """The ISA leaves open which lane is elected; here it is the first."""
    first = i.operands[0]
    if not isinstance(first, Pair):
        raise ValueError("elect.sync needs d|p")
    target, predicate = b.target(first.first, "b32"), b.target(first.second, "pred")
    everyone = np.ones(b.lanes, bool)
    lane = b.services.numbers % WARP

    def run(mask: Mask | None) -> None:
        leader = _spread(_rows(everyone, mask, False).argmax(axis=1))
        where = everyone if mask is None else mask
        np.copyto(target, leader.astype(np.uint32), where=where)
        np.copyto(predicate, lane == leader, where=where)

    return Step(lambda: run(None), lambda lanes: run(lanes.mask))


def member_mask(b: Binder, i: Instruction) -> Array | None:
    """Return the mask of lanes that a warp-wide instruction names, uint32 per lane; None for all."""
    if not i.operands or "sync" not in i.modifiers or i.opcode in ("mma", "ldmatrix", "stmatrix"):
        return None
    last: Operand = i.operands[-1]
    if isinstance(last, Immediate) and last.value & 0xFFFFFFFF == 0xFFFFFFFF:
        return None
    return b.source(last, "b32")


@row("bra{.uni}", f"{_CONTROL}: bra", "1")
@row("brx.idx{.uni}", f"{_CONTROL}: brx.idx", "2")
@row("ret{.uni} exit", f"{_CONTROL}: ret, exit", "0")
@row("bar{.cta}.sync barrier{.cta}.sync{.aligned}", f"{_SECTION}: bar, barrier", "1 2")
@row("bar{.cta}.arrive barrier{.cta}.arrive{.aligned}", f"{_SECTION}: bar, barrier", "2")
@row("bar.warp.sync", f"{_SECTION}: bar.warp.sync", "1")
def _control(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    """The machine itself does these."""
    return Step(_nothing, lambda lanes: None)  # noqa: ARG005


@row("membar.level", f"{_SECTION}: membar", "0", level="cta gl sys")
@row("fence{.sem}.scope", f"{_SECTION}: fence", "0", sem="sc acq_rel acquire release")
@row("fence.proxy.async{.space}", f"{_SECTION}: fence", "0", space="global shared::cta shared::cluster")
@row("prefetch{.space}.level prefetchu.level", "Data Movement and Conversion Instructions: prefetch", "1",
     level="L1 L2", space="global local")  # fmt: skip
@row("griddepcontrol.action", f"{_SECTION}: griddepcontrol", "0", action="wait launch_dependents")
@row("nanosleep.u32", "Miscellaneous Instructions: nanosleep", "1")
def _no_effect(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    """Memory here is in order for all threads, so a fence adds nothing."""
    return Step(_nothing, lambda lanes: None)  # noqa: ARG005


def _nothing() -> None:
    return None


@row("trap", "Miscellaneous Instructions: trap", "0")
def _trap(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    def part(lanes: Lanes) -> None:
        if lanes.count:
            raise b.services.fault("trap", "the kernel stopped itself", i, int(lanes.index[0]))

    return Step(lambda: part(Lanes(np.ones(b.lanes, bool))), part)
