"""IEEE arithmetic with one rounding, in each rounding mode, on lanes.

The exact result is computed in binary64 rounded to odd: with two bits more than the target needs, one
more rounding of that is the rounding of the exact value (Boldo and Melquiond 2008).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ralbuild.simulate.lanes import Array

CANONICAL_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]
"""What single-precision instructions give for a NaN (PTX ISA, "Floating Point Instructions")."""
_TINY = np.float32(2.0**-126)
_MAX_HALF = 65504.0


def exact_sum(a: Array, b: Array) -> Array:
    """Return a + b (binary64) rounded to odd."""
    total: Array = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return _odd(total, error)


def exact_fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded to odd; a and b have so few bits that binary64 holds their product."""
    return exact_sum(a * b, c)


def _odd(rounded: Array, error: Array) -> Array:
    """Move a nearest value whose last bit is even, and which is not exact, to its odd neighbour."""
    bits = rounded.view(np.int64)
    away = np.where((error > 0) != np.signbit(rounded), 1, -1)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(rounded)
    return np.where(inexact, bits + away, bits).view(np.float64)


def round_to_single(x: Array, mode: str) -> Array:
    """Round binary64, exact or rounded to odd, to binary32; ``mode`` is rn, rz, rm or rp."""
    nearest: Array = x.astype(np.float32)
    if mode == "rn":
        return nearest
    error = x - nearest.astype(np.float64)
    if mode == "rz":
        wrong, toward = np.abs(nearest) > np.abs(x), np.float32(0)
    elif mode == "rp":
        wrong, toward = error > 0, np.float32(np.inf)
    else:
        wrong, toward = error < 0, np.float32(-np.inf)
    return np.where(wrong, np.nextafter(nearest, toward), nearest)


def single_to_odd(x: Array) -> Array:
    """Round binary64 to binary32 to odd."""
    nearest: Array = x.astype(np.float32)
    error = x - nearest.astype(np.float64)
    bits = nearest.view(np.int32)
    away = np.where((error > 0) != np.signbit(nearest), 1, -1).astype(np.int32)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(nearest)
    # Beyond the largest finite number "odd" is that number, so that a later rounding sees an overflow.
    overflow = np.isinf(nearest) & np.isfinite(x)
    out = np.where(inexact, bits + away, bits)
    return np.where(overflow, bits - 1, out).astype(np.int32).view(np.float32)


def from_bfloat(bits: Array) -> Array:
    """Return bfloat16 bits as binary32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(x: Array, mode: str = "rn") -> Array:
    """Round binary32 to bfloat16 bits; ``mode`` is rn or rz."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    upper = bits >> np.uint32(16)
    if mode == "rn":
        upper = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), upper).astype(np.uint16)


def round_to_half(x: Array, mode: str) -> Array:
    """Round binary64, exact or rounded to odd, to binary16; ``mode`` is rn or rz."""
    nearest: Array = x.astype(np.float16)
    if mode == "rn":
        return nearest
    wrong = (np.abs(nearest.astype(np.float64)) > np.abs(x)) & np.isfinite(x)
    cut = np.where(
        np.isinf(nearest), np.copysign(np.float16(_MAX_HALF), nearest), np.nextafter(nearest, np.float16(0))
    )
    return np.where(wrong, cut, nearest).astype(np.float16)


def widen(x: Array, kind: str) -> Array:
    """Return lanes of a floating-point type as binary64, exactly."""
    return (from_bfloat(x) if kind == "bf16" else x).astype(np.float64)


def narrow(x: Array, kind: str, mode: str) -> Array:
    """Round binary64, exact or rounded to odd, to lanes of ``kind``."""
    if kind == "f32":
        return round_to_single(x, mode)
    if kind == "bf16":
        return to_bfloat(single_to_odd(x), mode)
    if kind == "f16":
        return round_to_half(x, mode)
    return x


def flush(x: Array) -> Array:
    """Replace subnormal binary32 by zero of the same sign (``.ftz``)."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0 (``.sat``)."""
    return np.where(np.isnan(x), 0.0, np.clip(x, 0.0, 1.0)).astype(x.dtype)


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of binary64, through exact fractions."""
    plain = a * b + c
    out = plain.copy()
    for k in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[k])) * Fraction(float(b[k])) + Fraction(float(c[k]))
        if exact:
            try:
                out[k] = float(exact)
            except OverflowError:
                out[k] = np.inf if exact > 0 else -np.inf
    return out


def extreme(a: Array, b: Array, *, largest: bool, nan: bool) -> Array:
    """Return the minimum or maximum, with -0 below +0; ``nan`` says that one NaN makes the result NaN."""
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    chosen = np.fmax(a, b) if largest else np.fmin(a, b)
    x, y = np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits)
    zeros = ((x & y) if largest else (x | y)).view(a.dtype)
    chosen = np.where(a == b, zeros, chosen)
    missing = np.isnan(a) | np.isnan(b) if nan else np.isnan(a) & np.isnan(b)
    canonical = CANONICAL_NAN if a.dtype == np.float32 else a.dtype.type(np.nan)
    return np.where(missing, canonical, chosen)


APPROXIMATIONS: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
"""Computed in binary64 and rounded once; a device may differ by the error that the ISA allows it."""

COMPARISONS: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compare(name: str, a: Array, b: Array) -> Array:
    """Compare floats: ``lt`` is false for NaN, ``ltu`` true; ``num`` and ``nan`` ask for NaN alone."""
    missing = np.isnan(a) | np.isnan(b)
    if name == "nan":
        return missing
    if name == "num":
        return ~missing
    found: Array = COMPARISONS[name[:2]](a, b)
    return found | missing if name.endswith("u") and len(name) == 3 else found & ~missing
