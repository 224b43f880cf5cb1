"""Rows of comparison and selection."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import DTYPES, Array, Lanes, Step, ufunc, write
from ralbuild.simulate.ptx.model import BITS, FloatBits, Instruction, Not, Operand, Pair, Register
from ralbuild.simulate.semantics import floats
from ralbuild.simulate.semantics.floating import unpack
from ralbuild.simulate.semantics.table import Mods, row

_SECTION = "Comparison and Selection Instructions"
_WHOLE = "b16 b32 b64 u16 u32 u64 s16 s32 s64"
_ORDER = "eq ne lt le gt ge lo ls hi hs"
_FLOAT_ORDER = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _whole(b: Binder, i: Instruction, m: Mods) -> tuple[np.ufunc, Array, Array]:
    kind, name = m["type"], m["cmp"]
    if (name in _UNSIGNED and kind[0] != "u") or (kind[0] == "b" and name not in ("eq", "ne")):
        raise ValueError(f"no comparison .{name} of .{kind}")
    x, y = (b.source(item, kind) for item in i.operands[1:3])
    return floats.COMPARISONS[_UNSIGNED.get(name, name)], x, y


def _floating(b: Binder, i: Instruction, m: Mods) -> Callable[[], Array]:
    kind, name = m["type"], m["cmp"]
    if m["ftz"] and kind != "f32":
        raise ValueError("a comparison with .ftz of this type")
    x, y = (unpack(b.source(item, kind), kind) for item in i.operands[1:3])
    if kind.startswith("bf16"):
        return lambda: floats.compare(name, floats.from_bfloat(x), floats.from_bfloat(y))
    ready = floats.flush if m["ftz"] else np.asarray
    return lambda: floats.compare(name, ready(x), ready(y))


def _predicates(b: Binder, operand: Operand) -> tuple[Array, Array | None]:
    """Return the arrays of ``p`` or ``p|q``."""
    if isinstance(operand, Pair):
        return b.target(operand.first, "pred"), b.target(operand.second, "pred")
    return b.target(operand, "pred"), None


def third_operand(b: Binder, operand: Operand) -> Callable[[], Array]:
    """Return the predicate that a comparison is combined with."""
    if isinstance(operand, Not):
        array = b.register(operand.register)
        return lambda: ~array
    array = b.source(operand, "pred")
    return lambda: array


def _setp(b: Binder, i: Instruction, m: Mods, compute: Callable[[], Array]) -> Step:
    first, second = _predicates(b, i.operands[0])
    combine = _COMBINE[m["bool"]] if m.get("bool") else None
    if (combine is None) != (len(i.operands) == 3):
        raise ValueError("another number of operands")
    third = third_operand(b, i.operands[3]) if combine is not None else None

    def values() -> tuple[Array, Array]:
        found = compute()
        if combine is None or third is None:
            return found, ~found
        return combine(found, third()), combine(~found, third())

    if second is None:
        return write(first, lambda: values()[0])
    other = second

    def full() -> None:
        np.copyto(first, (pair := values())[0])
        np.copyto(other, pair[1])

    def part(lanes: Lanes) -> None:
        np.copyto(first, (pair := values())[0], where=lanes.mask)
        np.copyto(other, pair[1], where=lanes.mask)

    return Step(full, part)


@row("setp.cmp{.bool}.type", f"{_SECTION}: setp", "3 4", cmp=_ORDER, type=_WHOLE)
def _setp_whole(b: Binder, i: Instruction, m: Mods) -> Step:
    function, x, y = _whole(b, i, m)
    if len(i.operands) == 3 and isinstance(i.operands[0], Register) and not m["bool"]:
        return ufunc(function, b.target(i.operands[0], "pred"), x, y)
    return _setp(b, i, m, lambda: function(x, y))


@row("setp.cmp{.bool}{.ftz}.type", f"{_SECTION}: setp", "3 4", cmp=_FLOAT_ORDER, type="f32 f64 f16 bf16")
def _setp_float(b: Binder, i: Instruction, m: Mods) -> Step:
    return _setp(b, i, m, _floating(b, i, m))


_ONES = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


def _set(b: Binder, i: Instruction, result: str, found: Callable[[], Array]) -> Step:
    dtype = DTYPES[f"u{BITS[result.removesuffix('x2')]}"]
    one = dtype(_ONES.get(result, (1 << 8 * dtype().itemsize) - 1))
    target = b.target(i.operands[0], f"u{BITS[result]}")
    return write(target, lambda: np.where(found(), one, dtype(0)).view(target.dtype))


@row("set.cmp.result.type", f"{_SECTION}: set", "3", cmp=_ORDER, type=_WHOLE, result="u32 s32 f32")
def _set_whole(b: Binder, i: Instruction, m: Mods) -> Step:
    function, x, y = _whole(b, i, m)
    return _set(b, i, m["result"], lambda: function(x, y))


@row("set.cmp{.ftz}.result.type", f"{_SECTION}: set", "3", cmp=_FLOAT_ORDER,
     type="f32 f64 f16 bf16 f16x2 bf16x2", result="u32 s32 f32 u16 s16 f16 bf16 f16x2 bf16x2")  # fmt: skip
def _set_float(b: Binder, i: Instruction, m: Mods) -> Step:
    kind, result = m["type"], m["result"]
    if (kind.endswith("x2") or result.endswith("x2")) and kind != result:
        raise ValueError("a packed comparison whose result is of another type")
    return _set(b, i, result, _floating(b, i, m))


@row("selp.type", f"{_SECTION}: selp", "4", type=f"{_WHOLE} f32 f64")
def _selp(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    x, y = (_bits_of(b, item, kind) for item in i.operands[1:3])
    chosen = third_operand(b, i.operands[3])
    return write(b.target(i.operands[0], f"u{BITS[kind]}"), lambda: np.where(chosen(), x, y))


def _bits_of(b: Binder, operand: Operand, kind: str) -> Array:
    if isinstance(operand, FloatBits):
        return b.source(operand, kind).view(DTYPES[f"u{BITS[kind]}"])
    return b.source(operand, f"u{BITS[kind]}")


@row("slct.type.s32 slct{.ftz}.type.f32", f"{_SECTION}: slct", "4", type=f"{_WHOLE} f32 f64")
def _slct(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    if m.get("ftz"):
        raise ValueError("slct with .ftz")
    x, y = (_bits_of(b, item, kind) for item in i.operands[1:3])
    c = b.source(i.operands[3], i.modifiers[-1])
    return write(b.target(i.operands[0], f"u{BITS[kind]}"), lambda: np.where(c >= 0, x, y))
