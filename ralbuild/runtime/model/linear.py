"""Matrix products on processors: packed float32, or bfloat16 straight from the mapped file.

Float32 on x86 goes through oneDNN with the matrix packed once for its kernels. Measured once on two quiet
AVX2 cores, each count with a layout of its own: the layers' products of a step of SmolLM2 take 36 ms
instead of 59 for one text and 52 instead of 97 for eight. On one busy core a lone row is slower packed.

A processor without bfloat16 instructions converts every element inside the product: from about 8 rows
on it is faster to convert the matrix once and multiply in float32, five times so for a prompt of 128
tokens. Memory stays at two bytes a weight; one layer's copy lives for one product.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

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
        self._widen = widen
        self._packed = device is None and dtype == torch.float32 and packs()
        self._biases: list[Tensor | None] = [bias.to(dtype) for bias in biases] or [None] * len(matrices)
        if self._packed:
            stacked = torch.cat([matrix.to(dtype) for matrix in matrices])
            self._matrices = [torch.ops.mkldnn._reorder_linear_weight(stacked, _PACKED_ROWS)]
            self._biases = [torch.cat([bias.to(dtype) for bias in biases]) if biases else None]
        elif device is not None:
            self._matrices = [torch.cat([matrix.to(device, dtype) for matrix in matrices])]
            self._biases = [torch.cat([bias.to(device, dtype) for bias in biases]) if biases else None]
        else:
            self._matrices = [matrix.to(dtype) for matrix in matrices]  # the mapped bytes, where dtypes agree

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [n, out] for [n, in], in the dtype of ``rows``."""
        if self._packed:
            packed, bias, count = self._matrices[0], self._biases[0], rows.shape[0]
            if (more := padded_rows(count) - count) > 0:
                rows = pad(rows, (0, 0, 0, more))
            return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")[:count]
        parts = [
            _multiply(rows, matrix, bias, widen=self._widen)
            for matrix, bias in zip(self._matrices, self._biases, strict=True)
        ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def packs() -> bool:
    """Tell whether this torch and processor can pack float32 matrices."""
    return platform.machine() in ("x86_64", "AMD64") and bool(torch.backends.mkldnn.is_available())


class WideLinear(nn.Linear):  # type: ignore[misc] # torch is untyped to us
    """`nn.Linear` that multiplies in float32 when there are `MANY_ROWS` or more."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return [..., out] for [..., in], in the dtype of ``rows``."""
        return _multiply(rows, self.weight, self.bias, widen=True)


def widen_linears(model: nn.Module) -> None:
    """Make every plain `nn.Linear` of ``model`` a `WideLinear`; their weights stay what they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear


def _multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None, *, widen: bool) -> Tensor:
    if not widen or rows.numel() < MANY_ROWS * matrix.shape[1]:
        return linear(rows, matrix, bias)
    return linear(rows.float(), matrix.float(), None if bias is None else bias.float()).to(rows.dtype)
