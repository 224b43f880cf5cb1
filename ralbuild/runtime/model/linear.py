"""Matrix products on processors: packed for float32 rows, or bfloat16 straight from the mapped file.

Float32 rows on x86 meet matrices that are packed once. A step for few texts is bound by the bytes of the
weights, so matrices whose files hold two bytes an element stay at two: FBGEMM keeps them as float16 and
widens them in registers, products and sums being float32. A float16 holds a bfloat16's digits but not its
exponents; `_pack_halves` says what is done about that. Matrices of float32 files go to oneDNN.

A processor without bfloat16 instructions converts every element inside a bfloat16 product: from about 8
rows on it is faster to convert the matrix once and multiply in float32, five times so for a prompt of 128
tokens. Memory stays at two bytes a weight; one layer's copy lives for one product.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

MANY_ROWS = 8
_PACKED_ROWS = 4
"""Rows that oneDNN lays the matrix out for; other counts use the same layout. Chosen against 16 on a busy
machine, where 39 rows took a quarter less and fewer rows about the same; worth measuring again."""

_EXACT_ROWS = 16
"""Products of more rows are filled up with zeros to a size of `padded_rows`."""


def padded_rows(rows: int) -> int:
    """Return how many rows a packed product of ``rows`` computes: at most an eighth more.

    oneDNN compiles code for every number of rows and matrix shape, a quarter of a MiB each, and keeps
    it as long as the process lives, whatever `ONEDNN_PRIMITIVE_CACHE_CAPACITY` says. So there are 56 numbers
    up to 512 instead of 512.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return -(-rows // step) * step


_LEAST_LARGEST, _LARGEST = 0.5, 32768.0
"""A matrix is scaled unless its largest element lies between: a float16 rounds to 2 ** -25 at worst, and of
0.5 that is 2 ** -24, as much as a float32 rounds. Its largest number is 65,504."""

_FARTHEST = 100
"""Powers of two that a matrix is scaled by, at most: both ways stay normal numbers of float32."""


class Product:
    """``rows @ matrix.T + bias`` for stacked matrices: q, k and v, or gate and up, are one product."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        *,
        dtype: torch.dtype,
        widen: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Take [out, in] matrices of any dtype; ``widen`` is for bfloat16 without instructions for it.

        With ``device`` they become one matrix there: a launch costs more than a copy at the start.
        """
        self.outputs = sum(matrix.shape[0] for matrix in matrices)
        self.kept = dtype
        """What the matrices are made of in memory."""
        if device is not None or (dtype == torch.float32 and packs()):
            matrix = torch.cat([matrix.to(device) for matrix in matrices])
            bias = torch.cat([bias.to(device, dtype) for bias in biases]) if biases else None
            if device is not None:
                self._multiply = _keep(matrix.to(dtype), bias)
            else:
                halves = _pack_halves(matrix, bias)
                self._multiply = halves or _pack_floats(matrix.float(), bias)
                self.kept = torch.float16 if halves else torch.float32
        else:  # the mapped bytes, where dtypes agree
            kept: Sequence[Tensor | None] = [bias.to(dtype) for bias in biases] or [None] * len(matrices)
            parts = [
                _map(matrix.to(dtype), bias, widen=widen) for matrix, bias in zip(matrices, kept, strict=True)
            ]
            self._multiply = _join(parts) if len(parts) > 1 else parts[0]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [n, out] for [n, in], in the dtype of ``rows``."""
        return self._multiply(rows)


def packs() -> bool:
    """Tell whether this torch and processor can pack matrices for float32 rows."""
    return platform.machine() in ("x86_64", "AMD64") and bool(torch.backends.mkldnn.is_available())


def packs_halves() -> bool:
    """Tell whether this torch and processor multiply float32 rows with float16 matrices."""
    return (
        packs()
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


class WideLinear(nn.Linear):  # type: ignore[misc] # torch is untyped to us
    """`nn.Linear` that multiplies in float32 when there are `MANY_ROWS` or more."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return [..., out] for [..., in], in the dtype of ``rows``."""
        return _widened(rows, self.weight, self.bias)


def widen_linears(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of ``model`` a `WideLinear`; their weights stay what they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear


_Multiply = Callable[[Tensor], Tensor]


def _pack_halves(matrix: Tensor, bias: Tensor | None) -> _Multiply | None:
    """Pack a float16 or bfloat16 matrix as float16; None when that is not possible.

    A float16 file is kept exactly. Of a bfloat16 one, elements below 2 ** -14 can lose digits: it is scaled
    by a power of two where needed, so that an element loses at most 2 ** -24 of the largest one. A row's
    result does not depend on how many rows there are.
    """
    if matrix.dtype not in (torch.float16, torch.bfloat16) or not packs_halves():
        return None
    largest = float(matrix.abs().max())
    if not math.isfinite(largest):
        return None
    shift = 0
    if matrix.dtype == torch.bfloat16 and largest and not _LEAST_LARGEST <= largest <= _LARGEST:
        shift = 14 - math.frexp(largest)[1]
    if abs(shift) > _FARTHEST:
        return None
    if not shift:
        packed = torch.ops.quantized.linear_prepack_fp16(matrix.float(), bias)
        return lambda rows: torch.ops.quantized.linear_dynamic_fp16(rows, packed)
    # A power of two moves no digit, and the bias is added where nothing is scaled.
    packed = torch.ops.quantized.linear_prepack_fp16(matrix.float().mul_(2.0**shift), None)
    back = 2.0**-shift
    if bias is None:
        return lambda rows: torch.ops.quantized.linear_dynamic_fp16(rows, packed).mul_(back)
    return lambda rows: torch.add(bias, torch.ops.quantized.linear_dynamic_fp16(rows, packed), alpha=back)


def _pack_floats(matrix: Tensor, bias: Tensor | None) -> _Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, _PACKED_ROWS)

    def multiply(rows: Tensor) -> Tensor:
        found = torch.ops.mkldnn._linear_pointwise(_fill_up(rows), packed, bias, "none", [], "")
        return found[: rows.shape[0]]

    return multiply


def _keep(matrix: Tensor, bias: Tensor | None) -> _Multiply:
    return lambda rows: linear(rows, matrix, bias)


def _map(matrix: Tensor, bias: Tensor | None, *, widen: bool) -> _Multiply:
    """Return the product with a matrix that stays where it lies."""
    if widen:
        return lambda rows: _widened(rows, matrix, bias)
    if matrix.dtype == torch.bfloat16:  # oneDNN's too, where the processor has instructions for it
        return lambda rows: linear(_fill_up(rows), matrix, bias)[: rows.shape[0]]
    return _keep(matrix, bias)


def _join(parts: Sequence[_Multiply]) -> _Multiply:
    return lambda rows: torch.cat([part(rows) for part in parts], -1)


def _fill_up(rows: Tensor) -> Tensor:
    """Add rows of zeros up to `padded_rows`."""
    more = padded_rows(rows.shape[0]) - rows.shape[0]
    return pad(rows, (0, 0, 0, more)) if more else rows


def _widened(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    if rows.numel() < MANY_ROWS * matrix.shape[1]:
        return linear(rows, matrix, bias)
    return linear(rows.float(), matrix.float(), None if bias is None else bias.float()).to(rows.dtype)
