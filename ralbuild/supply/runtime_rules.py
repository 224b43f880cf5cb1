"""Rules of the serving side: signed, written, and checked again before they are shown or published."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ralbuild.contract.codec import FormatError, pae, sha256_hex
from ralbuild.contract.runtime_rules import (
    MAX_FILE_BYTES,
    PAYLOAD_TYPE,
    RuntimeRules,
    read_envelope,
    read_payload,
    write_envelope,
    write_payload,
)
from ralbuild.contract.transducer import Transducer
from ralbuild.digests import open_regular
from ralbuild.errors import CompileError, HostError, UsageError
from ralbuild.files import write_atomically
from ralbuild.signing import PrivateKey, PublicKey, key_id, sign, verify


@dataclass(frozen=True, slots=True)
class Checked:
    """A signed file whose signature holds.

    Attributes:
        rules: what it says.
        machine: its table.
        sha256: of the signed payload: what `/ral/info` names.
        key: name of the key.
        data: the whole file.
    """

    rules: RuntimeRules
    machine: Transducer
    sha256: str
    key: str
    data: bytes

    @property
    def summary(self) -> str:
        """Serial, numbers by kind and key, in one line."""
        counts = Counter(rule.kind for rule in self.rules.rules)
        rules = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "none"
        return f"{rules}; serial {self.rules.serial}, signed by {self.key[:16]}, sha256:{self.sha256[:12]}"


def publish(rules: RuntimeRules, key: PrivateKey, path: Path) -> str:
    """Sign ``rules`` and replace ``path`` by the file; return the payload's SHA-256.

    Raises:
        CompileError: when the file would be larger than servers read.
        HostError: when it cannot be written.
    """
    payload = write_payload(rules)
    public = key.public_key()
    data = write_envelope(payload, key_id(public), sign(key, pae(PAYLOAD_TYPE, payload)))
    if len(data) > MAX_FILE_BYTES:
        message = f"the signed file has {len(data)} bytes, at most {MAX_FILE_BYTES} are read"
        raise CompileError(message, place=str(path), hint="move rules that seldom change into the image")
    try:
        write_atomically(path, data, durable=True)
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(path)) from None
    return sha256_hex(payload)


def open_signed(path: Path, key: PublicKey) -> Checked:
    """Read a signed file.

    Raises:
        UsageError: when it cannot be read, is not signed by ``key``, or is not what servers read.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path)) from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"has more than {MAX_FILE_BYTES} bytes", place=str(path))
    hint = "`ralbuild rules compile` writes one"
    try:
        envelope = read_envelope(data, path.name)
        if not any(verify(key, envelope.signed_bytes, sig) for _, sig in envelope.signatures):
            message = f"is not signed by the key {key_id(key)[:16]}"
            raise UsageError(message, place=str(path), hint="nothing of it was read")
        rules = read_payload(envelope.payload, path.name)
        machine = rules.machine(path.name)
    except FormatError as error:
        raise UsageError(error.message, place=error.where, hint=hint) from None
    return Checked(rules, machine, sha256_hex(envelope.payload), key_id(key), data)
