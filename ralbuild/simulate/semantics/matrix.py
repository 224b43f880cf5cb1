"""Rows of matrix instructions of a warp: `mma`, and `ldmatrix` and `stmatrix` around it.

Fragments are laid out as the figures of the section say: lane 4g + t holds row g, columns from t on.
Products are exact; a sum is computed in binary64 and rounded once: the ISA leaves its order open.
`tf32` operands lose their 13 low bits, as hardware does with what was never rounded.
"""

from __future__ import annotations

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import WARP, Array, Lanes, Step
from ralbuild.simulate.memory import Piece
from ralbuild.simulate.ptx.model import Instruction
from ralbuild.simulate.semantics import floats
from ralbuild.simulate.semantics.memory import Reach
from ralbuild.simulate.semantics.table import Mods, row

_SECTION = "Warp Level Matrix Multiply-Accumulate Instructions"
_LANE = np.arange(WARP)
_GROUP, _THREAD = _LANE // 4, _LANE % 4
_ROW = 16
"""Bytes of a row of an 8 by 8 matrix of 16-bit elements."""
_WIDTH = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1}


def whole_warps(b: Binder, i: Instruction, lanes: Lanes | None) -> Array:
    """Return the warps that take part; each must do so with all its lanes."""
    if lanes is None:
        return np.arange(b.lanes // WARP)
    rows = lanes.mask.reshape(-1, WARP)
    some = rows.any(axis=1)
    parted = some & ~rows.all(axis=1)
    if parted.any():
        warp = int(parted.argmax())
        at = warp * WARP + int(rows[warp].argmax())
        raise b.services.fault("inactive lane", "the whole warp must take part", i, at)
    return np.flatnonzero(some)


@row("mma.sync.aligned.shape.row.col.to.a.b.from", f"{_SECTION}: mma", "4", shape="m16n8k8 m16n8k16",
     to="f16 f32", a="f16", b="f16", **{"from": "f16 f32"})  # fmt: skip
@row("mma.sync.aligned.shape.row.col.to.a.b.from", f"{_SECTION}: mma", "4", shape="m16n8k8 m16n8k16",
     to="f32", a="bf16", b="bf16", **{"from": "f32"})  # fmt: skip
@row("mma.sync.aligned.shape.row.col.to.a.b.from", f"{_SECTION}: mma", "4", shape="m16n8k4 m16n8k8",
     to="f32", a="tf32", b="tf32", **{"from": "f32"})  # fmt: skip
@row("mma.sync.aligned.shape.row.col{.satfinite}.to.a.b.from", f"{_SECTION}: mma", "4",
     shape="m16n8k16 m16n8k32", to="s32", a="s8 u8", b="s8 u8", **{"from": "s32"})  # fmt: skip
def _mma(b: Binder, i: Instruction, m: Mods) -> Step:
    depth = int(m["shape"].rpartition("k")[2])
    width = _WIDTH[m["a"]]
    count = depth * width // 16  # registers of B; A has twice as many rows
    result, left, right, start = (b.items(operand) for operand in i.operands)
    accumulators = {"f16": 2, "f32": 4, "s32": 4}
    wanted = (accumulators[m["to"]], 2 * count, count, accumulators[m["from"]])
    if tuple(map(len, (result, left, right, start))) != wanted:
        raise ValueError("fragments of other sizes")
    targets = [b.target(item, "b32") for item in result]
    a, c = ([b.source(item, "b32") for item in items] for items in (left, right))
    addends = [b.source(item, "b32") for item in start]

    def run(lanes: Lanes | None) -> None:
        warps = whole_warps(b, i, lanes)
        one = _gather(a, warps, m["a"], depth, rows=2)
        other = _gather(c, warps, m["b"], depth, rows=1)
        total = one @ other.transpose(0, 2, 1) + _accumulator(addends, warps, m["from"])
        _scatter(targets, warps, _rounded(total, m), m["to"])

    return Step(lambda: run(None), run)


def _gather(registers: list[Array], warps: Array, kind: str, depth: int, rows: int) -> Array:
    """Return A [warps, 16, depth], or B transposed [warps, 8, depth], from a warp's registers."""
    each = 4 // _WIDTH[kind]
    matrix = np.zeros((len(warps), 8 * rows, depth), np.int64 if kind in ("s8", "u8") else np.float64)
    for number, register in enumerate(registers):
        values = _numbers(register.reshape(-1, WARP)[warps], kind).reshape(len(warps), WARP, each)
        block = number // rows * 4 * each
        for element in range(each):
            matrix[:, _GROUP + 8 * (number % rows), block + _THREAD * each + element] = values[:, :, element]
    return matrix


def _numbers(words: Array, kind: str) -> Array:
    """Return the elements of 32-bit registers as numbers that hold them exactly."""
    words = np.ascontiguousarray(words)
    if kind in ("s8", "u8"):
        return words.view(np.int8 if kind == "s8" else np.uint8).astype(np.int64)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    halves = words.view(np.float16 if kind == "f16" else np.uint16)
    return floats.widen(halves, kind).astype(np.float64)


def _places(count: int) -> list[tuple[Array, Array, int, int]]:
    """Return row, column, register and half of each element of C and D that a lane holds."""
    return [
        (_GROUP + 8 * (k // 2), 2 * _THREAD + k % 2, k if count == 4 else k // 2, k % 2) for k in range(4)
    ]


def _accumulator(registers: list[Array], warps: Array, kind: str) -> Array:
    matrix = np.zeros((len(warps), 16, 8), np.int64 if kind == "s32" else np.float64)
    for rows, columns, number, half in _places(len(registers)):
        words = np.ascontiguousarray(registers[number].reshape(-1, WARP)[warps])
        if kind == "f16":
            matrix[:, rows, columns] = words.view(np.float16)[:, half::2]
        else:
            matrix[:, rows, columns] = words.view(np.int32 if kind == "s32" else np.float32)
    return matrix


def _rounded(total: Array, m: Mods) -> Array:
    if m["to"] == "s32":
        if m["satfinite"]:
            limits = np.iinfo(np.int32)
            total = total.clip(limits.min, limits.max)
        return total.astype(np.int32)
    return total.astype(np.float16 if m["to"] == "f16" else np.float32)


def _scatter(registers: list[Array], warps: Array, matrix: Array, kind: str) -> None:
    for rows, columns, number, half in _places(len(registers)):
        values = matrix[:, rows, columns]
        if kind == "f16":
            registers[number].view(np.float16).reshape(-1, WARP, 2)[warps, :, half] = values
        else:
            registers[number].view(values.dtype).reshape(-1, WARP)[warps] = values


@row("ldmatrix.sync.aligned.m8n8.num{.trans}{.space}.b16", f"{_SECTION}: ldmatrix", "2", num="x1 x2 x4",
     space="shared shared::cta")  # fmt: skip
def _load(b: Binder, i: Instruction, m: Mods) -> Step:
    targets = [b.target(item, "b32") for item in b.items(i.operands[0])]
    reach = _matrices(b, i, m, len(targets), address=1)

    def run(lanes: Lanes | None) -> None:
        warps = whole_warps(b, i, lanes)
        for number, target in enumerate(targets):
            matrix = np.zeros((len(warps) * 8, _ROW // 2), np.uint16)
            for piece, where in _rows(reach, warps, number):
                reach.tell(piece, where, "read")
                rows = piece.buffer.bytes[piece.offset[:, None] + np.arange(_ROW)].view(np.uint16)
                matrix[slice(None) if piece.chosen is None else piece.chosen] = rows
            square = matrix.reshape(-1, 8, 8)
            square = square.transpose(0, 2, 1) if m["trans"] else square
            target.reshape(-1, WARP)[warps] = np.ascontiguousarray(square).view(np.uint32).reshape(-1, WARP)

    return Step(lambda: run(None), run)


@row("stmatrix.sync.aligned.m8n8.num{.trans}{.space}.b16", f"{_SECTION}: stmatrix", "2", num="x1 x2 x4",
     space="shared shared::cta")  # fmt: skip
def _store(b: Binder, i: Instruction, m: Mods) -> Step:
    sources = [b.source(item, "b32") for item in b.items(i.operands[1])]
    reach = _matrices(b, i, m, len(sources), address=0)

    def run(lanes: Lanes | None) -> None:
        warps = whole_warps(b, i, lanes)
        for number, source in enumerate(sources):
            words = np.ascontiguousarray(source.reshape(-1, WARP)[warps])
            square = words.view(np.uint16).reshape(-1, 8, 8)
            square = square.transpose(0, 2, 1) if m["trans"] else square
            rows = np.ascontiguousarray(square).reshape(-1, 8).view(np.uint8)
            for piece, where in _rows(reach, warps, number):
                values = rows if piece.chosen is None else rows[piece.chosen]
                reach.tell(piece, where, "write", values)
                piece.buffer.bytes[piece.offset[:, None] + np.arange(_ROW)] = values

    return Step(lambda: run(None), run)


def _matrices(b: Binder, i: Instruction, m: Mods, count: int, address: int) -> Reach:
    if count != int(m["num"][1:]):
        raise ValueError(f"{count} registers for {m['num']}")
    return Reach(b, i, address, m["space"], _ROW)


def _rows(reach: Reach, warps: Array, number: int) -> list[tuple[Piece, Array]]:
    """Locate the rows of a matrix: lanes 8 ``number`` and the next 7 of a warp hold their addresses."""
    lanes = (warps[:, None] * WARP + 8 * number + np.arange(8)).reshape(-1)
    pieces, active = reach.pieces(lanes)
    return [(piece, active) for piece in pieces]
