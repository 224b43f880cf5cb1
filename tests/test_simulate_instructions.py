"""Every instruction form against a scalar model written from the text of the PTX ISA, or against torch.

Models use Python's whole numbers and fractions, so they share no arithmetic with the simulator. A model
returns None where the ISA leaves the value open.
"""

from __future__ import annotations

import math
import random
import struct
import subprocess
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from compile_support import toolchain
from simulate_support import HEAD, apply, one_instruction, program, run

from ralbuild.simulate.semantics import rows

ROWS = 384
EDGES = [0, 1, 2, 3, 7, 8, 15, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF,
         0x80000000, 0x80000001, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]  # fmt: skip
SINGLES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.5, 3.4028234e38, -3.4028234e38, 1e-45, -1e-45, 1.1754944e-38,
           1e-40, -1e-40, math.inf, -math.inf, math.nan, 65504.0, 65519.9, 65520.0, 65536.0, 1.00390625, 1.01171875,
           2147483648.0, -2147483648.0, 2147483520.0, 4294967296.0, 1e10, 448.0, 464.0, 57344.0, 61440.0]  # fmt: skip


def single(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def single_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def double(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def to_float(q: Fraction, mode: str, fraction: int, least: int, most: int, width: int) -> int:
    """Round an exact value, not zero, to IEEE bits: fraction bits, least and largest exponent."""
    sign, q = (1, -q) if q < 0 else (0, q)
    exponent = q.numerator.bit_length() - q.denominator.bit_length()
    while Fraction(2) ** exponent > q:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= q:
        exponent += 1
    exponent = max(exponent, least)
    scaled = q / Fraction(2) ** (exponent - fraction)
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    away = (mode == "rp" and not sign) or (mode == "rm" and sign)
    up = (
        rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1) if mode == "rn" else rest > 0 and away
    )
    whole += bool(up)
    if whole >> (fraction + 1):
        whole, exponent = whole >> 1, exponent + 1
    infinity = ((1 << (width - 1 - fraction)) - 1) << fraction
    if exponent > most:
        size = infinity if mode == "rn" or away else infinity - 1
    elif whole >> fraction:
        size = (exponent - least + 1) << fraction | (whole & ((1 << fraction) - 1))
    else:
        size = whole
    return sign << (width - 1) | size


def to_single(q: Fraction, mode: str = "rn") -> int:
    return to_float(q, mode, 23, -126, 127, 32)


def to_half(q: Fraction, mode: str = "rn") -> int:
    return to_float(q, mode, 10, -14, 15, 16)


def to_bfloat(q: Fraction, mode: str = "rn") -> int:
    return to_float(q, mode, 7, -126, 127, 16)


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def bfloat(bits: int) -> float:
    return single((bits & 0xFFFF) << 16)


Model = Callable[..., "int | None"]


def exact(function: Callable[..., Fraction | None], read=single, write=to_single, mode: str = "rn") -> Model:
    """A model of one rounding; it judges finite operands and results that are not zero."""

    def model(*bits: int) -> int | None:
        values = [read(x) for x in bits]
        if not all(math.isfinite(x) for x in values):
            return None
        q = function(*map(Fraction, values))
        return write(q, mode) if q else None

    return model


def flushed(function: Callable[..., Fraction | None]) -> Model:
    """The same with subnormal operands and results made zero; zeros are judged too."""

    def model(*bits: int) -> int | None:
        values = [single(x) for x in bits]
        if not all(math.isfinite(x) for x in values):
            return None
        values = [0.0 if abs(x) < 2.0**-126 else x for x in values]
        q = function(*map(Fraction, values))
        if not q:
            return None
        found = to_single(q)
        return found & 0x80000000 if not found >> 23 & 0xFF else found

    return model


def permute(a: int, b: int, selector: int) -> int:
    pool = struct.pack("<II", a, b)
    out = 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = pool[nibble & 7]
        out |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * k
    return out


def extract(is_signed: bool, width: int) -> Model:
    """The ISA's own loop over bits."""

    def model(a: int, b: int, c: int) -> int:
        position, length = b & 255, c & 255
        sign = 0 if not is_signed or length == 0 else a >> min(position + length - 1, width - 1) & 1
        out = 0
        for k in range(width):
            out |= ((a >> position + k) & 1 if k < length and position + k < width else sign) << k
        return out

    return model


def insert(width: int) -> Model:
    def model(a: int, b: int, c: int, d: int) -> int:
        position, length = c & 255, d & 255
        for k in range(length):
            if position + k < width and k < width:
                b = b & ~(1 << (position + k)) | (a >> k & 1) << (position + k)
        return b

    return model


def truth(table: int) -> Model:
    return lambda a, b, c: sum(
        (table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | c >> k & 1) & 1) << k for k in range(32)
    )


def quotient(a: int, b: int) -> int | None:
    return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int | None:
    return None if b == 0 else a - quotient(a, b) * b


def whole(mode: str, low: int, high: int, read=single) -> Model:
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]

    def model(a: int) -> int:
        x = read(a)
        if math.isnan(x):
            return 0
        return high if x >= high else low if x <= low else clamp(rounding(x), low, high)

    return model


def extreme(largest: bool, nan: bool = False) -> Model:
    def model(a: int, b: int) -> int:
        x, y = single(a), single(b)
        if math.isnan(x) or math.isnan(y):
            return 0x7FFFFFFF if nan or (math.isnan(x) and math.isnan(y)) else (b if math.isnan(x) else a)
        return (max if largest else min)((a, b), key=lambda bits: (single(bits), -(bits >> 31)))

    return model


