"""Looks at the bits of every element in the read that hashes the file. The only door to numpy here.

The bits of a float without its sign order like the number itself, so one maximum of integers finds
NaN (all exponent bits and more), infinity (all exponent bits), all zeros, and absurd magnitudes. It
costs a tenth of the SHA-256 of the same bytes. Memory is one tensor's state, whatever its size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from ralbuild.contract.codec import FormatError, canonical_json, from_plain, parse_json, to_plain
from ralbuild.weights.families import Family
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import DTYPE_BITS, Header, Tensor

KIND = "ralbuild.values/3"
MOST_FAULTS = 200

FaultKind = Literal["nan", "infinity", "large", "zero", "constant"]
_RULES: dict[str, str] = {
    "nan": "W401", "infinity": "W402", "large": "W403", "zero": "W404", "constant": "W405",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """Something about a tensor's values: see `FaultKind`; ``text`` is for people.

    ``vector`` is True for one that many families may leave at zero, and no scale.
    """

    tensor: str
    kind: str
    text: str
    vector: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one file's values came to.

    Attributes:
        header_sha256: of the header that the tensors were found by; another one voids the verdict.
        faults: the first `MOST_FAULTS`.
        more: how many there are beyond those.
        digests: SHA-256 of the tensors that were asked for.
    """

    header_sha256: str
    faults: tuple[Fault, ...]
    more: int
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Bits:
    """How a float type keeps its number: mask without sign, the bits of infinity, and the largest sane."""

    width: int
    mask: int
    infinity: int
    limit: int
    has_infinity: bool = True


_FLOATS = {
    "F64": _Bits(8, (1 << 63) - 1, 0x7FF << 52, struct.unpack("<Q", struct.pack("<d", 1e4))[0]),
    "F32": _Bits(4, 0x7FFFFFFF, 0x7F800000, struct.unpack("<I", struct.pack("<f", 1e4))[0]),
    "BF16": _Bits(2, 0x7FFF, 0x7F80, struct.unpack("<I", struct.pack("<f", 1e4))[0] >> 16),
    "F16": _Bits(2, 0x7FFF, 0x7C00, struct.unpack("<H", struct.pack("<e", 6e4))[0]),
    "F8_E5M2": _Bits(1, 0x7F, 0x7C, 0x7C),
    "F8_E4M3": _Bits(1, 0x7F, 0x7F, 0x7F, has_infinity=False),
}
_NAN_CODES = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80, "F8_E8M0": 0xFF}
"""Types whose only NaN is one code."""
_PACKED = (".qweight", ".weight_packed")
"""Integers that hold quantised weights: never all the same."""


class ValueScan:
    """An observer of `ralbuild.digests.scan_file`: takes a file's bytes in order, gives a `Verdict`."""

    kind = KIND

    def __init__(self, header: Header, hashed: frozenset[str] = frozenset()) -> None:
        # What is asked for changes the verdict, so it is part of what a remembered one must match.
        if hashed:
            self.kind = f"{KIND}:{','.join(sorted(hashed))}"
        self._header = header
        self._hashed = hashed
        self._head = hashlib.sha256()
        self._at = 0
        self._coming = iter(tensor for tensor in header.tensors if tensor.end > tensor.begin)
        self._part: _Part | None = None
        self._faults: list[Fault] = []
        self._more = 0
        self._digests: dict[str, str] = {}

    def feed(self, chunk: memoryview) -> None:
        """Take the next bytes of the file."""
        rest = self._header.data_start - self._at
        self._at += len(chunk)
        if rest > 0:
            self._head.update(chunk[:rest])
            chunk = chunk[rest:]
        while len(chunk):
            if self._part is None:
                tensor = next(self._coming, None)
                if tensor is None:
                    return  # the file grew; the caller sees its changed state
                self._part = _Part(tensor, hashed=tensor.name in self._hashed)
            count = min(len(chunk), self._part.left)
            self._part.feed(chunk[:count])
            chunk = chunk[count:]
            if not self._part.left:
                self._finish(self._part)
                self._part = None

    def _finish(self, part: _Part) -> None:
        for fault in part.faults():
            if len(self._faults) < MOST_FAULTS:
                self._faults.append(fault)
            else:
                self._more += 1
        if part.digest is not None:
            self._digests[part.tensor.name] = part.digest.hexdigest()

    def verdict(self) -> str:
        """Return the `Verdict` as canonical JSON."""
        result = Verdict(self._head.hexdigest(), tuple(self._faults), self._more, self._digests)
        return canonical_json(to_plain(result)).decode()


