"""Our own reader of the safetensors header, with the checks that the format's text demands.

Format: 8 bytes little-endian header length, a JSON header, then data without holes. Source: the
format section of the safetensors README and the reference `validate`; where the reference library is
laxer than its own rules (duplicate keys), the rules win.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ralbuild.contract.codec import FormatError
from ralbuild.digests import open_regular
from ralbuild.weights.findings import Findings
from ralbuild.weights.members import Members
from ralbuild.weights.sniff import SNIFFED, report_other_format

MAX_HEADER = 100_000_000
MAX_DIM = 1 << 48
MAX_TENSORS = 250_000
"""In one file: what keeps the memory of a hostile header below 200 MB. Models have at most a few thousand."""
METADATA = "__metadata__"
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FIELDS = ("dtype", "shape", "data_offsets")


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
    """A checked header.

    Attributes:
        tensors: in data order.
        data_start: where the data begins, in bytes from the file's start.
        file_size: of the whole file when the header was read.
        sha256: of all bytes before the data.
    """

    tensors: tuple[Tensor, ...]
    data_start: int
    file_size: int
    sha256: str


def read_header(path: Path, name: str, findings: Findings) -> Header | None:
    """Read and check the header of a safetensors file; the data itself is not read.

    Returns:
        The header, or None when the findings say why there is none.
    """
    try:
        with open_regular(path, follow=False) as file:
            return parse_header(file, os.fstat(file.fileno()).st_size, name, findings)
    except OSError as error:
        findings.add("W220", f"cannot be read: {error.strerror}", file=name)
        return None


def parse_header(file: BinaryIO, size: int, name: str, findings: Findings) -> Header | None:
    """Check the header of the safetensors ``file`` of ``size`` bytes, read from its start in small pieces."""
    start = file.read(SNIFFED)
    if report_other_format(start, name, findings):
        return None
    if len(start) < 8:
        findings.add("W107", f"needs at least 8 bytes, found {len(start)}", file=name)
        return None
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER or length + 8 > size:
        findings.add(
            "W108",
            f"not a safetensors file: the header says {length} bytes, the file has {size}",
            file=name,
            found=length,
            needed=f"at most {min(MAX_HEADER, size - 8)}",
        )
        return None
    file.seek(8)
    digest, left = hashlib.sha256(start[:8]), length

    def read(count: int) -> bytes:
        nonlocal left
        data = file.read(min(count, left))
        left -= len(data)
        digest.update(data)
        return data

    tensors = _tensors(read, name, findings)
    if tensors is None or not _covered(tensors, size - 8 - length, name, findings):
        return None
    for tensor in tensors:
        _check_use(tensor, 8 + length, name, findings)
    return Header(tuple(tensors), 8 + length, size, digest.hexdigest())


def _tensors(read: Callable[[int], bytes], name: str, findings: Findings) -> list[Tensor] | None:
    """Return the tensors of a header's text in data order; None when a finding says why not."""
    members = Members(read, name)
    found: dict[str, Tensor | None] = {}
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    noted = False
    try:
        for key, item in members:
            if key in found or (noted and key == METADATA):
                findings.add("W110", f"duplicate key {key[:80]!r}", file=name, tensor=key[:200])
                return None
            if key == METADATA:
                noted = True
                _check_metadata(item, name, findings)
                continue
            if len(found) == MAX_TENSORS:
                findings.add("W127", "holds too many tensors", file=name, needed=f"at most {MAX_TENSORS:,}")
                return None
            found[key] = _tensor(key, item, shapes, name, findings)
    except FormatError as error:
        rule = "W110" if error.message.startswith("duplicate key") else "W109"
        findings.add(rule, error.message, file=name)
        return None
    if members.blanks:
        findings.add("W111", "blanks come before the '{'", file=name, needed="'{'")
    if not noted:
        _note_format("", name, findings)
    whole = [item for item in found.values() if item is not None]
    return sorted(whole, key=lambda t: (t.begin, t.end, t.name)) if len(whole) == len(found) else None


def _check_metadata(metadata: Any, name: str, findings: Findings) -> None:
    if metadata is None:
        findings.add("W113", "__metadata__ is null", file=name)
    elif not (isinstance(metadata, dict) and all(isinstance(item, str) for item in metadata.values())):
        findings.add("W112", "__metadata__ must map text to text", file=name)
        return
    _note_format((metadata or {}).get("format", ""), name, findings)


