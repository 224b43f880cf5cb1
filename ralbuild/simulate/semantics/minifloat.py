"""The 8-bit formats e4m3 and e5m2 (PTX ISA, "Alternate Floating-Point Data Formats")."""

from __future__ import annotations

import functools

import numpy as np

from ralbuild.simulate.lanes import Array

_FRACTION_AND_BIAS = {"e5m2": (2, 15, 0x7B), "e4m3": (3, 7, 0x7E)}


@functools.cache
def _finite(kind: str) -> Array:
    """Return the finite values that are not negative, in the order of their codes."""
    fraction, bias, last = _FRACTION_AND_BIAS[kind]
    unit = 1 << fraction
    values = []
    for code in range(last + 1):
        exponent, digits = divmod(code, unit)
        values.append(
            digits * 2.0 ** (1 - bias - fraction)
            if exponent == 0
            else (1 + digits / unit) * 2.0 ** (exponent - bias)
        )
    return np.array(values)


def encode(x: Array, kind: str) -> Array:
    """Round to the nearest code, ties to even, beyond the largest finite value to that value."""
    values = _finite(kind)
    size = np.minimum(np.abs(np.nan_to_num(x.astype(np.float64), nan=0.0)), values[-1])
    upper = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    below, above = size - values[upper - 1], values[upper] - size
    take = (above < below) | ((above == below) & (upper % 2 == 0))
    code = np.where(take, upper, upper - 1)
    code = np.where(np.isnan(x), 0x7F, code)
    sign = np.where(np.signbit(x) & ~np.isnan(x), 0x80, 0)
    return (code | sign).astype(np.uint8)


def decode(code: Array, kind: str) -> Array:
    """Return codes as binary16, exactly."""
    special = [np.inf, np.nan, np.nan, np.nan] if kind == "e5m2" else [np.nan]
    size: Array = np.append(_finite(kind), special)[code & 0x7F]
    signed: Array = np.where(code & 0x80, -size, size).astype(np.float16)
    return signed
