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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.weights.findings import Findings
from ralbuild.weights.sniff import SNIFFED, report_other_format

MAX_HEADER = 100_000_000
MAX_DIM = 1 << 48
MAX_TENSORS = 1_000_000
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPARE_PARTS = 500_000
"""Objects, lists or commas that metadata may hold."""
_FIELDS = {"dtype", "shape", "data_offsets"}


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
    """A checked header: tensors in data order, where the data begins, and the SHA-256 of what is before."""

    tensors: tuple[Tensor, ...]
    data_start: int
    sha256: str = ""


def read_header(path: Path, name: str, findings: Findings) -> Header | None:
    """Read and check the header of a safetensors file; the data itself is not read.

    Returns:
        The header, or None when the findings say why there is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        findings.add("W220", f"cannot be read: {error.strerror}", file=name)
        return None
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
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
        text = file.read(length)
    header = parse_header(text, size - 8 - length, name, findings)
    if header is None:
        return None
    digest = hashlib.sha256(start[:8])
    digest.update(text)
    return Header(header.tensors, header.data_start, digest.hexdigest())


def parse_header(text: bytes, data_size: int, name: str, findings: Findings) -> Header | None:
    """Check the JSON ``text`` of a header against the ``data_size`` bytes that follow it."""
    if text[:1] != b"{":
        findings.add("W111", f"begins with {text[:1]!r}", file=name, found=repr(text[:1]), needed="'{'")
    if not _plausible(text):
        findings.add("W109", "the header holds far more than its tensors explain", file=name)
        return None
    try:
        header = parse_json(text, name)
    except FormatError as error:
        rule = "W110" if error.message.startswith("duplicate key") else "W109"
        findings.add(rule, error.message, file=name)
        return None
    if not isinstance(header, dict):
        findings.add("W109", "the header must be a JSON object", file=name, found=type(header).__name__)
        return None
    _check_metadata(header, name, findings)
    if len(header) > MAX_TENSORS:
        findings.add("W127", f"holds {len(header)} tensors", file=name, needed=f"at most {MAX_TENSORS}")
        return None
    parsed = [_tensor(key, item, name, findings) for key, item in header.items()]
    tensors = sorted((item for item in parsed if item), key=lambda t: (t.begin, t.end, t.name))
    if len(tensors) != len(parsed) or not _covered(tensors, data_size, name, findings):
        return None
    start = 8 + len(text)
    for tensor in tensors:
        _check_use(tensor, start, name, findings)
    return Header(tuple(tensors), start)


def _plausible(text: bytes) -> bool:
    """Bound what parsing may cost: a tensor has one object, two lists and a few commas."""
    tensors = text.count(b'"data_offsets"')
    parts = text.count(b"{") + text.count(b"[")
    return parts <= 3 * tensors + _SPARE_PARTS and text.count(b",") <= 16 * tensors + _SPARE_PARTS


def _check_metadata(header: dict[str, Any], name: str, findings: Findings) -> None:
    present = "__metadata__" in header
    metadata = header.pop("__metadata__", None)
    if present and metadata is None:
        findings.add("W113", "__metadata__ is null", file=name)
    elif present and not (
        isinstance(metadata, dict) and all(isinstance(item, str) for item in metadata.values())
    ):
        findings.add("W112", "__metadata__ must map text to text", file=name)
        return
    if (metadata or {}).get("format") != "pt":
        findings.add(
            "W128",
            "__metadata__ does not say format: pt",
            file=name,
            found=(metadata or {}).get("format", ""),
            needed="pt",
        )


def _tensor(key: str, item: Any, name: str, findings: Findings) -> Tensor | None:
    def fault(rule: str, message: str) -> None:
        findings.add(rule, message, file=name, tensor=key)

    if not key or _CONTROL.search(key):
        fault("W124", "a tensor name must not be empty or hold control characters")
        return None
    if not isinstance(item, dict) or not item.keys() >= _FIELDS:
        fault("W114", "needs dtype, shape and data_offsets")
        return None
    if len(item) > len(_FIELDS):
        fault("W125", f"has the unknown field {next(iter(item.keys() - _FIELDS))!r}")
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
    return Tensor(key, dtype, tuple(shape), begin, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
    if tensor.dtype.startswith("F6") or odd_f4:
        findings.add("W126", f"no loader takes {tensor.dtype} of this shape", file=name, tensor=tensor.name)


def majority_dtype(tensors: Iterable[Tensor]) -> str:
    """Return the element type that most bytes have; ties go to the first in alphabetical order."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.end - tensor.begin
    return min(totals, key=lambda dtype: (-totals[dtype], dtype))