def ordered(function: Callable[[float, float], bool], on_nan: bool) -> Model:
    def model(a: int, b: int) -> int:
        x, y = single(a), single(b)
        return int(on_nan if math.isnan(x) or math.isnan(y) else function(x, y))

    return model


def torch_cast(dtype: torch.dtype) -> Model:
    """torch's conversion of binary32: independent of NumPy's."""

    def model(a: int) -> int | None:
        x = single(a)
        return None if math.isnan(x) else torch.tensor([x]).to(dtype).view(torch.int16).item() & 0xFFFF

    return model


def torch_pack(dtype: torch.dtype, most: float) -> Model:
    def model(a: int, b: int) -> int | None:
        x = torch.tensor([single(b), single(a)])
        if x.isnan().any():
            return None
        return int.from_bytes(bytes(x.clamp(-most, most).to(dtype).view(torch.uint8).tolist()), "little")

    return model


def torch_unpack(dtype: torch.dtype) -> Model:
    def model(a: int) -> int | None:
        x = torch.tensor([a & 255, a >> 8], dtype=torch.uint8).view(dtype).to(torch.float16)
        return None if x.isnan().any() else int.from_bytes(x.view(torch.uint8).numpy().tobytes(), "little")

    return model


def approximately(function: Callable[[float], float]) -> Model:
    """The exact value rounded once; where that is a tie within binary64's own error, nothing is judged."""

    def model(a: int) -> int | None:
        x = single(a)
        try:
            y = function(x) if math.isfinite(x) else math.nan
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
        if not math.isfinite(y) or y == 0:
            return None
        near = {to_single(Fraction(y) * (1 + Fraction(k, 1 << 50))) for k in (-1, 0, 1)}
        return near.pop() if len(near) == 1 else None

    return model


def funnel(a: int, b: int) -> int:
    return b << 32 | a


I32, I64, H16, F32, F64 = "i32", "i64", "h16", "f32", "f64"
M32, M64 = (1 << 32) - 1, (1 << 64) - 1
add, sub, mul = (lambda a, b: a + b), (lambda a, b: a - b), (lambda a, b: a * b)
fma = lambda a, b, c: a * b + c  # noqa: E731
div = lambda a, b: a / b if b else None  # noqa: E731

