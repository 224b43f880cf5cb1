"""Rows of the integer, bit and shift instructions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import DTYPES, Array, Lanes, Step, copy, ufunc, write
from ralbuild.simulate.ptx.model import BITS, Immediate, Instruction
from ralbuild.simulate.semantics import bits
from ralbuild.simulate.semantics.table import Mods, row

_INTEGER = "Integer Arithmetic Instructions"
_LOGIC = "Logic and Shift Instructions"
ALL = "u16 u32 u64 s16 s32 s64"
_HALVES = "u16 u32 s16 s32"

_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@row("add.type sub.type min.type max.type", f"{_INTEGER}: add, sub, min, max", "3", type=ALL)
@row("and.type or.type xor.type", f"{_LOGIC}: and, or, xor", "3", type="b16 b32 b64 pred")
def _binary(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y = (b.source(item, kind) for item in i.operands[1:])
    return ufunc(_BINARY[i.opcode], b.target(i.operands[0], kind), x, y)


@row("add.sat.s32 sub.sat.s32", f"{_INTEGER}: add, sub", "3")
def _saturated(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    x, y = (b.source(item, "s32") for item in i.operands[1:])
    function = _BINARY[i.opcode]

    def compute() -> Array:
        wide = function(x.astype(np.int64), y.astype(np.int64))
        return np.clip(wide, -(1 << 31), (1 << 31) - 1)

    return write(b.target(i.operands[0], "s32"), compute)


@row("mul.lo.type", f"{_INTEGER}: mul", "3", type=ALL)
def _mul_low(b: Binder, i: Instruction, m: Mods) -> Step:
    x, y = (b.source(item, m["type"]) for item in i.operands[1:])
    return ufunc(np.multiply, b.target(i.operands[0], m["type"]), x, y)


@row("mul.hi.type", f"{_INTEGER}: mul", "3", type=ALL)
def _mul_high(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y = (b.source(item, kind) for item in i.operands[1:])
    return write(b.target(i.operands[0], kind), lambda: bits.high_product(x, y, kind))


@row("mul.wide.type", f"{_INTEGER}: mul", "3", type=_HALVES)
def _mul_wide(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    wide = f"{kind[0]}{2 * BITS[kind]}"
    x, y = (b.source(item, kind) for item in i.operands[1:])
    return ufunc(np.multiply, b.target(i.operands[0], wide), x, y, dtype=DTYPES[wide])


@row("mad.lo.type mad.hi.type", f"{_INTEGER}: mad", "4", type=ALL)
def _mad(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y, z = (b.source(item, kind) for item in i.operands[1:])
    target = b.target(i.operands[0], kind)
    if "hi" in i.modifiers:
        return write(target, lambda: bits.high_product(x, y, kind) + z)
    return write(target, lambda: x * y + z)


@row("mad.wide.type", f"{_INTEGER}: mad", "4", type=_HALVES)
def _mad_wide(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    wide = f"{kind[0]}{2 * BITS[kind]}"
    x, y = (b.source(item, kind) for item in i.operands[1:3])
    z = b.source(i.operands[3], wide)
    dtype = DTYPES[wide]
    return write(b.target(i.operands[0], wide), lambda: np.multiply(x, y, dtype=dtype) + z)


@row("mul24.lo.type mad24.lo.type", f"{_INTEGER}: mul24, mad24", "3 4", type="u32 s32")
def _mul24(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y, *rest = (b.source(item, kind) for item in i.operands[1:])
    if len(rest) != (i.opcode == "mad24"):
        raise ValueError("another number of operands")
    eight = DTYPES[kind](8)

    def compute() -> Array:
        product: Array = ((x << eight) >> eight) * ((y << eight) >> eight)
        return product + rest[0] if rest else product

    return write(b.target(i.operands[0], kind), compute)


@row("sad.type", f"{_INTEGER}: sad", "4", type=ALL)
def _sad(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y, z = (b.source(item, kind) for item in i.operands[1:])
    return write(b.target(i.operands[0], kind), lambda: np.where(x < y, y - x, x - y) + z)


@row("div.type rem.type", f"{_INTEGER}: div, rem", "3", type=ALL)
def _divide(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y = (b.source(item, kind) for item in i.operands[1:])
    function = bits.quotient if i.opcode == "div" else bits.remainder
    return write(b.target(i.operands[0], kind), lambda: function(x, y, kind))


@row("abs.type neg.type", f"{_INTEGER}: abs, neg", "2", type="s16 s32 s64")
@row("not.type", f"{_LOGIC}: not", "2", type="b16 b32 b64 pred")
def _unary(b: Binder, i: Instruction, m: Mods) -> Step:
    function = {"abs": np.absolute, "neg": np.negative, "not": np.invert}[i.opcode]
    return ufunc(function, b.target(i.operands[0], m["type"]), b.source(i.operands[1], m["type"]))


@row("cnot.type", f"{_LOGIC}: cnot", "2", type="b16 b32 b64")
def _cnot(b: Binder, i: Instruction, m: Mods) -> Step:
    x = b.source(i.operands[1], m["type"])
    return write(b.target(i.operands[0], m["type"]), lambda: x == 0)


def _one(b: Binder, i: Instruction, kind: str, result: str, function: Callable[[Array], Array]) -> Step:
    x = b.source(i.operands[1], kind)
    return write(b.target(i.operands[0], result), lambda: function(x))


@row("popc.type clz.type", f"{_INTEGER}: popc, clz", "2", type="b32 b64")
def _count(b: Binder, i: Instruction, m: Mods) -> Step:
    function = np.bitwise_count if i.opcode == "popc" else bits.leading_zeros
    return _one(b, i, m["type"], "u32", function)


@row("bfind{.shiftamt}.type", f"{_INTEGER}: bfind", "2", type="u32 u64 s32 s64")
def _bfind(b: Binder, i: Instruction, m: Mods) -> Step:
    return _one(b, i, m["type"], "u32", lambda x: bits.find_leading(x, as_shift=bool(m["shiftamt"])))


@row("brev.type", f"{_INTEGER}: brev", "2", type="b32 b64")
def _brev(b: Binder, i: Instruction, m: Mods) -> Step:
    return _one(b, i, m["type"], m["type"], bits.reverse)


@row("bfe.type", f"{_INTEGER}: bfe", "4", type="u32 u64 s32 s64")
def _bfe(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x = b.source(i.operands[1], kind)
    position, length = (b.source(item, "u32") for item in i.operands[2:])
    function = bits.extract_signed if kind[0] == "s" else bits.extract_unsigned
    return write(b.target(i.operands[0], kind), lambda: function(x, position, length))


@row("bfi.type", f"{_INTEGER}: bfi", "5", type="b32 b64")
def _bfi(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y = (b.source(item, kind) for item in i.operands[1:3])
    position, length = (b.source(item, "u32") for item in i.operands[3:])
    return write(b.target(i.operands[0], kind), lambda: bits.insert(x, y, position, length))


@row("shl.type shr.type", f"{_LOGIC}: shl, shr", "3", type=f"b16 b32 b64 {ALL}")
def _shift(b: Binder, i: Instruction, m: Mods) -> Step:
    """Shift counts above the width give 0, or the sign: NumPy's shifts do so for counts below 256."""
    kind = m["type"]
    if i.opcode == "shl" and kind[0] != "b":
        raise ValueError("shl takes bits, not numbers")
    x = b.source(i.operands[1], kind)
    target = b.target(i.operands[0], kind)
    function = np.left_shift if i.opcode == "shl" else np.right_shift
    if isinstance(i.operands[2], Immediate):
        count = b.constant(min(i.operands[2].value & 0xFFFFFFFF, BITS[kind]), kind)
        return ufunc(function, target, x, count)
    given = b.source(i.operands[2], "u32")
    dtype = DTYPES[kind]
    most = np.uint32(BITS[kind])
    return write(target, lambda: function(x, np.minimum(given, most).astype(dtype)))


