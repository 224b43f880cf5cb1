"""Rows of asynchronous copies from global to shared memory, and of waiting for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import Array, Step
from ralbuild.simulate.memory import Piece
from ralbuild.simulate.ptx.model import Immediate, Instruction
from ralbuild.simulate.semantics.memory import Reach, masked
from ralbuild.simulate.semantics.table import Mods, row

_SECTION = "Data Movement and Conversion Instructions: Asynchronous copy: Non-bulk copy"


@row("cp.async.cop.shared.global{.hint}{.fetch}", f"{_SECTION}: cp.async", "3 4 5", cop="ca cg",
     hint="L2::cache_hint", fetch="L2::64B L2::128B L2::256B", shared="shared shared::cta")  # fmt: skip
def _copy(b: Binder, i: Instruction, m: Mods) -> Step:
    operands = i.operands[:-1] if m["hint"] else i.operands
    size = operands[2].value if isinstance(operands[2], Immediate) else 0
    if size not in ((16,) if m["cop"] == "cg" else (4, 8, 16)) or len(operands) > 4:
        raise ValueError("a copy of another size")
    taken = b.source(operands[3], "u32") if len(operands) > 3 else None
    to = Reach(b, i, 0, "shared", size)
    origin = Reach(b, i, 1, "global", size)
    single = Reach(b, i, 1, "global", 1)

    def run(lanes: Array | None) -> None:
        places, active = to.pieces(lanes)
        values = np.zeros((len(active), size), np.uint8)
        wanted = np.full(len(active), size) if taken is None else taken[active].astype(np.int64)
        if wanted.max() > size:
            at = int((wanted > size).argmax())
            detail = f"reads {wanted[at]} bytes into {size}"
            raise b.services.fault("out of bounds", detail, i, int(active[at]))
        whole = np.flatnonzero(wanted == size)
        if whole.size:
            found, some = origin.pieces(active[whole])
            for piece in found:
                origin.tell(piece, some, "read")
                values[whole if piece.chosen is None else whole[piece.chosen]] = _rows(piece, size)
        for at in np.flatnonzero((wanted > 0) & (wanted < size)).tolist():
            for byte in range(int(wanted[at])):
                (piece,), _ = single.pieces(active[at : at + 1], byte)
                values[at, byte] = piece.buffer.bytes[int(piece.offset[0])]
        (place,) = places
        to.tell(place, active, "write", values)
        b.services.copies.start(i, active, place.offset, values)

    return masked(run)


def _rows(piece: Piece, size: int) -> Array:
    """Return the bytes at each lane's offset, [lanes, size]."""
    rows: Array = piece.buffer.bytes[piece.offset[:, None] + np.arange(size)]
    return rows


def _for_lanes(b: Binder, run: Callable[[Array], None]) -> Step:
    return Step(lambda: run(b.services.numbers), lambda lanes: run(lanes.index))


@row("cp.async.commit_group", f"{_SECTION}: cp.async.commit_group", "0")
def _commit(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    return _for_lanes(b, b.services.copies.commit)


@row("cp.async.wait_group", f"{_SECTION}: cp.async.wait_group", "1")
@row("cp.async.wait_all", f"{_SECTION}: cp.async.wait_all", "0")
def _wait(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    everything = not i.operands
    first = Immediate(0) if everything else i.operands[0]
    if not isinstance(first, Immediate) or first.value < 0:
        raise ValueError("a wait for a number that is no constant")
    most = first.value
    copies = b.services.copies

    def run(lanes: Array) -> None:
        if everything:
            copies.commit(lanes)
        for done in copies.due(lanes, most):
            b.services.tell_copy(done)
            copies.land(done)

    return _for_lanes(b, run)