CASES: list[tuple[str, str, int, Model]] = [
    ("add.s32 d, a, b", "i32 i32", 32, add),
    ("sub.u64 d, a, b", "i64 i64", 64, sub),
    ("add.u16 d, a, b", "h16 h16", 16, add),
    ("add.sat.s32 d, a, b", "i32 i32", 32, lambda a, b: clamp(signed(a) + signed(b), -1 << 31, (1 << 31) - 1)),
    ("sub.sat.s32 d, a, b", "i32 i32", 32, lambda a, b: clamp(signed(a) - signed(b), -1 << 31, (1 << 31) - 1)),
    ("mul.lo.s32 d, a, b", "i32 i32", 32, mul),
    ("mul.lo.u16 d, a, b", "h16 h16", 16, mul),
    ("mul.lo.s64 d, a, b", "i64 i64", 64, mul),
    ("mul.hi.u32 d, a, b", "i32 i32", 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32 d, a, b", "i32 i32", 32, lambda a, b: signed(a) * signed(b) >> 32),
    ("mul.hi.u16 d, a, b", "h16 h16", 16, lambda a, b: a * b >> 16),
    ("mul.hi.u64 d, a, b", "i64 i64", 64, lambda a, b: a * b >> 64),
    ("mul.hi.s64 d, a, b", "i64 i64", 64, lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
    ("mul.wide.s32 d, a, b", "i32 i32", 64, lambda a, b: signed(a) * signed(b)),
    ("mul.wide.u32 d, a, b", "i32 i32", 64, mul),
    ("mul.wide.s16 d, a, b", "h16 h16", 32, lambda a, b: signed(a, 16) * signed(b, 16)),
    ("mad.lo.s32 d, a, b, c", "i32 i32 i32", 32, fma),
    ("mad.hi.u32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: (a * b >> 32) + c),
    ("mad.wide.s32 d, a, b, c", "i32 i32 i64", 64, lambda a, b, c: signed(a) * signed(b) + c),
    ("mad.wide.u16 d, a, b, c", "h16 h16 i32", 32, fma),
    ("mul24.lo.u32 d, a, b", "i32 i32", 32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("mul24.lo.s32 d, a, b", "i32 i32", 32, lambda a, b: signed(a, 24) * signed(b, 24)),
    ("mad24.lo.s32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    ("sad.s32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: abs(signed(a) - signed(b)) + c),
    ("sad.u16 d, a, b, c", "h16 h16 h16", 16, lambda a, b, c: abs(a - b) + c),
    ("div.s32 d, a, b", "i32 i32", 32, lambda a, b: quotient(signed(a), signed(b))),
    ("div.u32 d, a, b", "i32 i32", 32, quotient),
    ("rem.s32 d, a, b", "i32 i32", 32, lambda a, b: remainder(signed(a), signed(b))),
    ("div.s64 d, a, b", "i64 i64", 64, lambda a, b: quotient(signed(a, 64), signed(b, 64))),
    ("rem.u64 d, a, b", "i64 i64", 64, remainder),
    ("rem.s16 d, a, b", "h16 h16", 16, lambda a, b: remainder(signed(a, 16), signed(b, 16))),
    ("abs.s32 d, a", "i32", 32, lambda a: abs(signed(a))),
    ("neg.s64 d, a", "i64", 64, lambda a: -a),
    ("not.b32 d, a", "i32", 32, lambda a: ~a),
    ("cnot.b32 d, a", "i32", 32, lambda a: int(a == 0)),
    ("min.s32 d, a, b", "i32 i32", 32, lambda a, b: min(signed(a), signed(b))),
    ("max.u64 d, a, b", "i64 i64", 64, max),
    ("and.b32 d, a, b", "i32 i32", 32, lambda a, b: a & b),
    ("or.b64 d, a, b", "i64 i64", 64, lambda a, b: a | b),
    ("xor.b16 d, a, b", "h16 h16", 16, lambda a, b: a ^ b),
    ("shl.b32 d, a, b", "i32 i32", 32, lambda a, b: a << min(b, 64)),
    ("shl.b16 d, a, b", "h16 i32", 16, lambda a, b: a << min(b, 64)),
    ("shl.b64 d, a, b", "i64 i32", 64, lambda a, b: a << min(b, 99)),
    ("shl.b32 d, a, 33", "i32", 32, lambda a: 0),
    ("shr.u32 d, a, b", "i32 i32", 32, lambda a, b: a >> min(b, 64)),
    ("shr.s32 d, a, b", "i32 i32", 32, lambda a, b: signed(a) >> min(b, 64)),
    ("shr.s64 d, a, b", "i64 i32", 64, lambda a, b: signed(a, 64) >> min(b, 99)),
    ("shr.s16 d, a, b", "h16 i32", 16, lambda a, b: signed(a, 16) >> min(b, 64)),
    ("shr.s32 d, a, 40", "i32", 32, lambda a: signed(a) >> 31),
    ("shf.l.wrap.b32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: (funnel(a, b) << (c & 31)) >> 32),
    ("shf.l.clamp.b32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: (funnel(a, b) << min(c, 32)) >> 32),
    ("shf.r.wrap.b32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: funnel(a, b) >> (c & 31)),
    ("shf.r.clamp.b32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: funnel(a, b) >> min(c, 32)),
    ("bfe.u32 d, a, b, c", "i32 i32 i32", 32, extract(False, 32)),
    ("bfe.s32 d, a, b, c", "i32 i32 i32", 32, extract(True, 32)),
    ("bfe.u64 d, a, b, c", "i64 i32 i32", 64, extract(False, 64)),
    ("bfe.s64 d, a, b, c", "i64 i32 i32", 64, extract(True, 64)),
    ("bfi.b32 d, a, b, c, e", "i32 i32 i32 i32", 32, insert(32)),
    ("bfi.b64 d, a, b, c, e", "i64 i64 i32 i32", 64, insert(64)),
    ("prmt.b32 d, a, b, c", "i32 i32 i32", 32, permute),
    ("lop3.b32 d, a, b, c, 0xCA", "i32 i32 i32", 32, truth(0xCA)),
    ("lop3.b32 d, a, b, c, 0x96", "i32 i32 i32", 32, truth(0x96)),
    ("popc.b32 d, a", "i32", 32, lambda a: a.bit_count()),
    ("popc.b64 d, a", "i64", 32, lambda a: a.bit_count()),
    ("clz.b32 d, a", "i32", 32, lambda a: 32 - a.bit_length()),
    ("clz.b64 d, a", "i64", 32, lambda a: 64 - a.bit_length()),
    ("brev.b32 d, a", "i32", 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev.b64 d, a", "i64", 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind.u32 d, a", "i32", 32, lambda a: a.bit_length() - 1),
    ("bfind.s32 d, a", "i32", 32, lambda a: (~a & M32 if a >> 31 else a).bit_length() - 1),
    ("bfind.shiftamt.u64 d, a", "i64", 32, lambda a: 64 - a.bit_length() if a else -1),
    ("cvt.s32.s8 d, a", "i32", 32, lambda a: signed(a, 8)),
    ("cvt.u32.u8 d, a", "i32", 32, lambda a: a & 255),
    ("cvt.u16.u32 d, a", "i32", 16, lambda a: a),
    ("cvt.s64.s32 d, a", "i32", 64, signed),
    ("cvt.u64.u16 d, a", "h16", 64, lambda a: a),
    ("cvt.s16.s8 d, a", "h16", 16, lambda a: signed(a, 8)),
    ("cvt.u32.s16 d, a", "h16", 32, lambda a: signed(a, 16)),
    ("cvt.u8.u32 d, a", "i32", 32, lambda a: a & 255),
    ("cvt.s8.s32 d, a", "i32", 32, lambda a: signed(a, 8)),
    ("cvt.sat.s8.s32 d, a", "i32", 32, lambda a: clamp(signed(a), -128, 127)),
    ("cvt.sat.u8.s32 d, a", "i32", 32, lambda a: clamp(signed(a), 0, 255)),
    ("cvt.sat.s32.u32 d, a", "i32", 32, lambda a: min(a, (1 << 31) - 1)),
    ("cvt.sat.u16.s64 d, a", "i64", 16, lambda a: clamp(signed(a, 64), 0, 65535)),
    ("cvt.rn.f32.s32 d, a", "i32", 32, lambda a: to_single(Fraction(signed(a))) if a else 0),
    ("cvt.rz.f32.u32 d, a", "i32", 32, lambda a: to_single(Fraction(a), "rz") if a else 0),
    ("cvt.rm.f32.s32 d, a", "i32", 32, lambda a: to_single(Fraction(signed(a)), "rm") if a else 0),
    ("cvt.rn.f32.u64 d, a", "i64", 32, lambda a: to_single(Fraction(a)) if a else 0),
    ("cvt.rz.f32.s64 d, a", "i64", 32, lambda a: to_single(Fraction(signed(a, 64)), "rz") if a else 0),
    ("cvt.rn.f16.u32 d, a", "i32", 16, lambda a: to_half(Fraction(a)) if a else 0),
    ("cvt.rn.f16.s64 d, a", "i64", 16, lambda a: to_half(Fraction(signed(a, 64))) if a else 0),
    ("cvt.rn.f64.s64 d, a", "i64", 64, lambda a: to_float(Fraction(signed(a, 64)), "rn", 52, -1022, 1023, 64) if a else 0),
    ("cvt.rzi.s32.f32 d, a", "f32", 32, whole("rzi", -1 << 31, (1 << 31) - 1)),
    ("cvt.rni.s32.f32 d, a", "f32", 32, whole("rni", -1 << 31, (1 << 31) - 1)),
    ("cvt.rmi.s64.f32 d, a", "f32", 64, whole("rmi", -1 << 63, (1 << 63) - 1)),
    ("cvt.rpi.u32.f32 d, a", "f32", 32, whole("rpi", 0, M32)),
    ("cvt.rzi.u64.f32 d, a", "f32", 64, whole("rzi", 0, M64)),
    ("cvt.rzi.s64.f64 d, a", "f64", 64, whole("rzi", -1 << 63, (1 << 63) - 1, double)),
    ("cvt.rni.s16.f16 d, a", "h16", 16, whole("rni", -1 << 15, (1 << 15) - 1, half)),
    ("cvt.rn.f16.f32 d, a", "f32", 16, torch_cast(torch.float16)),
    ("cvt.rn.bf16.f32 d, a", "f32", 16, torch_cast(torch.bfloat16)),
    ("cvt.rz.bf16.f32 d, a", "f32", 16, lambda a: a >> 16 if math.isfinite(single(a)) else None),
    ("cvt.rz.f16.f32 d, a", "f32", 16, exact(lambda a: a, write=to_half, mode="rz")),
    ("cvt.f32.f16 d, a", "h16", 32, lambda a: None if math.isnan(half(a)) else single_bits(half(a))),
    ("cvt.f32.bf16 d, a", "h16", 32, lambda a: None if math.isnan(bfloat(a)) else a << 16),
    ("cvt.f64.f32 d, a", "f32", 64, lambda a: None if math.isnan(single(a)) else struct.unpack("<Q", struct.pack("<d", single(a)))[0]),
    ("cvt.rn.f32.f64 d, a", "f64", 32, exact(lambda a: a, read=double)),
    ("cvt.rp.f32.f64 d, a", "f64", 32, exact(lambda a: a, read=double, mode="rp")),
    ("cvt.rn.ftz.f32.f64 d, a", "f64", 32, lambda a: flush_model(exact(lambda x: x, read=double)(a))),
    ("cvt.rni.f32.f32 d, a", "f32", 32, lambda a: single_bits(float(round(single(a)))) if 0 < abs(single(a)) < 1e9 and round(single(a)) else None),
    ("cvt.sat.f32.f32 d, a", "f32", 32, lambda a: 0 if math.isnan(single(a)) else None if single(a) == 0 else single_bits(min(1.0, max(0.0, single(a))))),
    ("cvt.rn.bf16x2.f32 d, a, b", "f32 f32", 32, lambda a, b: None if math.isnan(single(a) + single(b)) else torch_cast(torch.bfloat16)(a) << 16 | torch_cast(torch.bfloat16)(b)),
    ("cvt.rn.relu.f16x2.f32 d, a, b", "f32 f32", 32, lambda a, b: None if math.isnan(single(a)) or math.isnan(single(b)) else
     torch_cast(torch.float16)(single_bits(max(0.0, single(a)) + 0.0)) << 16 | torch_cast(torch.float16)(single_bits(max(0.0, single(b)) + 0.0))),
    ("cvt.rn.satfinite.e5m2x2.f32 d, a, b", "f32 f32", 16, torch_pack(torch.float8_e5m2, 57344.0)),
    ("cvt.rn.satfinite.e4m3x2.f32 d, a, b", "f32 f32", 16, torch_pack(torch.float8_e4m3fn, 448.0)),
    ("cvt.rn.f16x2.e5m2x2 d, a", "h16", 32, torch_unpack(torch.float8_e5m2)),
    ("cvt.rn.f16x2.e4m3x2 d, a", "h16", 32, torch_unpack(torch.float8_e4m3fn)),
    ("cvt.rna.tf32.f32 d, a", "f32", 32, lambda a: (a + 0x1000) & 0xFFFFE000 if math.isfinite(single(a)) else None),
    ("add.f32 d, a, b", "f32 f32", 32, exact(add)),
    ("sub.rz.f32 d, a, b", "f32 f32", 32, exact(sub, mode="rz")),
    ("add.rm.f32 d, a, b", "f32 f32", 32, exact(add, mode="rm")),
    ("add.ftz.f32 d, a, b", "f32 f32", 32, flushed(add)),
    ("mul.f32 d, a, b", "f32 f32", 32, exact(mul)),
    ("mul.rp.f32 d, a, b", "f32 f32", 32, exact(mul, mode="rp")),
    ("mul.ftz.f32 d, a, b", "f32 f32", 32, flushed(mul)),
    ("div.rn.f32 d, a, b", "f32 f32", 32, exact(div)),
    ("div.full.f32 d, a, b", "f32 f32", 32, exact(div)),
    ("fma.rn.f32 d, a, b, c", "f32 f32 f32", 32, exact(fma)),
    ("fma.rn.ftz.f32 d, a, b, c", "f32 f32 f32", 32, flushed(fma)),
    ("fma.rz.f32 d, a, b, c", "f32 f32 f32", 32, exact(fma, mode="rz")),
    ("fma.rp.f32 d, a, b, c", "f32 f32 f32", 32, exact(fma, mode="rp")),
    ("fma.rm.f32 d, a, b, c", "f32 f32 f32", 32, exact(fma, mode="rm")),
    ("add.sat.f32 d, a, b", "f32 f32", 32, lambda a, b: saturated(exact(add)(a, b))),
    ("mul.f64 d, a, b", "f64 f64", 64, exact(mul, double, lambda q, m: to_float(q, m, 52, -1022, 1023, 64))),
    ("fma.rn.f64 d, a, b, c", "f64 f64 f64", 64, exact(fma, double, lambda q, m: to_float(q, m, 52, -1022, 1023, 64))),
    ("neg.f32 d, a", "f32", 32, lambda a: None if math.isnan(single(a)) else a ^ 0x80000000),
    ("abs.f32 d, a", "f32", 32, lambda a: None if math.isnan(single(a)) else a & 0x7FFFFFFF),
    ("neg.f16x2 d, a", "i32", 32, lambda a: a ^ 0x80008000),
    ("min.f32 d, a, b", "f32 f32", 32, extreme(False)),
    ("max.f32 d, a, b", "f32 f32", 32, extreme(True)),
    ("max.NaN.f32 d, a, b", "f32 f32", 32, extreme(True, nan=True)),
    ("copysign.f32 d, a, b", "f32 f32", 32, lambda a, b: None if math.isnan(single(b)) else (a & 0x80000000) | (b & 0x7FFFFFFF)),
    ("testp.subnormal.f32 d, a", "f32", 1, lambda a: int(0 < abs(single(a)) < 2.0**-126)),
    ("testp.notanumber.f32 d, a", "f32", 1, lambda a: int(math.isnan(single(a)))),
    ("ex2.approx.f32 d, a", "f32", 32, approximately(lambda x: 2.0**x)),
    ("lg2.approx.f32 d, a", "f32", 32, approximately(math.log2)),
    ("rcp.approx.f32 d, a", "f32", 32, exact(lambda a: 1 / a if a else None)),
    ("rcp.rn.f32 d, a", "f32", 32, exact(lambda a: 1 / a if a else None)),
    ("sqrt.rn.f32 d, a", "f32", 32, approximately(math.sqrt)),
    ("rsqrt.approx.f32 d, a", "f32", 32, approximately(lambda x: 1 / math.sqrt(x))),
    ("sin.approx.f32 d, a", "f32", 32, approximately(math.sin)),
    ("tanh.approx.f32 d, a", "f32", 32, approximately(math.tanh)),
    ("add.f16 d, a, b", "h16 h16", 16, exact(add, half, to_half)),
    ("mul.f16 d, a, b", "h16 h16", 16, exact(mul, half, to_half)),
    ("fma.rn.f16 d, a, b, c", "h16 h16 h16", 16, exact(fma, half, to_half)),
    ("sub.bf16 d, a, b", "h16 h16", 16, exact(sub, bfloat, to_bfloat)),
    ("mul.bf16 d, a, b", "h16 h16", 16, exact(mul, bfloat, to_bfloat)),
    ("fma.rn.bf16 d, a, b, c", "h16 h16 h16", 16, exact(fma, bfloat, to_bfloat)),
    ("fma.rn.f16x2 d, a, b, c", "i32 i32 i32", 32, lambda *x: paired(exact(fma, half, to_half), *x)),
    ("add.bf16x2 d, a, b", "i32 i32", 32, lambda *x: paired(exact(add, bfloat, to_bfloat), *x)),
    ("setp.eq.b32 d, a, b", "i32 i32", 1, lambda a, b: int(a == b)),
    ("setp.lt.s32 d, a, b", "i32 i32", 1, lambda a, b: int(signed(a) < signed(b))),
    ("setp.ge.u32 d, a, b", "i32 i32", 1, lambda a, b: int(a >= b)),
    ("setp.hi.u32 d, a, b", "i32 i32", 1, lambda a, b: int(a > b)),
    ("setp.ne.b64 d, a, b", "i64 i64", 1, lambda a, b: int(a != b)),
    ("setp.gt.s16 d, a, b", "h16 h16", 1, lambda a, b: int(signed(a, 16) > signed(b, 16))),
    ("setp.lt.f32 d, a, b", "f32 f32", 1, ordered(lambda x, y: x < y, on_nan=False)),
    ("setp.ne.f32 d, a, b", "f32 f32", 1, ordered(lambda x, y: x != y, on_nan=False)),
    ("setp.neu.f32 d, a, b", "f32 f32", 1, ordered(lambda x, y: x != y, on_nan=True)),
    ("setp.gtu.f32 d, a, b", "f32 f32", 1, ordered(lambda x, y: x > y, on_nan=True)),
    ("setp.num.f32 d, a, b", "f32 f32", 1, ordered(lambda x, y: True, on_nan=False)),
    ("setp.nan.f32 d, a, b", "f32 f32", 1, ordered(lambda x, y: False, on_nan=True)),
    ("set.lt.u32.f32 d, a, b", "f32 f32", 32, lambda a, b: M32 if single(a) < single(b) else 0),
    ("set.eq.f32.s32 d, a, b", "i32 i32", 32, lambda a, b: 0x3F800000 if a == b else 0),
    ("slct.u32.s32 d, a, b, c", "i32 i32 i32", 32, lambda a, b, c: a if signed(c) >= 0 else b),
    ("slct.u32.f32 d, a, b, c", "i32 i32 f32", 32, lambda a, b, c: a if single(c) >= 0 else b),
    ("mov.b32 d, a", "i32", 32, lambda a: a),
    ("mov.f64 d, a", "f64", 64, lambda a: a),
]  # fmt: skip


def saturated(bits: int | None) -> int | None:
    if bits is None:
        return None
    return single_bits(min(1.0, max(0.0, single(bits))))


def flush_model(bits: int | None) -> int | None:
    return bits if bits is None or bits >> 23 & 0xFF else bits & 0x80000000


def paired(model: Model, *words: int) -> int | None:
    parts = [model(*(word >> k & 0xFFFF for word in words)) for k in (0, 16)]
    return None if None in parts else parts[1] << 16 | parts[0]


WIDTHS = {I32: 32, I64: 64, H16: 16, F32: 32, F64: 64}


def operands(kind: str, rng: random.Random) -> int:
    if kind == F32:
        choice = rng.random()
        if choice < 0.25:
            return single_bits(rng.choice(SINGLES))
        if choice < 0.9:
            digits = rng.getrandbits(23) & rng.choice([0x7FFFFF, 0x7FF000, 0x600000])
            return rng.getrandbits(1) << 31 | rng.randrange(110, 145) << 23 | digits
        return rng.getrandbits(32)
    if kind == F64:
        exponent = rng.choice([rng.randrange(1023 - 160, 1023 + 160), rng.randrange(1023 - 2, 1023 + 66)])
        digits = rng.getrandbits(52) & rng.choice([(1 << 52) - 1, 0xFFFFFFE000000, 0xFFFFFFF000000])
        return rng.getrandbits(1) << 63 | exponent << 52 | digits
    width = WIDTHS[kind]
    value = rng.choice(EDGES) if rng.random() < 0.4 else rng.getrandbits(width) >> rng.randrange(width)
    return value & ((1 << width) - 1)


@pytest.mark.parametrize(
    ("instruction", "kinds", "width", "model"), CASES, ids=[case[0].split()[0] for case in CASES]
)
def test_an_instruction_agrees_with_its_scalar_model(
    instruction: str, kinds: str, width: int, model: Model
) -> None:
    rng = random.Random(instruction)
    names = kinds.split()
    table = [[operands(kind, rng) for kind in names] for _ in range(ROWS)]
    columns = [np.array([row[n] for row in table], f"uint{WIDTHS[kind]}") for n, kind in enumerate(names)]
    out = np.dtype(np.bool_) if width == 1 else np.dtype(f"uint{width}")
    found = apply(instruction, columns, out)
    judged = 0
    for row, got in zip(table, found.tolist(), strict=True):
        wanted = model(*row)
        if wanted is not None:
            judged += 1
            assert int(got) == wanted & ((1 << width) - 1), f"{instruction} of {[hex(x) for x in row]}"
    assert judged >= ROWS // 4


def test_ptxas_takes_every_instruction_tested_here(tmp_path: Path) -> None:
    """So that the forms are PTX's and not ours."""
    text = HEAD
    for number, (instruction, kinds, width, _) in enumerate(CASES):
        out = np.dtype(np.bool_) if width == 1 else np.dtype(f"uint{width}")
        sizes = [WIDTHS[kind] // 8 for kind in kinds.split()]
        one = one_instruction(instruction, sizes, out).removeprefix(HEAD)
        text += one.replace(".entry t(", f".entry t{number}(")
    (tmp_path / "all.ptx").write_text(text)
    command = [str(toolchain().ptxas), "-arch=sm_90a", "all.ptx", "-o", "all.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_row_of_the_table_names_a_section_and_matches_something() -> None:
    table = rows()
    assert len(table) > 100
    for item in table:
        assert item.section.partition(": ")[2], item.pattern
        assert item.operands


def test_boolean_setp_writes_both_predicates() -> None:
    """p = (a < b) and c; q = !(a < b) and c (PTX ISA, setp)."""
    a, b = np.arange(64, dtype=np.int32) % 7, np.arange(64, dtype=np.int32) % 5
    out = np.zeros(64, np.int32)
    run(
        program(
            """mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; add.u64 %rd4, %rd1, %rd9; add.u64 %rd5, %rd2, %rd9;
ld.global.b32 %r1, [%rd3]; ld.global.b32 %r2, [%rd4];
setp.gt.u32 %p3, %i, 20;
setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;
selp.b32 %r3, 1, 0, %p1; selp.b32 %r4, 2, 0, %p2; or.b32 %r5, %r3, %r4;
st.global.b32 [%rd5], %r5; ret;""",
            3,
        ),
        a,
        b,
        out,
        blocks=2,
    )
    for k in range(64):
        third = not k > 20
        assert out[k] == (1 if a[k] < b[k] else 2) * third


def test_moves_pack_and_unpack_with_the_first_element_lowest() -> None:
    a, out = np.arange(32, dtype=np.uint64) * 0x0123456789, np.zeros((32, 2), np.uint64)
    run(
        program("""mul.wide.u32 %rd9, %i, 8; add.u64 %rd3, %rd0, %rd9; mul.wide.u32 %rd9, %i, 16; add.u64 %rd4, %rd1, %rd9;
ld.global.b64 %rd5, [%rd3]; mov.b64 {%r1, %r2}, %rd5; mov.b64 %rd6, {%r2, %r1};
mov.b32 {%h1, %h2}, %r1; mov.b32 %r3, {%h2, %h1}; cvt.u64.u32 %rd7, %r3;
st.global.v2.b64 [%rd4], {%rd6, %rd7}; ret;""", 2), a, out)  # fmt: skip
    for k, value in enumerate(a.tolist()):
        low, high = value & M32, value >> 32
        assert out[k].tolist() == [low << 32 | high, (low & 0xFFFF) << 16 | low >> 16]


@pytest.mark.parametrize(("load", "wanted"), [
    ("ld.global.s8", lambda x: signed(x, 8)), ("ld.global.u8", lambda x: x), ("ld.global.b8", lambda x: x),
])  # fmt: skip
def test_narrow_loads_extend_to_the_register(load: str, wanted: Callable[[int], int]) -> None:
    data, out = np.arange(0, 256, 8, dtype=np.uint8), np.zeros(32, np.int32)
    run(program(f"""cvt.u64.u32 %rd9, %i; add.u64 %rd3, %rd0, %rd9; mul.wide.u32 %rd9, %i, 4; add.u64 %rd4, %rd1, %rd9;
{load} %r1, [%rd3]; st.global.b32 [%rd4], %r1; ret;""", 2), data, out)  # fmt: skip
    assert out.tolist() == [wanted(int(x)) for x in data]


def test_cache_operators_and_vectors_change_no_value() -> None:
    a, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    run(program("""mul.wide.u32 %rd9, %i, 16; add.u64 %rd3, %rd0, %rd9; add.u64 %rd4, %rd1, %rd9;
ld.global.nc.L1::evict_first.L2::128B.v4.f32 {%r1, %r2, %r3, %r4}, [%rd3+0];
st.global.cs.v2.b32 [%rd4+8], {%r3, %r4}; st.global.wt.v2.b32 [%rd4], {%r1, %r2}; ret;""", 2), a, out)  # fmt: skip
    assert (a == out).all()


def atomic(
    operation: str, values: np.ndarray, cell: np.ndarray, count: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    old = np.zeros(len(values), cell.dtype)
    width = 8 * cell.itemsize
    register = {16: "%h", 32: "%r", 64: "%rd"}[width]
    base = {16: (1, 2), 32: (1, 2), 64: (11, 12)}[width]
    value, result = f"{register}{base[0]}", f"{register}{base[1]}"
    operand = f"{value}, {register}{base[1] + 1}" if "cas" in operation else value
    prepare = f"mov.b{width} {register}{base[1] + 1}, 77;" if "cas" in operation else ""
    run(program(f"""mul.wide.u32 %rd9, %i, {cell.itemsize}; add.u64 %rd3, %rd0, %rd9; add.u64 %rd4, %rd2, %rd9; {prepare}
ld.global.b{width} {value}, [%rd3]; {operation} {result}, [%rd1], {operand};
st.global.b{width} [%rd4], {result}; ret;""", 3), values, cell, old)  # fmt: skip
    return old, cell


@pytest.mark.parametrize(
    ("operation", "dtype", "step"),
    [
        ("atom.global.gpu.acq_rel.add.u32", np.uint32, lambda c, v: (c + v) & M32),
        ("atom.global.add.u64", np.uint64, lambda c, v: (c + v) & M64),
        ("atom.relaxed.cta.global.min.s32", np.int32, min),
        ("atom.global.max.u32", np.uint32, max),
        ("atom.global.and.b32", np.uint32, lambda c, v: c & v),
        ("atom.global.xor.b32", np.uint32, lambda c, v: c ^ v),
        ("atom.global.exch.b32", np.uint32, lambda c, v: v),
        ("atom.global.inc.u32", np.uint32, lambda c, v: 0 if c >= v else c + 1),
        ("atom.global.dec.u32", np.uint32, lambda c, v: v if c == 0 or c > v else c - 1),
        ("atom.global.cas.b32", np.uint32, lambda c, v: 77 if c == v else c),
        ("atom.global.add.f32", np.float32, lambda c, v: float(np.float32(c) + np.float32(v))),
        ("atom.global.add.noftz.f16", np.float16, lambda c, v: float(np.float16(c) + np.float16(v))),
    ],
)
def test_atomics_return_the_old_value_and_lose_no_update(operation: str, dtype: type, step: Callable) -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(0, 9, 32).astype(dtype)
    start = np.array([values[5]], dtype)
    old, cell = atomic(operation, values, start.copy())
    current = start[0].item()
    for lane in range(32):
        assert old[lane].item() == current
        current = step(current, values[lane].item())
    assert cell[0].item() == current


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudocode of shfl.sync in the ISA."""
    bval, cval, seg = b & 31, c & 31, c >> 8 & 31
    maximum = (lane & seg) | (cval & ~seg & 31)
    minimum = lane & seg
    if mode == "up":
        j = lane - bval
        valid = j >= maximum
    elif mode == "down":
        j, valid = lane + bval, lane + bval <= maximum
    elif mode == "bfly":
        j, valid = lane ^ bval, lane ^ bval <= maximum
    else:
        j = minimum | (bval & ~seg & 31)
        valid = j <= maximum
    return (j if valid else lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("clamp_word", [0, 31, 0x181F, 0x1C03, 0x1000])
def test_shuffles_follow_the_isas_pseudocode(mode: str, clamp_word: int) -> None:
    data = np.arange(64, dtype=np.int32) * 3 + 1
    for distance in (0, 1, 3, 8, 17, 31):
        out = np.zeros(64, np.int32)
        run(program(f"""mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; add.u64 %rd4, %rd1, %rd9;
ld.global.b32 %r1, [%rd3]; shfl.sync.{mode}.b32 %r2|%p1, %r1, {distance}, {clamp_word}, -1;
selp.b32 %r3, 1000, 0, %p1; add.u32 %r4, %r2, %r3; st.global.b32 [%rd4], %r4; ret;""", 2), data, out, blocks=2)  # fmt: skip
        for lane in range(64):
            source, valid = shuffled(mode, lane % 32, distance, clamp_word)
            assert out[lane] == data[lane // 32 * 32 + source] + 1000 * valid


def warp_results(body: str, values: Sequence[int], threads: int = 64) -> list[int]:
    data, out = np.array(values, np.uint32), np.zeros(len(values), np.uint32)
    run(program(f"""mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; add.u64 %rd4, %rd1, %rd9;
ld.global.b32 %r1, [%rd3];\n{body}\nst.global.b32 [%rd4], %r2; ret;""", 2, threads), data, out)  # fmt: skip
    return out.tolist()


def test_votes_reductions_and_matches_see_their_own_warp_only() -> None:
    rng = random.Random(8)
    values = [rng.choice([3, 3, 5, rng.getrandbits(32)]) for _ in range(64)]
    warps = [values[:32], values[32:]]

    def each(function: Callable[[list[int], int], int]) -> list[int]:
        return [function(warp, lane) & M32 for warp in warps for lane in range(32)]

    ballot = warp_results("setp.eq.u32 %p1, %r1, 3; vote.sync.ballot.b32 %r2, %p1, -1;", values)
    assert ballot == each(lambda warp, lane: sum((x == 3) << k for k, x in enumerate(warp)))
    some = warp_results(
        "setp.gt.u32 %p1, %r1, 5; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r2, 1, 0, %p2;", values
    )
    assert some == each(lambda warp, lane: int(any(x > 5 for x in warp)))
    every = warp_results(
        "setp.gt.u32 %p1, %r1, 2; vote.sync.all.pred %p2, !%p1, -1; selp.b32 %r2, 1, 0, %p2;", values
    )
    assert every == each(lambda warp, lane: int(all(not x > 2 for x in warp)))
    assert warp_results("redux.sync.add.u32 %r2, %r1, -1;", values) == each(lambda warp, lane: sum(warp))
    assert warp_results("redux.sync.min.s32 %r2, %r1, -1;", values) == each(
        lambda warp, lane: min(map(signed, warp))
    )
    match = warp_results("match.any.sync.b32 %r2, %r1, -1;", values)
    assert match == each(lambda warp, lane: sum((x == warp[lane]) << k for k, x in enumerate(warp)))


def test_lane_masks_and_special_registers() -> None:
    names = {"laneid": lambda t: t % 32, "warpid": lambda t: t // 32, "tid.x": lambda t: t, "ntid.x": lambda t: 64,
             "nctaid.x": lambda t: 1, "ctaid.x": lambda t: 0, "lanemask_lt": lambda t: (1 << t % 32) - 1,
             "lanemask_ge": lambda t: M32 ^ ((1 << t % 32) - 1), "lanemask_eq": lambda t: 1 << t % 32}  # fmt: skip
    for name, wanted in names.items():
        assert warp_results(f"mov.u32 %r2, %{name};", [0] * 64) == [wanted(t) for t in range(64)]


@pytest.mark.parametrize(
    ("kind", "written", "cut"),
    [
        ("u32", "0xffffffffffffffff", 0xFFFFFFFF),
        ("s32", "-1", 0xFFFFFFFF),
        ("u32", "0x123456789", 0x23456789),
        ("u16", "70000", 4464),
        ("u64", "0x8000000000000001", 0x8000000000000001),
    ],
)
def test_a_constant_that_is_too_wide_is_cut(kind: str, written: str, cut: int) -> None:
    """PTX ISA 4.5.1 and 4.5.5: constants have 64 bits and are truncated; ptxas gives the same cubin for both."""
    bits = int(kind[1:])
    found = np.zeros(1, f"u{bits // 8}")
    register = {16: "%h1", 32: "%r1", 64: "%rd5"}[bits]
    run(program(f"mov.{kind} {register}, {written};\nst.global.b{bits} [%rd0], {register};\nret;"), found)
    assert found[0] == cut
