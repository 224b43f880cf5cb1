"""Rules of the serving side: a signed file outside the image, applied after the image's own rules.

The file is looked at every second. One that is new, whole, signed by the right key and not older than
what is in force takes its place at once for requests that come from then on; any other one changes
nothing, and a metric and a log line say so. What is compiled into the image is never touched by it.
"""

from __future__ import annotations

import os
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ralbuild.contract.bundle import Rule
from ralbuild.contract.codec import FormatError, sha256_hex
from ralbuild.contract.runtime_rules import (
    INPUT,
    MAX_FILE_BYTES,
    OUTPUT,
    read_envelope,
    read_payload,
)
from ralbuild.contract.transducer import Slot, Transducer
from ralbuild.runtime.ecdsa import PublicKey, read_public_key
from ralbuild.runtime.errors import ApiError, RuntimeRulesError
from ralbuild.runtime.log import log_event
from ralbuild.runtime.metrics import Metrics, RuntimeRuleMetrics
from ralbuild.runtime.requests import Ask
from ralbuild.runtime.settings import Settings

POLL_SECONDS = 1.0
_KEY_BYTES = 1 << 16


class _RefusedError(Exception):
    """The file cannot come into force; the text says why, and holds no text of a rule."""


@dataclass(slots=True)
class RuleSet:
    """One accepted file. Answers that began under it end under it.

    Attributes:
        sha256: of the signed payload.
        serial: the file's own number.
        rules: for people, in the order of events.
        machine: the table.
        counters: count a match, by rule. An answer that outlives its rule set counts into series that
            are no longer shown, never into those of the rules that came after.
        counts: matches so far, by rule.
    """

    sha256: str
    serial: int
    rules: tuple[Rule, ...]
    machine: Transducer
    counters: tuple[Callable[[], None], ...]
    counts: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.rules)

    @property
    def rewrites(self) -> bool:
        """True when answers can differ from what the image's rules let out."""
        return any(rule.kind != "refuse" for rule in self.rules)

    def admit(self, texts: Iterable[str], *, logprobs: bool) -> None:
        """Look at what a client sent.

        Raises:
            ApiError: 400 when a text holds what is refused, or the request asks for the model's own tokens.
        """
        if logprobs and self.rewrites:
            message = "log probabilities name the model's own tokens, which rules of the serving side hide"
            raise ApiError(400, "unsupported_parameter", message, param="logprobs")
        if not any(rule.kind == "refuse" for rule in self.rules):
            return
        for text in texts:
            _, events = self.machine.rewrite(INPUT, text.encode())
            if events:
                self.count(events)
                message = "a rule of the serving side refuses this request"
                extra = {"rule": f"refuse@{self.rules[events[0]].place}"}
                raise ApiError(400, "content_refused", message, extra=extra)

    def open(self) -> RuleText | None:
        """Return what rewrites one answer; None when no rule can."""
        return RuleText(self, self.machine.start(OUTPUT)) if self.rewrites else None

    def count(self, events: Sequence[int]) -> None:
        """Count one match for each rule id."""
        with self._lock:
            for number in events:
                self.counts[number] += 1
                self.counters[number]()


@dataclass(frozen=True, slots=True)
class RuleText:
    """One answer on its way through a rule set."""

    rules: RuleSet
    slot: Slot

    @property
    def stopped(self) -> bool:
        """True once a text was found that ends the answer."""
        return self.slot.stopped

    def feed(self, data: bytes) -> bytes:
        """Read bytes that the image's rules decided; return what is decided here."""
        return self._counted(self.slot.feed(data))

    def finish(self) -> bytes:
        """End the answer; return what was still held."""
        return self._counted(self.slot.finish())

    def _counted(self, out: bytes) -> bytes:
        if self.slot.events:
            self.rules.count(self.slot.events)
            self.slot.events.clear()
        return out