class _Part:
    """One tensor while its bytes go by."""

    def __init__(self, tensor: Tensor, *, hashed: bool) -> None:
        self.tensor = tensor
        self.left = tensor.end - tensor.begin
        self.digest = hashlib.sha256() if hashed else None
        self.bits = _FLOATS.get(tensor.dtype)
        self.width = max(1, DTYPE_BITS[tensor.dtype] // 8)
        self.is_float = self.bits is not None or tensor.dtype in _NAN_CODES
        self.is_packed = tensor.dtype == "I32" and tensor.name.endswith(_PACKED)
        self.carry = b""
        self.seen = 0
        self.peak = 0
        self.strange = 0
        self.first_strange = -1
        self.has_nan = False
        self.first: int | None = None
        self.constant = True

    def feed(self, chunk: memoryview) -> None:
        self.left -= len(chunk)
        if self.digest is not None:
            self.digest.update(chunk)
        if not (self.is_float or self.is_packed):
            return
        if self.carry:  # an element that two chunks share
            need = self.width - len(self.carry)
            whole = self.carry + bytes(chunk[:need])
            chunk = chunk[need:]
            if len(whole) < self.width:
                self.carry = whole
                return
            self.carry = b""
            self._look(np.frombuffer(whole, f"<u{self.width}"))
        count = len(chunk) // self.width
        if count:
            self._look(np.frombuffer(chunk, f"<u{self.width}", count))
        self.carry = bytes(chunk[count * self.width :])

    def _look(self, values: np.ndarray[Any, Any]) -> None:
        if self.first is None:
            self.first = int(values[0])
        if self.constant:
            # Nearly every tensor differs within its first elements; only an equal start is compared whole.
            self.constant = bool((values[:256] == self.first).all()) and bool((values == self.first).all())
        if self.bits is None and self.is_float:
            self._count(values == _NAN_CODES[self.tensor.dtype], nan=True)
        elif self.bits is not None:
            self._look_at_bits(values, self.bits)
        self.seen += len(values)

    def _look_at_bits(self, values: np.ndarray[Any, Any], bits: _Bits) -> None:
        # Largest without sign: as signed numbers for the positive ones, as unsigned for the negative ones.
        peak = max(int(values.view(f"<i{self.width}").max()), int(values.max()) & bits.mask, 0)
        if peak >= bits.infinity:
            magnitude = values & values.dtype.type(bits.mask)
            self._count(
                magnitude >= bits.infinity,
                nan=not bits.has_infinity or bool((magnitude > bits.infinity).any()),
            )
            finite = magnitude[magnitude < bits.infinity]
            peak = int(finite.max()) if len(finite) else 0
        self.peak = max(self.peak, peak)

    def _count(self, strange: np.ndarray[Any, Any], *, nan: bool) -> None:
        count = int(np.count_nonzero(strange))
        if count:
            if self.first_strange < 0:
                self.first_strange = self.seen + int(np.argmax(strange))
            self.strange += count
            self.has_nan = self.has_nan or nan

    def faults(self) -> list[Fault]:
        tensor, vector = self.tensor, len(self.tensor.shape) < 2
        out: list[tuple[FaultKind, str]] = []
        if self.strange:
            place = _place(self.first_strange, tensor.shape)
            text = f"{self.strange} of {tensor.elements} elements, the first at {place}"
            out.append(("nan" if self.has_nan else "infinity", text))
        if self.bits is not None and self.peak > self.bits.limit:
            out.append(("large", f"the largest magnitude is {_number(self.peak, tensor.dtype):.3g}"))
        scale = "scale" in tensor.name.rpartition(".")[2]
        if self.first is not None and (tensor.elements > 1 or scale):
            if self._is_zero():
                if not tensor.name.endswith(".bias"):
                    out.append(("zero", f"all {tensor.elements} elements are zero"))
            elif self.constant and not (vector or scale or self.strange):
                out.append(("constant", f"all {tensor.elements} elements are the same"))
        return [Fault(tensor.name, kind, text, vector and not scale) for kind, text in out]

    def _is_zero(self) -> bool:
        """Tell whether every element is zero, of either sign."""
        if self.bits is not None:
            return self.peak == 0 and not self.strange
        return self.constant and self.first == 0 and self.tensor.dtype != "F8_E8M0"  # which has no zero


def _place(index: int, shape: tuple[int, ...]) -> str:
    where: list[int] = []
    for dim in reversed(shape):
        index, at = divmod(index, dim)
        where.append(at)
    return str(where[::-1])


def _number(bits: int, dtype: str) -> float:
    if dtype == "BF16":
        bits, dtype = bits << 16, "F32"
    code = {"F64": ("<Q", "<d"), "F32": ("<I", "<f"), "F16": ("<H", "<e")}[dtype]
    return float(struct.unpack(code[1], struct.pack(code[0], bits))[0])


def read_verdict(text: str, header: Header) -> Verdict | None:
    """Return the verdict, or None when it is about another header than the one that was checked."""
    try:
        verdict = from_plain(Verdict, parse_json(text, "verdict"), "verdict")
    except FormatError:
        return None
    return verdict if verdict.header_sha256 == header.sha256 else None


def judge(verdict: Verdict, name: str, family: Family | None, findings: Findings) -> None:
    """Turn a file's faults into findings, except what the family's table allows."""
    benign: Sequence[str] = family.benign if family else ()
    norms: Sequence[str] = family.norms if family else ()
    for fault in verdict.faults:
        if any(fnmatchcase(fault.tensor, pattern) for pattern in benign):
            continue
        if fault.kind == "zero" and fault.vector and not any(fnmatchcase(fault.tensor, p) for p in norms):
            continue
        findings.add(_RULES[fault.kind], fault.text, file=name, tensor=fault.tensor, found=fault.text)
    if verdict.more:
        findings.add("W401", f"{verdict.more} more tensors have faults", file=name)
