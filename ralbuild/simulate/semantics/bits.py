"""Integer and bit functions on lanes, for what NumPy has no function of its own."""

from __future__ import annotations

import numpy as np

from ralbuild.simulate.lanes import DTYPES, Array
from ralbuild.simulate.ptx.model import BITS


def high_product(a: Array, b: Array, kind: str) -> Array:
    """Return the upper half of the full product of two integers of type ``kind``."""
    bits = BITS[kind]
    if bits < 64:
        wide = DTYPES[f"{kind[0]}{2 * bits}"]
        product: Array = a.astype(wide) * b.astype(wide)
        upper: Array = (product >> wide(bits)).astype(DTYPES[kind])
        return upper
    x, y = a.view(np.uint64), b.view(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    first = x1 * y0 + ((x0 * y0) >> half)
    second = x0 * y1 + (first & low)
    high: Array = x1 * y1 + (first >> half) + (second >> half)
    if kind == "s64":  # a negative factor was read as 2^64 too much
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(DTYPES[kind])


def quotient(a: Array, b: Array, kind: str) -> Array:
    """Divide toward zero. By zero the PTX ISA leaves the value open; here it is all ones."""
    dtype = DTYPES[kind]
    zero = b == 0
    if kind[0] == "u":
        return np.where(zero, dtype(np.iinfo(dtype).max), a // np.where(zero, dtype(1), b))
    unsigned = DTYPES[f"u{BITS[kind]}"]
    size = np.abs(a).view(unsigned) // np.where(zero, unsigned(1), np.abs(b).view(unsigned))
    signed: Array = np.where((a < 0) != (b < 0), unsigned(0) - size, size).view(dtype)
    return np.where(zero, dtype(-1), signed)


def remainder(a: Array, b: Array, kind: str) -> Array:
    """Return the remainder of `quotient`; its sign is that of ``a``."""
    rest: Array = a - quotient(a, b, kind) * b
    return np.where(b == 0, a, rest)


def extract_unsigned(a: Array, position: Array, length: Array) -> Array:
    """Return ``length`` bits of ``a`` from ``position``; bits past the top are zero."""
    at = np.minimum(position & 255, 64).astype(np.uint64)
    count = np.minimum(length & 255, 64).astype(np.uint64)
    kept: Array = (a.astype(np.uint64) >> at) & ~(~np.uint64(0) << count)
    return kept.astype(a.dtype)


def extract_signed(a: Array, position: Array, length: Array) -> Array:
    """Return the field extended by its top bit; past the top of ``a`` that is ``a``'s sign."""
    shifted = a.astype(np.int64) >> np.minimum(position & 255, 63).astype(np.int64)
    unused = (64 - np.minimum(length & 255, 64)).astype(np.int64)
    field: Array = (shifted << np.minimum(unused, 63)) >> np.minimum(unused, 63)
    return np.where(unused == 64, 0, field).astype(a.dtype)


def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """Put the low ``length`` bits of ``a`` into ``b`` at ``position``."""
    at, count = (position & 255).astype(np.uint64), (length & 255).astype(np.uint64)
    field = ~(~np.uint64(0) << count) << at
    merged: Array = (b.astype(np.uint64) & ~field) | ((a.astype(np.uint64) << at) & field)
    return merged.astype(b.dtype)


def permute(a: Array, b: Array, selector: Array) -> Array:
    """Pick four of the eight bytes of ``b:a``; bit 3 of a selector copies the byte's sign instead."""
    pool = np.stack([a, b], axis=1).view(np.uint8)
    out = np.empty((len(a), 4), np.uint8)
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
        byte = np.take_along_axis(pool, (nibble & 7).astype(np.intp)[:, None], axis=1)[:, 0]
        out[:, k] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
    return out.view(np.uint32)[:, 0]


def lookup(a: Array, b: Array, c: Array, table: int) -> Array:
    """Return the bitwise function of three inputs whose truth table is ``table``."""
    out = np.zeros_like(a)
    for k in range(8):
        if table >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out


def funnel_left(a: Array, b: Array, count: Array) -> Array:
    """Return the upper word of ``b:a`` shifted left by at most 32."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    return ((pair << count.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def funnel_right(a: Array, b: Array, count: Array) -> Array:
    """Return the lower word of ``b:a`` shifted right by at most 32."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    return (pair >> count.astype(np.uint64)).astype(np.uint32)


def leading_zeros(a: Array) -> Array:
    """Count zeros above the highest bit set; all of them for 0."""
    smeared = a
    bits = a.dtype.itemsize * 8
    for k in (1, 2, 4, 8, 16, 32):
        if k < bits:
            smeared = smeared | (smeared >> a.dtype.type(k))
    return (bits - np.bitwise_count(smeared)).astype(np.uint32)


def find_leading(a: Array, *, as_shift: bool) -> Array:
    """Return the place of the highest bit that is no sign bit, or the shift that brings it to the top."""
    bits = a.dtype.itemsize * 8
    unsigned = DTYPES[f"u{bits}"]
    value = (np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a).view(unsigned)
    zeros = leading_zeros(value)
    place = zeros if as_shift else np.uint32(bits - 1) - zeros
    return np.where(value == 0, np.uint32(0xFFFFFFFF), place)


def reverse(a: Array) -> Array:
    """Reverse the order of the bits."""
    width = a.dtype.itemsize
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, width), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]
