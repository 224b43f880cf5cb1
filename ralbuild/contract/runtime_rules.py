"""Rules of the serving side: one signed file, mounted beside an image, that may change while it serves.

The file is a DSSE envelope (secure-systems-lab/dsse, protocol 1.0.2), so that a rename replaces rules and
signature together, and other tools can check it. What it signs is a `RuntimeRules` in canonical JSON:
a transducer of two profiles, one for what comes out and one for what comes in.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.bundle import Rule
from ralbuild.contract.codec import (
    FormatError,
    canonical_json,
    from_plain,
    pae,
    parse_json,
    to_plain,
)
from ralbuild.contract.transducer import Transducer, read_transducer

FORMAT = "ralbuild.runtime-rules/1"
PAYLOAD_TYPE = "application/vnd.ralbuild.runtime-rules+json"
OUTPUT, INPUT = 0, 1
"""Profiles of the table: `redact` and `stop` for answers, `refuse` for what clients send."""
MAX_FILE_BYTES = 16 << 20
MAX_SIGNATURES = 16


@dataclass(frozen=True, slots=True)
class RuntimeRules:
    """What is signed.

    Attributes:
        format: `FORMAT`.
        serial: grows with every file that is published; a server never goes back to a smaller one.
        rules: in the order of the table's events.
        table: the transducer, base64.
    """

    format: str
    serial: int
    rules: tuple[Rule, ...]
    table: str

    def machine(self, where: str) -> Transducer:
        """Return the table ready to run, or raise FormatError."""
        table = read_transducer(_decoded(self.table, f"{where}: table"), f"{where}: table")
        if len(table.starts) != 2 or table.rules != len(self.rules):
            raise FormatError(where, "the table was not made for these rules")
        return Transducer(table)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload and its signatures as (name of the key, DER signature); nothing of it is checked yet."""

    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    @property
    def signed_bytes(self) -> bytes:
        """What the signatures are of."""
        return pae(PAYLOAD_TYPE, self.payload)


def write_payload(rules: RuntimeRules) -> bytes:
    """Return the one payload for ``rules``."""
    return canonical_json(to_plain(rules))


def read_payload(payload: bytes, where: str) -> RuntimeRules:
    """Parse a payload whose signature was checked, or raise FormatError."""
    rules = from_plain(RuntimeRules, parse_json(payload, where), where)
    if rules.format != FORMAT:
        raise FormatError(where, f"has the format {rules.format!r}, needs {FORMAT!r}")
    if rules.serial < 0:
        raise FormatError(where, f"has the serial {rules.serial}")
    return rules


def write_envelope(payload: bytes, key: str, signature: bytes) -> bytes:
    """Return the file that holds ``payload`` and its one signature."""
    plain = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key, "sig": base64.b64encode(signature).decode()}],
    }
    return canonical_json(plain) + b"\n"


def read_envelope(data: bytes, where: str) -> Envelope:
    """Parse a file, or raise FormatError; other members of the objects are left to other tools."""
    plain = parse_json(data, where)
    if not isinstance(plain, dict) or plain.get("payloadType") != PAYLOAD_TYPE:
        raise FormatError(where, f"is no envelope of type {PAYLOAD_TYPE}")
    signatures = plain.get("signatures")
    if not isinstance(signatures, list) or not 0 < len(signatures) <= MAX_SIGNATURES:
        raise FormatError(where, f"needs 1 to {MAX_SIGNATURES} signatures")
    return Envelope(
        _decoded(plain.get("payload"), f"{where}: payload"),
        tuple(_signature(item, f"{where}: signatures[{index}]") for index, item in enumerate(signatures)),
    )


def _signature(item: Any, where: str) -> tuple[str, bytes]:
    if not isinstance(item, dict):
        raise FormatError(where, "is not an object")
    key = item.get("keyid", "")
    return key if isinstance(key, str) else "", _decoded(item.get("sig"), f"{where}.sig")


def _decoded(value: Any, where: str) -> bytes:
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (AttributeError, UnicodeEncodeError, binascii.Error):
        raise FormatError(where, "is not base64") from None
