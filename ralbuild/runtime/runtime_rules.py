"""Rules of the serving side in the worker: what a signed file says, applied after the image's own rules.

The supervisor has checked the file (`ralbuild.runtime.rule_file`) and says what is in force. Rules take
effect for requests that come from then on; what is compiled into the image is never touched by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ralbuild.contract.bundle import Rule
from ralbuild.contract.runtime_rules import INPUT, OUTPUT, read_payload
from ralbuild.contract.transducer import Slot, Transducer
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.requests import Ask


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of one file. Answers that began under it end under it.

    Attributes:
        rules: for people, in the order of events.
        machine: the table.
        counters: count a match, by rule. An answer that outlives its rule set counts into series that
            are no longer shown, never into those of the rules that came after.
    """

    rules: tuple[Rule, ...]
    machine: Transducer
    counters: tuple[Callable[[], None], ...]

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
        for number in events:
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


def read_rule_set(payload: bytes, metrics: Metrics) -> RuleSet:
    """Return the rules of a payload that the supervisor accepted; raises FormatError for any other one."""
    rules = read_payload(payload, "runtime rules")
    machine = rules.machine("runtime rules")
    return RuleSet(rules.rules, machine, metrics.count_runtime_rules(rules.serial, rules.rules))


def texts_of(ask: Ask) -> list[str]:
    """Return every text that a client sent."""
    return [ask.prompt] if not ask.messages else [message["content"] for message in ask.messages]
