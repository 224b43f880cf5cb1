"""Rows of the floating-point instructions, of single, double, half and bfloat16 precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import DTYPES, Array, Step, ufunc, write
from ralbuild.simulate.ptx.model import BITS, Instruction
from ralbuild.simulate.semantics import floats
from ralbuild.simulate.semantics.table import Mods, row

_FLOAT = "Floating Point Instructions"
_HALF = "Half Precision Floating Point Instructions"
_HALVES = "f16 f16x2 bf16 bf16x2"

_Function = Callable[..., Array]


def sources(b: Binder, i: Instruction, kind: str) -> list[Array]:
    """Return the operands after the first; packed types as twice as many lanes."""
    return [unpack(b.source(item, kind), kind) for item in i.operands[1:]]


def unpack(array: Array, kind: str) -> Array:
    """View the two halves of a packed type as lanes of their own."""
    if not kind.endswith("x2"):
        return array
    return array.view(DTYPES[kind.removesuffix("x2")])


def result(b: Binder, i: Instruction, kind: str, compute: Callable[[], Array]) -> Step:
    """Write what ``compute`` gives; packed types are joined again."""
    target = b.target(i.operands[0], kind)
    if not kind.endswith("x2"):
        return write(target, compute)
    return write(target, lambda: np.ascontiguousarray(compute()).view(np.uint32))


def _finish(kind: str, m: Mods) -> Callable[[Array], Array]:
    """Return what ``.sat`` and ``.ftz`` do to a result."""
    steps: list[Callable[[Array], Array]] = []
    if m.get("sat"):
        steps.append(floats.saturate)
    if m.get("ftz") and kind == "f32":
        steps.append(floats.flush)

    def run(x: Array) -> Array:
        for step in steps:
            x = step(x)
        return x

    return run


def _rounded(b: Binder, i: Instruction, m: Mods, exact: _Function) -> Step:
    """Round once what ``exact`` gives in binary64 of the widened operands."""
    kind, mode = m["type"], m.get("rnd") or "rn"
    element = kind.removesuffix("x2")
    operands, finish = sources(b, i, kind), _finish(kind, m)
    flushed = bool(m.get("ftz")) and kind == "f32"

    def compute() -> Array:
        given = [floats.flush(x) for x in operands] if flushed else operands
        wide = exact(*(floats.widen(x, element) for x in given))
        if m.get("sat") and element != "f32":
            wide = floats.saturate(wide)
        return (
            finish(floats.narrow(wide, element, mode))
            if element == "f32"
            else floats.narrow(wide, element, mode)
        )

    return result(b, i, kind, compute)


_EXACT: dict[str, _Function] = {
    "add": floats.exact_sum,
    "sub": lambda a, b: floats.exact_sum(a, -b),
    "mul": lambda a, b: a * b,
    "fma": floats.exact_fma,
    "mad": floats.exact_fma,
}
_NATIVE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@row("add{.rnd}{.ftz}{.sat}.type sub{.rnd}{.ftz}{.sat}.type mul{.rnd}{.ftz}{.sat}.type",
     f"{_FLOAT}: add, sub, mul", "3", type="f32")  # fmt: skip
@row("div.rnd{.ftz}.type", f"{_FLOAT}: div", "3", type="f32")
def _arithmetic(b: Binder, i: Instruction, m: Mods) -> Step:
    if (m["rnd"] or "rn") != "rn":
        if i.opcode == "div":
            raise ValueError("division in another rounding mode than rn")
        return _rounded(b, i, m, _EXACT[i.opcode])
    x, y = sources(b, i, "f32")
    function = _NATIVE[i.opcode]
    if not m.get("ftz") and not m.get("sat"):
        return ufunc(function, b.target(i.operands[0], "f32"), x, y)
    finish = _finish("f32", m)
    ready = floats.flush if m.get("ftz") else np.asarray
    return result(b, i, "f32", lambda: finish(function(ready(x), ready(y))))


@row("fma.rnd{.ftz}{.sat}.type mad.rnd{.ftz}{.sat}.type", f"{_FLOAT}: fma, mad", "4", type="f32")
@row("fma.rnd{.ftz}{.sat}.type", f"{_HALF}: fma", "4", type=_HALVES)
@row("add{.rnd}{.ftz}{.sat}.type sub{.rnd}{.ftz}{.sat}.type mul{.rnd}{.ftz}{.sat}.type",
     f"{_HALF}: add, sub, mul", "3", type=_HALVES)  # fmt: skip
def _fused(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    if kind != "f32" and (m["rnd"] not in ("", "rn") or m["ftz"]):
        raise ValueError("another rounding mode than rn, or .ftz, of half precision")
    return _rounded(b, i, m, _EXACT[i.opcode])


@row("add{.rnd}.f64 sub{.rnd}.f64 mul{.rnd}.f64", f"{_FLOAT}: add, sub, mul", "3")
@row("div.rnd.f64", f"{_FLOAT}: div", "3")
def _double(b: Binder, i: Instruction, m: Mods) -> Step:
    if m["rnd"] not in ("", "rn"):
        raise ValueError("another rounding mode than rn of double precision")
    return ufunc(_NATIVE[i.opcode], b.target(i.operands[0], "f64"), *sources(b, i, "f64"))


@row("fma.rnd.f64", f"{_FLOAT}: fma", "4")
def _fma_double(b: Binder, i: Instruction, m: Mods) -> Step:
    if m["rnd"] != "rn":
        raise ValueError("another rounding mode than rn of double precision")
    return result(b, i, "f64", partial(floats.fma_double, *sources(b, i, "f64")))


@row("min{.ftz}{.NaN}.type max{.ftz}{.NaN}.type", f"{_FLOAT}: min, max", "3", type=f"f32 f64 {_HALVES}")
def _extreme(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    if m["ftz"] and kind != "f32":
        raise ValueError("min or max with .ftz of this type")
    x, y = sources(b, i, kind)
    largest, nan = i.opcode == "max", bool(m["NaN"])
    if kind.startswith("bf16"):
        wide = floats.from_bfloat
        return result(
            b, i, kind, lambda: floats.to_bfloat(floats.extreme(wide(x), wide(y), largest=largest, nan=nan))
        )
    ready = floats.flush if m["ftz"] else np.asarray
    return result(b, i, kind, lambda: floats.extreme(ready(x), ready(y), largest=largest, nan=nan))


@row("neg{.ftz}.type abs{.ftz}.type", f"{_FLOAT}: neg, abs", "2", type=f"f32 f64 {_HALVES}")
def _sign(b: Binder, i: Instruction, m: Mods) -> Step:
    kind = m["type"]
    if m["ftz"] and kind != "f32":
        raise ValueError("neg or abs with .ftz of this type")
    (x,) = sources(b, i, kind)
    width = BITS[kind.removesuffix("x2")]
    dtype = DTYPES[f"u{width}"]
    top = dtype(1 << (width - 1))
    ready = floats.flush if m["ftz"] else np.asarray

    def compute() -> Array:
        raw = np.ascontiguousarray(ready(x)).view(dtype)
        changed: Array = raw ^ top if i.opcode == "neg" else raw & ~top
        return changed.view(x.dtype)

    return result(b, i, kind, compute)


@row("ex2.approx{.ftz}.type lg2.approx{.ftz}.type rcp.approx{.ftz}.type sqrt.approx{.ftz}.type "
     "rsqrt.approx{.ftz}.type sin.approx{.ftz}.type cos.approx{.ftz}.type tanh.approx.type",
     f"{_FLOAT}: ex2, lg2, rcp, sqrt, rsqrt, sin, cos, tanh", "2", type="f32")  # fmt: skip
@row("rcp.rnd{.ftz}.type sqrt.rnd{.ftz}.type", f"{_FLOAT}: rcp, sqrt", "2", type="f32")
@row("ex2.approx.type tanh.approx.type", f"{_HALF}: ex2, tanh", "2", type=_HALVES)
def _approximate(b: Binder, i: Instruction, m: Mods) -> Step:
    if m.get("rnd") not in (None, "rn"):
        raise ValueError(f"{i.opcode} in another rounding mode than rn")
    return _rounded(b, i, m, floats.APPROXIMATIONS[i.opcode])


@row("div.full{.ftz}.type div.approx{.ftz}.type", f"{_FLOAT}: div", "3", type="f32")
def _quick_division(b: Binder, i: Instruction, m: Mods) -> Step:
    return _rounded(b, i, m, np.divide)


@row("copysign.type", f"{_FLOAT}: copysign", "3", type="f32 f64")
def _copysign(b: Binder, i: Instruction, m: Mods) -> Step:
    sign, size = sources(b, i, m["type"])
    return ufunc(np.copysign, b.target(i.operands[0], m["type"]), size, sign)


@row("testp.what.type", f"{_FLOAT}: testp", "2", type="f32 f64",
     what="finite infinite number notanumber normal subnormal")  # fmt: skip
def _testp(b: Binder, i: Instruction, m: Mods) -> Step:
    x = b.source(i.operands[1], m["type"])
    tiny = np.finfo(x.dtype).tiny
    tests: dict[str, Callable[[], Array]] = {
        "finite": lambda: np.isfinite(x),
        "infinite": lambda: np.isinf(x),
        "number": lambda: ~np.isnan(x),
        "notanumber": lambda: np.isnan(x),
        "normal": lambda: np.isfinite(x) & (np.abs(x) >= tiny),
        "subnormal": lambda: (np.abs(x) < tiny) & (x != 0),
    }
    return write(b.target(i.operands[0], "pred"), tests[m["what"]])