@row("shf.dir.mode.b32", f"{_LOGIC}: shf", "4", dir="l r", mode="wrap clamp")
def _funnel(b: Binder, i: Instruction, m: Mods) -> Step:
    x, y, count = (b.source(item, "u32") for item in i.operands[1:])
    function = bits.funnel_left if m["dir"] == "l" else bits.funnel_right
    limit = (
        (lambda: count & np.uint32(31)) if m["mode"] == "wrap" else (lambda: np.minimum(count, np.uint32(32)))
    )
    return write(b.target(i.operands[0], "u32"), lambda: function(x, y, limit()))


@row("lop3.b32", f"{_LOGIC}: lop3", "5")
def _lop3(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    x, y, z = (b.source(item, "u32") for item in i.operands[1:4])
    table = i.operands[4]
    if not isinstance(table, Immediate) or not 0 <= table.value < 256:
        raise ValueError("needs a truth table of 0 to 255")
    return write(b.target(i.operands[0], "u32"), lambda: bits.lookup(x, y, z, table.value))


@row("prmt.b32", "Data Movement and Conversion Instructions: prmt", "4")
def _prmt(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    x, y, selector = (b.source(item, "u32") for item in i.operands[1:])
    return write(b.target(i.operands[0], "u32"), lambda: bits.permute(x, y, selector))


@row("mov.type", "Data Movement and Conversion Instructions: mov", "2",
     type=f"pred b16 b32 b64 {ALL} f32 f64")  # fmt: skip
def _mov(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    target, source = (b.items(item) for item in i.operands)
    if len(target) == len(source) == 1:
        return copy(b.target(target[0], kind), b.source(source[0], kind))
    if kind[0] != "b" or min(len(target), len(source)) != 1:
        raise ValueError("packing needs bits and one vector")
    parts = len(target) * len(source)
    item = f"u{BITS[kind] // parts}"
    if item not in BITS or BITS[item] < 16:
        raise ValueError("elements of less than 16 bits")
    if len(source) > 1:  # the first element is the lowest
        pieces = [b.source(piece, item) for piece in source]
        whole = b.target(target[0], kind)
        return write(whole, lambda: np.stack(pieces, axis=1).view(whole.dtype)[:, 0])
    split = b.source(source[0], kind).view(DTYPES[item]).reshape(-1, parts)
    targets = [b.target(piece, item) for piece in target]

    def full() -> None:
        for k, value in enumerate(split.T.copy()):
            np.copyto(targets[k], value)

    def part(lanes: Lanes) -> None:
        for k, value in enumerate(split.T.copy()):
            np.copyto(targets[k], value, where=lanes.mask)

    return Step(full, part)
