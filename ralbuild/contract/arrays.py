"""Named typed arrays in one file: the tables that rules and vocabularies compile to.

The format is safetensors (an 8-byte little-endian header length, a JSON header, then the data), so
any tool of the field opens a table. We write it canonically: arrays sorted by item size (largest
first) then name, header padded with spaces to a multiple of 64, string metadata only. The same
arrays therefore give the same bytes.
"""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.codec import FormatError, canonical_json, parse_json

MAX_HEADER = 1 << 20
_CODES = {
    "U8": "B", "U16": "H", "U32": "I", "U64": "Q",
    "I8": "b", "I16": "h", "I32": "i", "I64": "q",
    "F32": "f", "F64": "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Array:
    """One array: ``dtype`` (a key of `_CODES`), ``shape``, and little-endian ``data``."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def make_array(dtype: str, values: Sequence[int | float], shape: tuple[int, ...] | None = None) -> Array:
    """Pack ``values`` as ``dtype``; ``shape`` defaults to one dimension.

    Raises:
        FormatError: when a value does not fit the type.
    """
    try:
        packed = array.array(_CODES[dtype], values)
    except OverflowError as error:
        raise FormatError(dtype, f"value does not fit: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return Array(dtype, shape if shape is not None else (len(values),), packed.tobytes())


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """A parsed table file: arrays as typed views over the file's bytes, and its metadata."""

    arrays: dict[str, memoryview]
    metadata: dict[str, str]

    def take(self, name: str, dtype: str, count: int | None = None) -> memoryview:
        """Return the array ``name``, checked for type and, when given, element count.

        Raises:
            FormatError: when it is absent or of another type or size.
        """
        view = self.arrays.get(name)
        if view is None:
            raise FormatError(name, "the table lacks this array")
        if view.format != _CODES[dtype]:
            raise FormatError(name, f"needs {dtype}, found {view.format!r}")
        if count is not None and len(view) != count:
            raise FormatError(name, f"needs {count} elements, found {len(view)}")
        return view

    def expect_format(self, name: str, where: str) -> None:
        """Check that the metadata names the format ``name``, or raise FormatError."""
        found = self.metadata.get("format")
        if found != name:
            raise FormatError(where, f"needs the format {name!r}, found {found!r}")

    def number(self, name: str) -> int:
        """Return the metadata value ``name`` as a non-negative integer, or raise FormatError."""
        text = self.metadata.get(name, "")
        if not text.isdecimal():
            raise FormatError(f"__metadata__.{name}", f"needs a number, found {text!r}")
        return int(text)


def write_arrays(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """Return the file bytes for ``arrays``; equal input gives equal bytes."""
    order = sorted(arrays, key=lambda name: (-array.array(_CODES[arrays[name].dtype]).itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        item = arrays[name]
        header[name] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [offset, offset + len(item.data)],
        }
        offset += len(item.data)
    text = canonical_json(header)
    text += b" " * (-(len(text) + 8) % 64)
    return b"".join([len(text).to_bytes(8, "little"), text, *(arrays[name].data for name in order)])


def read_arrays(data: bytes, where: str) -> ArrayFile:
    """Parse a table file written by `write_arrays`.

    Raises:
        FormatError: for anything but complete, gap-free data of the known types.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
        raise FormatError(where, "not a table file: the header is longer than the file")
    header = parse_json(bytes(data[8 : 8 + size]), where)
    if not isinstance(header, dict):
        raise FormatError(where, "not a table file: the header is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FormatError(where, "not a table file: its metadata is not an object")
    body = memoryview(data)[8 + size :]
    arrays: dict[str, memoryview] = {}
    end = 0
    for name, item in header.items():
        code, begin, stop = _entry(name, item, len(body), where)
        end = max(end, stop)
        arrays[name] = body[begin:stop].cast(code)  # type: ignore[call-overload]
    if end != len(body):
        raise FormatError(where, f"{len(body) - end} bytes follow the last array")
    return ArrayFile(arrays, {str(key): str(item) for key, item in metadata.items()})


def _entry(name: str, item: Any, size: int, where: str) -> tuple[str, int, int]:
    """Check one header entry; return its array type code and byte range."""
    item = item if isinstance(item, dict) else {}
    code = _CODES.get(str(item.get("dtype")))
    shape, offsets = item.get("shape"), item.get("data_offsets")
    if code is None or not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise FormatError(where, f"array {name!r} needs a known dtype, a shape and two offsets")
    begin, stop = offsets
    width = array.array(code).itemsize
    if not begin <= stop <= size or stop - begin != math.prod(shape) * width:
        raise FormatError(where, f"array {name!r} does not fit its offsets")
    return code, begin, stop


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
