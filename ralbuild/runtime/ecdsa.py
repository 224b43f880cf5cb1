"""ECDSA on P-256 with SHA-256: checking only, in plain Python, for the image has no package that does.

Everything here is public (key, message, signature), so time may depend on it; one check takes some
milliseconds. FIPS 186-5, section 6.4.2; curve of SP 800-186; keys as RFC 5480 writes them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_HEADER = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d030107034200") + b"\x04"
"""DER of a key of this curve, up to the coordinates of its uncompressed point."""

_Point = tuple[int, int] | None
"""Affine coordinates; None is the point at infinity."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A point of the curve, and the SHA-256 of the key's DER form: its name in files and messages."""

    point: tuple[int, int]
    name: str

    def verifies(self, data: bytes, signature: bytes) -> bool:
        """Tell whether ``signature``, in DER, is one of ``data`` by this key."""
        numbers = _read_signature(signature)
        if numbers is None:
            return False
        r, s = numbers
        if not (0 < r < _N and 0 < s < _N):
            return False
        digest = int.from_bytes(hashlib.sha256(data).digest())
        inverse = pow(s, -1, _N)
        sum_ = _add(_times(digest * inverse % _N, _G), _times(r * inverse % _N, self.point))
        return sum_ is not None and sum_[0] % _N == r


def read_public_key(pem: bytes) -> PublicKey:
    """Return the key of a PEM file.

    Raises:
        ValueError: saying what it is not.
    """
    lines = pem.strip().splitlines()
    marks = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"
    if len(lines) < 3 or (lines[0].strip(), lines[-1].strip()) != marks:
        raise ValueError("is not a public key in PEM format")
    try:
        der = base64.b64decode(b"".join(line.strip() for line in lines[1:-1]), validate=True)
    except binascii.Error:
        raise ValueError("is not a public key in PEM format") from None
    if not der.startswith(_HEADER) or len(der) != len(_HEADER) + 64:
        raise ValueError("is not a key for ECDSA on P-256")
    x, y = int.from_bytes(der[-64:-32]), int.from_bytes(der[-32:])
    if x >= _P or y >= _P or (y * y - (x * x * x - 3 * x + _B)) % _P:
        raise ValueError("is not a point of P-256")
    return PublicKey((x, y), hashlib.sha256(der).hexdigest())


def _add(one: _Point, two: _Point) -> _Point:
    if one is None or two is None:
        return two if one is None else one
    (x1, y1), (x2, y2) = one, two
    if x1 == x2:
        if (y1 + y2) % _P == 0:
            return None
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, _P)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, _P)
    x = (slope * slope - x1 - x2) % _P
    return x, (slope * (x1 - x) - y1) % _P


def _times(factor: int, point: _Point) -> _Point:
    total: _Point = None
    while factor:
        if factor & 1:
            total = _add(total, point)
        point = _add(point, point)
        factor >>= 1
    return total


def _read_signature(der: bytes) -> tuple[int, int] | None:
    """Return r and s of ``SEQUENCE { INTEGER r, INTEGER s }``; None when it is not strictly that."""
    if len(der) < 2 or der[0] != 0x30 or der[1] != len(der) - 2 or der[1] > 0x7F:
        return None
    rest, numbers = der[2:], []
    for _ in range(2):
        if len(rest) < 3 or rest[0] != 0x02 or not 0 < rest[1] <= len(rest) - 2:
            return None
        digits, rest = rest[2 : 2 + rest[1]], rest[2 + rest[1] :]
        if digits[0] & 0x80 or (digits[0] == 0 and len(digits) > 1 and not digits[1] & 0x80):
            return None
        numbers.append(int.from_bytes(digits))
    return None if rest else (numbers[0], numbers[1])