def _note_format(found: str, name: str, findings: Findings) -> None:
    if found != "pt":
        what = "__metadata__ does not say format: pt"
        findings.add("W128", what, file=name, found=found, needed="pt")


def _tensor(
    key: str, item: Any, shapes: dict[tuple[int, ...], tuple[int, ...]], name: str, findings: Findings
) -> Tensor | None:
    """Check one entry; ``shapes`` keeps one copy of each shape, since many tensors have the same."""

    def fault(rule: str, message: str) -> None:
        findings.add(rule, message, file=name, tensor=key)

    if not key or _CONTROL.search(key):
        fault("W124", "a tensor name must not be empty or hold control characters")
        return None
    if not isinstance(item, dict) or not all(map(item.__contains__, _FIELDS)):
        fault("W114", "needs dtype, shape and data_offsets")
        return None
    if len(item) > len(_FIELDS):
        fault("W125", f"has the unknown field {min(item.keys() - set(_FIELDS))[:80]!r}")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fault("W115", f"unknown dtype {str(dtype)[:40]!r}")
        return None
    if not isinstance(shape, list) or not all(_is_count(dim) and dim <= MAX_DIM for dim in shape):
        fault("W116", f"shape {str(shape)[:80]} must be a list of sizes below 2**48")
        return None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
        fault("W117", f"data_offsets {str(offsets)[:80]} must be two sizes")
        return None
    begin, end = offsets
    bits = _product(shape) * DTYPE_BITS[dtype]
    if end < begin:
        fault("W117", f"data_offsets {begin} and {end} are not in ascending order")
        return None
    if bits % 8 or bits // 8 != end - begin:
        size = f"{bits / 8:g}" if bits < 1 << 64 else "more than 2**61"
        fault(
            "W118", f"{dtype} of shape {str(shape)[:80]} takes {size} bytes, data_offsets give {end - begin}"
        )
        return None
    shape = tuple(shape)
    return Tensor(key, sys.intern(dtype), shapes.setdefault(shape, shape), begin, end)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _product(shape: list[int]) -> int:
    """Return the number of elements; past any file's size it stops growing, not to take long."""
    if 0 in shape:
        return 0
    total = 1
    for dim in shape:
        total *= dim
        if total > 1 << 64:
            break
    return total


def _covered(tensors: list[Tensor], data_size: int, name: str, findings: Findings) -> bool:
    """Check that the tensors cover the data without overlap or hole."""
    at, previous = 0, "the start of the data"
    for tensor in tensors:
        if tensor.begin != at:
            overlap = tensor.begin < at
            what = "overlaps" if overlap else f"leaves a hole of {tensor.begin - at} bytes after"
            rule = "W119" if overlap else "W120"
            findings.add(
                rule, f"{what} {previous}", file=name, tensor=tensor.name, found=tensor.begin, needed=at
            )
            return False
        at, previous = tensor.end, repr(tensor.name)
    if at > data_size:
        findings.add(
            "W121",
            f"the file is {at - data_size} bytes too short: tensors need {at} bytes, {data_size} are there",
            file=name,
            found=data_size,
            needed=at,
        )
    if at < data_size:
        findings.add(
            "W122",
            f"{data_size - at} bytes follow the last tensor",
            file=name,
            found=data_size,
            needed=at,
        )
    return at == data_size


def _check_use(tensor: Tensor, start: int, name: str, findings: Findings) -> None:
    """Check what the format allows, but a loader trips over."""
    width = DTYPE_BITS[tensor.dtype] // 8
    if width > 1 and (start + tensor.begin) % width:
        findings.add(
            "W123",
            f"starts at byte {start + tensor.begin}, which is no multiple of {width}",
            file=name,
            tensor=tensor.name,
        )
    odd_f4 = tensor.dtype == "F4" and tensor.shape and tensor.shape[-1] % 2
    if tensor.dtype.startswith("F6_") or odd_f4:
        findings.add("W126", f"no loader takes {tensor.dtype} of this shape", file=name, tensor=tensor.name)


def majority_dtype(tensors: Iterable[Tensor]) -> str:
    """Return the element type that most bytes have; ties go to the first in alphabetical order."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.end - tensor.begin
    return min(totals, key=lambda dtype: (-totals[dtype], dtype))
