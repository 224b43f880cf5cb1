"""Our own reader of the safetensors header, with the checks that the format's text demands.

Format: 8 bytes little-endian header length, a JSON header, then data without holes. Source: the
format section of the safetensors README and the reference `validate`; where the reference library is
laxer than its own rules (duplicate keys), the rules win.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.errors import WeightsError

MAX_HEADER = 100_000_000
MAX_DIM = 1 << 48
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

_MAGIC = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "run `git lfs pull`"),
    (b"<!DOCTYPE", "an HTML page", "download the file again: an error page was saved"),
    (b"<html", "an HTML page", "download the file again: an error page was saved"),
    (b"PK\x03\x04", "a zip archive (a PyTorch pickle?)", "convert it to safetensors first"),
    (b"\x80\x02", "a Python pickle", "convert it to safetensors first; ralbuild never opens pickles"),
    (b"\x80\x03", "a Python pickle", "convert it to safetensors first; ralbuild never opens pickles"),
    (b"\x80\x04", "a Python pickle", "convert it to safetensors first; ralbuild never opens pickles"),
    (b"GGUF", "a GGUF file", "convert it to a Hugging Face folder first"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: name, element type, shape, and byte range in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header: tensors in data order, and where the data begins in the file."""

    tensors: tuple[Tensor, ...]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; the data itself is not read.

    Raises:
        WeightsError: saying what the file is instead, which tensors overlap, or how many bytes are
            missing or too many.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=str(path)) from None
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        start = file.read(512)
        _refuse_other_formats(path, start)
        length = int.from_bytes(start[:8], "little")
        if length > MAX_HEADER or length + 8 > size:
            raise WeightsError(
                f"not a safetensors file: the header says {length} bytes, the file has {size}",
                place=str(path),
                hint="the download may be incomplete or damaged; fetch it again",
            )
        file.seek(8)
        text = file.read(length)
    return parse_header(text, size - 8 - length, path.name)


def _refuse_other_formats(path: Path, start: bytes) -> None:
    if not start:
        raise WeightsError("the file is empty", place=str(path), hint="download it again")
    for magic, what, hint in _MAGIC:
        if start.lstrip()[: len(magic)].lower() == magic.lower():
            raise WeightsError(f"this is {what}; a safetensors file was needed", place=str(path), hint=hint)
    if len(start) < 8:
        raise WeightsError(f"needs at least 8 bytes, found {len(start)}", place=str(path))


def parse_header(text: bytes, data_size: int, name: str) -> Header:
    """Check the JSON ``text`` of a header against the ``data_size`` bytes that follow it."""
    try:
        header = parse_json(text, name)
    except FormatError as error:
        raise WeightsError(error.message, place=f"{name}: header") from None
    if not isinstance(header, dict):
        raise WeightsError("the header must be a JSON object", place=name)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(item, str) for item in metadata.values())
    ):
        raise WeightsError("__metadata__ must map text to text", place=name)
    tensors = sorted(
        (_tensor(key, item, name) for key, item in header.items()), key=lambda t: (t.begin, t.end, t.name)
    )
    _check_coverage(tensors, data_size, name)
    return Header(tuple(tensors), 8 + len(text))


def _tensor(key: str, item: Any, name: str) -> Tensor:
    place = f"{name}: {key}"
    if not key or any(ord(char) < 32 for char in key):
        raise WeightsError("a tensor name must not be empty or hold control characters", place=place)
    if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= item.keys():
        raise WeightsError("needs dtype, shape and data_offsets", place=place)
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise WeightsError(f"unknown dtype {dtype!r}", place=place)
    if not isinstance(shape, list) or not all(_is_count(dim) and dim <= MAX_DIM for dim in shape):
        raise WeightsError(f"shape {str(shape)[:80]} must be a list of sizes below 2**48", place=place)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        raise WeightsError(f"data_offsets {str(offsets)[:80]} must be two sizes", place=place)
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if end < begin or bits % 8 or bits // 8 != end - begin:
        raise WeightsError(
            f"{dtype} of shape {shape} takes {bits / 8:g} bytes, but data_offsets give {end - begin}",
            place=place,
        )
    return Tensor(key, dtype, tuple(shape), begin, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_coverage(tensors: list[Tensor], data_size: int, name: str) -> None:
    at, previous = 0, "the start of the data"
    for tensor in tensors:
        if tensor.begin != at:
            what = "overlaps" if tensor.begin < at else f"leaves a hole of {tensor.begin - at} bytes after"
            raise WeightsError(f"{what} {previous}", place=f"{name}: {tensor.name}")
        at, previous = tensor.end, repr(tensor.name)
    if at > data_size:
        raise WeightsError(
            f"the file is {at - data_size} bytes too short: tensors need {at} bytes, {data_size} are there",
            place=name,
            hint="the download is incomplete; fetch the file again",
        )
    if at < data_size:
        raise WeightsError(
            f"{data_size - at} bytes follow the last tensor", place=name, hint="fetch the file again"
        )


def majority_dtype(tensors: Iterator[Tensor]) -> str:
    """Return the element type that most bytes have; ties go to the first in alphabetical order."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.end - tensor.begin
    return min(totals, key=lambda dtype: (-totals[dtype], dtype))
