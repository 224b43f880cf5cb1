"""The signed file of the serving side's rules, as the supervisor watches it.

The file is looked at every second. One that is new, whole, signed by the right key and not older than
what is in force takes its place at once; any other one changes nothing, and a metric and a log line say
so. What is in force is kept here and handed to every worker, so it outlives them: neither a crash nor an
unload brings an older file back, or lets a bad one end the service.
"""

from __future__ import annotations

import asyncio
import os
import stat
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.bundle import Rule
from ralbuild.contract.codec import FormatError, sha256_hex
from ralbuild.contract.runtime_rules import MAX_FILE_BYTES, read_envelope, read_payload
from ralbuild.runtime.ecdsa import PublicKey, read_public_key
from ralbuild.runtime.errors import RuntimeRulesError
from ralbuild.runtime.exposition import RuntimeRuleMetrics
from ralbuild.runtime.log import log_event

POLL_SECONDS = 1.0
_KEY_BYTES = 1 << 16


class _RefusedError(Exception):
    """The file cannot come into force; the text says why, and holds no text of a rule."""


@dataclass(frozen=True, slots=True)
class SignedRules:
    """One accepted file.

    Attributes:
        payload: what was signed; a worker builds its rules from it.
        sha256: of the payload.
        serial: the file's own number.
        rules: for people, in the order of events.
    """

    payload: bytes
    sha256: str
    serial: int
    rules: tuple[Rule, ...]


class RuleFile:
    """The file, the key that must have signed it, and what is in force.

    Args:
        path: of the file; a link is followed, so that a mounted folder may be replaced as a whole.
        key_path: PEM file of the public key; read once.
        metrics: where to count.
        least: smallest serial that the first file may have. Nothing here outlives the process, so
            only whoever starts it can say which files are too old.

    Raises:
        RuntimeRulesError: when the key cannot be read, or the file cannot come into force: a server that
            was told to have such rules does not start without them.
    """

    def __init__(self, path: Path, key_path: Path, metrics: RuntimeRuleMetrics, least: int = 0) -> None:
        self._path = path
        self._metrics = metrics
        self._least = least
        self.refused = ""
        """Why the file that is there now is not in force; empty when it is."""
        try:
            self._key = _read_key(key_path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RuntimeRulesError(str(reason), place=str(key_path)) from None
        self._seen = _look(path)
        try:
            self.current = self._read(None)
        except _RefusedError as error:
            hint = "unset RAL_RUNTIME_RULES to serve without such rules"
            raise RuntimeRulesError(str(error), place=str(path), hint=hint) from None
        self._say()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Look at the file every `POLL_SECONDS`; call ``changed`` when others are in force than before."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            # What is in force changes on the loop, so no request comes between that and ``changed``.
            if self._settle(await asyncio.to_thread(self._examine)):
                changed()

    def check(self) -> bool:
        """Look at the file once; return whether others are in force than before."""
        return self._settle(self._examine())

    def info(self) -> dict[str, Any]:
        """Return what `/ral/info` says; rules are named by their place, for their text must not be seen."""
        return {
            "sha256": self.current.sha256,
            "serial": self.current.serial,
            "least_serial": self._least,
            "key": self._key.name,
            "refused": self.refused or None,
            "rules": [
                {"id": number, "kind": rule.kind, "place": rule.place}
                for number, rule in enumerate(self.current.rules)
            ],
        }

    def _examine(self) -> SignedRules | str | None:
        """Return what the file holds, or why that may not come into force; None when it is as before."""
        seen = _look(self._path)
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            return self._read(self.current)
        except _RefusedError as error:
            return str(error)
        except Exception as error:  # a bug of ours must not end the watch
            log_event("runtime rules failed", trace=traceback.format_exc())
            return type(error).__name__

    def _settle(self, found: SignedRules | str | None) -> bool:
        if found is None:
            return False
        if isinstance(found, str):
            self.refused = found
            self._metrics.refuse()
            log_event("runtime rules refused", reason=found, in_force=self.current.serial)
            return False
        self.refused = ""
        if found is self.current:
            self._metrics.settle()
            return False
        self.current = found
        self._say()
        return True

    def _say(self) -> None:
        rules = self.current
        self._metrics.accept(rules.sha256, rules.serial)
        log_event("runtime rules in force", serial=rules.serial, sha256=rules.sha256, rules=len(rules.rules))

    def _read(self, before: SignedRules | None) -> SignedRules:
        """Read and check the file; return ``before``, which it would replace, when it holds the same."""
        try:
            envelope = read_envelope(_read_file(self._path), "runtime rules")
            # Nothing of the payload is parsed before its signature holds.
            if not any(self._key.verifies(envelope.signed_bytes, sig) for _, sig in envelope.signatures):
                raise _RefusedError(f"is not signed by the key {self._key.name[:16]}")
            digest = sha256_hex(envelope.payload)
            if before is not None and digest == before.sha256:
                return before
            rules = read_payload(envelope.payload, "runtime rules")
            if before is not None and rules.serial <= before.serial:
                reason = f"has the serial {rules.serial}; another file with {before.serial} is in force"
                raise _RefusedError(reason)
            if rules.serial < self._least:
                raise _RefusedError(
                    f"has the serial {rules.serial}; RAL_RUNTIME_RULES_LEAST is {self._least}"
                )
            rules.machine("runtime rules")  # a worker builds it again, and must not be the one to refuse
        except OSError as error:
            raise _RefusedError(f"cannot be read: {error.strerror}") from None
        except FormatError as error:
            raise _RefusedError(str(error)) from None
        return SignedRules(envelope.payload, digest, rules.serial, rules.rules)


def _look(path: Path) -> tuple[int, ...] | None:
    """Return what tells two states of a file apart; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_file(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file; a pipe would wait for its other end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _RefusedError("is not a regular file")
    with os.fdopen(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _RefusedError(f"has more than {limit} bytes")
    return data


def _read_key(path: Path) -> PublicKey:
    try:
        return read_public_key(_read_file(path, _KEY_BYTES))
    except _RefusedError as error:
        raise ValueError(str(error)) from None
