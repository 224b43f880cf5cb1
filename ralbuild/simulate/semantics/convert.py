"""Rows of ``cvt`` and ``cvta``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ralbuild.simulate.binder import Binder
from ralbuild.simulate.lanes import DTYPES, Array, Step, copy, write
from ralbuild.simulate.ptx.model import BITS, Instruction
from ralbuild.simulate.semantics import floats, minifloat
from ralbuild.simulate.semantics.table import Mods, row

_SECTION = "Data Movement and Conversion Instructions: cvt"
_WHOLE = "u8 u16 u32 u64 s8 s16 s32 s64"
_FLOATS = "f16 bf16 f32 f64"
_TO_WHOLE: dict[str, np.ufunc] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@row("cvt{.sat}.to.from", _SECTION, "2", to=_WHOLE, **{"from": _WHOLE})
def _whole(b: Binder, i: Instruction, m: Mods) -> Step:
    source = b.source(i.operands[1], m["from"], low=True)
    target = b.target(i.operands[0], m["to"], wide=True)
    narrow = DTYPES[m["to"]]
    if not m["sat"]:
        return (
            copy(target, source) if target.dtype == narrow else write(target, lambda: source.astype(narrow))
        )
    given, to = np.iinfo(source.dtype), np.iinfo(narrow)
    low, high = max(to.min, given.min), min(to.max, given.max)
    return write(target, lambda: np.clip(source, low, high))


@row("cvt.rnd{.ftz}.to.from", _SECTION, "2", to=_WHOLE, rnd="rni rzi rmi rpi", **{"from": _FLOATS})
def _float_to_whole(b: Binder, i: Instruction, m: Mods) -> Step:
    """Out of range gives the nearest number in range; NaN gives 0 (the ISA: for 8 to 32 bits)."""
    kind, dtype = m["from"], DTYPES[m["to"]]
    source = b.source(i.operands[1], kind)
    function, limits = _TO_WHOLE[m["rnd"]], np.iinfo(dtype)
    flush = bool(m["ftz"]) and kind == "f32"
    middle = np.uint64 if m["to"] == "u64" else np.int64

    def compute() -> Array:
        x = function(floats.widen(floats.flush(source) if flush else source, kind))
        x = np.where(np.isnan(x), 0.0, x)
        above, below = x >= float(limits.max), x <= float(limits.min)
        inside = np.where(above | below, 0.0, x).astype(middle).astype(dtype)
        return np.where(above, dtype(limits.max), np.where(below, dtype(limits.min), inside))

    return write(b.target(i.operands[0], m["to"], wide=True), compute)


@row("cvt.rnd{.sat}.to.from", _SECTION, "2", to=_FLOATS, **{"from": _WHOLE})
def _whole_to_float(b: Binder, i: Instruction, m: Mods) -> Step:
    kind, mode = m["to"], m["rnd"]
    source = b.source(i.operands[1], m["from"], low=True)
    if kind == "f64" and mode != "rn":
        raise ValueError("another rounding mode than rn to double precision")
    if kind == "bf16" and BITS[m["from"]] > 32:
        raise ValueError("a 64-bit number to bfloat16")
    wide = BITS[m["from"]] == 64 and kind != "f64"

    def compute() -> Array:
        if kind == "f64" or (wide and kind == "f32" and mode == "rn"):
            x: Array = source.astype(DTYPES[kind])
            return floats.saturate(x) if m["sat"] else x
        exact = _odd_double(source) if wide else source.astype(np.float64)
        exact = floats.saturate(exact) if m["sat"] else exact
        return floats.narrow(exact, kind, mode)

    return write(b.target(i.operands[0], kind), compute)


def _odd_double(whole: Array) -> Array:
    """Return 64-bit numbers as binary64 rounded to odd."""
    if whole.dtype.kind == "i":
        size = np.abs(whole).view(np.uint64)
        return np.where(whole < 0, -_odd_double(size), _odd_double(size))
    high, low = whole >> np.uint64(32), whole & np.uint64(0xFFFFFFFF)
    return floats.exact_sum(high.astype(np.float64) * 2.0**32, low.astype(np.float64))


@row("cvt{.rnd}{.ftz}{.sat}.to.from", _SECTION, "2", to=_FLOATS, rnd="rn rz rm rp rni rzi rmi rpi",
     **{"from": _FLOATS})  # fmt: skip
@row("cvt.rnd{.relu}{.satfinite}.to.from", _SECTION, "2", to="f16 bf16", rnd="rn rz", **{"from": "f32"})
def _float_to_float(b: Binder, i: Instruction, m: Mods) -> Step:
    to, kind, mode = m["to"], m["from"], m["rnd"]
    if (to in ("f16", "bf16") and mode not in ("", "rn", "rz", *_TO_WHOLE)) or (
        mode == "" and BITS[to] < BITS[kind]
    ):
        raise ValueError(f"rounding mode {mode!r} from .{kind} to .{to}")
    if mode in _TO_WHOLE and to != kind:
        raise ValueError("rounding to a whole number of another type")
    source = b.source(i.operands[1], kind)
    ready = floats.flush if m.get("ftz") and kind == "f32" else np.asarray

    def compute() -> Array:
        x = floats.widen(ready(source), kind)
        if mode in _TO_WHOLE:
            x = _TO_WHOLE[mode](x)
        y = floats.narrow(x, to, mode if mode in ("rn", "rz", "rm", "rp") else "rn")
        return _clip(y, x, to, m)

    return write(b.target(i.operands[0], to), compute)


def _clip(y: Array, x: Array, to: str, m: Mods) -> Array:
    """Apply ``.satfinite``, ``.relu``, ``.sat`` and ``.ftz`` to a converted value; ``x`` is the exact one."""
    if m.get("satfinite") and to in ("f16", "bf16"):
        most = np.uint16(0x7BFF if to == "f16" else 0x7F7F)
        raw = y.view(np.uint16)
        infinite = (raw & np.uint16(0x7FFF)) == np.uint16(0x7C00 if to == "f16" else 0x7F80)
        y = np.where(infinite, (raw & np.uint16(0x8000)) | most, raw).view(y.dtype)
    if m.get("relu"):
        y = np.where(np.isnan(x) | (x > 0), y, y.dtype.type(0))
    if m.get("sat"):
        if to == "bf16":
            raise ValueError("saturated bfloat16")
        y = floats.saturate(y)
    return floats.flush(y) if m.get("ftz") and to == "f32" else y


@row("cvt.rnd{.relu}{.satfinite}.to.f32", _SECTION, "3", to="f16x2 bf16x2", rnd="rn rz")
@row("cvt.rnd.satfinite{.relu}.to.f32", _SECTION, "3", to="e5m2x2 e4m3x2", rnd="rn")
def _pack(b: Binder, i: Instruction, m: Mods) -> Step:
    """Convert two values; the first goes to the upper half."""
    to, mode = m["to"].removesuffix("x2"), m["rnd"]
    upper, lower = (b.source(item, "f32") for item in i.operands[1:])
    one = _small(to, m) if to.startswith("e") else _half(to, mode, m)
    width = 8 if to.startswith("e") else 16
    word = DTYPES[f"u{2 * width}"]

    def compute() -> Array:
        high, low = one(upper), one(lower)
        packed: Array = (high.astype(word) << word(width)) | low.astype(word)
        return packed

    return write(b.target(i.operands[0], f"b{2 * width}"), compute)


def _half(to: str, mode: str, m: Mods) -> Callable[[Array], Array]:
    def convert(x: Array) -> Array:
        wide = x.astype(np.float64)
        return np.ascontiguousarray(_clip(floats.narrow(wide, to, mode), wide, to, m)).view(np.uint16)

    return convert


def _small(to: str, m: Mods) -> Callable[[Array], Array]:
    relu = bool(m.get("relu"))
    return lambda x: minifloat.encode(np.where(x < 0, np.float32(0), x) if relu else x, to)


@row("cvt.rn{.relu}.f16x2.from", _SECTION, "2", **{"from": "e5m2x2 e4m3x2"})
def _unpack(b: Binder, i: Instruction, m: Mods) -> Step:
    source, kind = b.source(i.operands[1], "b16"), m["from"].removesuffix("x2")
    if m["relu"]:
        raise ValueError("unpacking with .relu")

    def compute() -> Array:
        pair = [
            minifloat.decode(source & np.uint16(0xFF), kind),
            minifloat.decode(source >> np.uint16(8), kind),
        ]
        return np.stack(pair, axis=1).view(np.uint32)[:, 0]

    return write(b.target(i.operands[0], "b32"), compute)


@row("cvt.rna.tf32.f32", _SECTION, "2")
def _tensor_float(b: Binder, i: Instruction, m: Mods) -> Step:  # noqa: ARG001
    """Keep 10 fraction bits, ties away from zero."""
    source = b.source(i.operands[1], "b32")
    finite = source.view(np.float32)
    rounded = np.uint32(0x1000), np.uint32(0xFFFFE000)
    return write(
        b.target(i.operands[0], "b32"),
        lambda: np.where(np.isfinite(finite), (source + rounded[0]) & rounded[1], source & rounded[1]),
    )


@row(
    "cvta{.to}.space.u64",
    "Data Movement and Conversion Instructions: cvta",
    "2",
    space="global shared local const",
)
def _cvta(b: Binder, i: Instruction, m: Mods) -> Step:
    """Generic addresses of shared and local memory are their own plus a window's base."""
    source, target = b.source(i.operands[1], "u64"), b.target(i.operands[0], "u64")
    window = np.uint64(b.services.window(m["space"]))
    if m["to"]:
        return write(target, lambda: source - window)
    return write(target, lambda: source + window)