class WatchedRules:
    """The file, the key that must have signed it, and the rules in force.

    Args:
        path: of the file; a link is followed, so that a mounted folder may be replaced as a whole.
        key_path: PEM file of the public key; read once.
        metrics: where to count.

    Raises:
        RuntimeRulesError: when the key cannot be read, or the file cannot come into force: a server that
            was told to have such rules does not start without them.
    """

    def __init__(self, path: Path, key_path: Path, metrics: RuntimeRuleMetrics) -> None:
        self._path = path
        self._metrics = metrics
        self.refused = ""
        """Why the file that is there now is not in force; empty when it is."""
        try:
            self._key = _read_key(key_path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RuntimeRulesError(str(reason), place=str(key_path)) from None
        self._seen = _look(path)
        try:
            self.current = self._accept(None)
        except _RefusedError as error:
            hint = "unset RAL_RUNTIME_RULES to serve without such rules"
            raise RuntimeRulesError(str(error), place=str(path), hint=hint) from None

    def watch(self) -> None:
        """Look at the file every `POLL_SECONDS` from now on."""
        threading.Thread(target=self._watch, name="runtime-rules", daemon=True).start()

    def check(self) -> None:
        """Look at the file once, and put it in force when it has changed and may be."""
        seen = _look(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.current = self._accept(self.current)
        except _RefusedError as error:
            self._refuse(str(error))
        else:
            self.refused = ""

    def info(self) -> dict[str, Any]:
        """Return what `/ral/info` says; rules are named by their place, for their text must not be seen."""
        rules = self.current
        return {
            "sha256": rules.sha256,
            "serial": rules.serial,
            "key": self._key.name,
            "refused": self.refused or None,
            "rules": [
                {"id": number, "kind": rule.kind, "place": rule.place, "events": rules.counts[number]}
                for number, rule in enumerate(rules.rules)
            ],
        }

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            try:
                self.check()
            except Exception as error:  # a bug of ours must not end the watch
                self._refuse(type(error).__name__)
                log_event("runtime rules failed", trace=traceback.format_exc())

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        self._metrics.refuse()
        log_event("runtime rules refused", reason=reason, in_force=self.current.serial)

    def _accept(self, before: RuleSet | None) -> RuleSet:
        """Read, check and parse the file, and say so; ``before`` is what it replaces."""
        try:
            envelope = read_envelope(_read_file(self._path), "runtime rules")
            # Nothing of the payload is parsed before its signature holds.
            if not any(self._key.verifies(envelope.signed_bytes, sig) for _, sig in envelope.signatures):
                raise _RefusedError(f"is not signed by the key {self._key.name[:16]}")
            digest = sha256_hex(envelope.payload)
            if before is not None and digest == before.sha256:
                self._metrics.settle()
                return before
            rules = read_payload(envelope.payload, "runtime rules")
            if before is not None and rules.serial <= before.serial:
                reason = f"has the serial {rules.serial}; another file with {before.serial} is in force"
                raise _RefusedError(reason)
            machine = rules.machine("runtime rules")
        except OSError as error:
            raise _RefusedError(f"cannot be read: {error.strerror}") from None
        except FormatError as error:
            raise _RefusedError(str(error)) from None
        log_event("runtime rules in force", serial=rules.serial, sha256=digest, rules=len(rules.rules))
        counters = self._metrics.accept(digest, rules.serial, rules.rules)
        return RuleSet(digest, rules.serial, rules.rules, machine, counters)


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


def open_runtime_rules(settings: Settings, metrics: Metrics) -> WatchedRules | None:
    """Return the rules that this process was told to apply, watched from now on; None for none."""
    if not settings.runtime_rules:
        return None
    series = RuntimeRuleMetrics(metrics.registry)
    rules = WatchedRules(Path(settings.runtime_rules), Path(settings.runtime_rules_key), series)
    rules.watch()
    return rules


def texts_of(ask: Ask) -> list[str]:
    """Return every text that a client sent."""
    return [ask.prompt] if not ask.messages else [message["content"] for message in ask.messages]
