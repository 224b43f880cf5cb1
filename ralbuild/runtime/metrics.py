"""What the worker counts: counters, gauges and histograms of the decode loop, in Prometheus' names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from ralbuild.contract.bundle import Bundle, Rule

if TYPE_CHECKING:  # `/metrics` answers before numpy is there
    from ralbuild.runtime.lanes import TextState

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All series of one worker; the supervisor adds them up over workers (`ralbuild.runtime.exposition`)."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.build = Gauge("ralbuild_build_info", "1; the labels say what runs.", _BUILD, registry=registry)
        self.build.labels(version, "", "").set(1)
        self._version = version
        self._rules: list[Counter] = []
        self._runtime_rules: Counter | None = None
        self._lock = threading.Lock()
        self.running = Gauge("ralbuild_requests_running", "Requests that hold a slot.", registry=registry)
        self.waiting = Gauge("ralbuild_requests_waiting", "Requests in the queue.", registry=registry)
        self.slots = Gauge("ralbuild_slots", "Requests that can be decoded together.", registry=registry)
        self.kv_bytes = Gauge("ralbuild_kv_cache_bytes", "Bytes held for keys and values.", registry=registry)
        self.kv_limit = Gauge("ralbuild_kv_cache_limit_bytes", "Most bytes for them.", registry=registry)
        self.kv_kept = Gauge(
            "ralbuild_kv_kept_bytes",
            "Bytes of what prompts begin with, beside the cache.",
            registry=registry,
        )
        self.rejected = Counter(
            "ralbuild_requests_rejected", "Refused requests by reason.", ["code"], registry=registry
        )
        self.cancelled = Counter(
            "ralbuild_requests_cancelled", "Requests whose client went away.", registry=registry
        )
        self.failures = Counter("ralbuild_step_failures", "Decode steps that failed.", registry=registry)
        self.prompt_tokens = Counter("ralbuild_prompt_tokens", "Tokens read.", registry=registry)
        self.generated_tokens = Counter("ralbuild_generated_tokens", "Tokens drawn.", registry=registry)
        self.first_token = Histogram(
            "ralbuild_time_to_first_token_seconds",
            "From arrival to first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "ralbuild_inter_token_seconds",
            "From one token of a text to its next.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.held_bytes = Gauge(
            "ralbuild_held_back_bytes",
            "Bytes that rules and stop strings have read and not yet decided, over all running texts.",
            registry=registry,
        )
        self.step = Histogram(
            "ralbuild_decode_step_seconds",
            "One decode step of all running texts.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.rules = Counter(
            "ralbuild_rule_events",
            "Matches by rule; /ral/info names it.",
            ["rule", "kind", "source"],
            registry=registry,
        )
        self.refused = Counter(
            "ralbuild_ban_refusals", "Candidate tokens that a ban refused.", registry=registry
        )
        self.masked = Counter(
            "ralbuild_draws_masked", "Draws for which every token was looked at.", registry=registry
        )
        self.exhausted = Counter(
            "ralbuild_ban_exhausted", "Texts ended because no token was legal.", registry=registry
        )

    def describe(self, bundle: Bundle, digest: str) -> None:
        """Say what is served and make a series for every rule, so that zero is visible."""
        self.build.clear()
        self.build.labels(self._version, bundle.model, f"sha256:{digest}").set(1)
        self.slots.set(bundle.engine.max_batch_size)
        self._rules = [
            self.rules.labels(str(number), rule.kind, rule.source) for number, rule in enumerate(bundle.rules)
        ]

    def count_rules(self, slot: TextState) -> None:
        """Count what happened in a slot since it was last counted, and clear it there."""
        self.count_events(slot.events)
        slot.events.clear()
        if slot.refused:
            self.refused.inc(slot.refused)
            slot.refused = 0
        if slot.masked:
            self.masked.inc(slot.masked)
            slot.masked = 0
        if slot.exhausted:
            self.exhausted.inc()
            slot.exhausted = False

    def count_events(self, rules: Sequence[int]) -> None:
        """Count one match for each rule id."""
        with self._lock:
            for rule in rules:
                self._rules[rule].inc()

    def count_runtime_rules(self, serial: int, rules: Sequence[Rule]) -> tuple[Callable[[], None], ...]:
        """Return what counts a match of each rule of the serving side; series of other files end."""
        if self._runtime_rules is not None:
            self.registry.unregister(self._runtime_rules)
        self._runtime_rules = counter = Counter(
            "ralbuild_runtime_rule_events",
            "Matches by rule of the signed file in force; /ral/info names it.",
            ["serial", "rule", "kind", "place"],
            registry=self.registry,
        )
        return tuple(
            counter.labels(str(serial), str(number), rule.kind, rule.place).inc
            for number, rule in enumerate(rules)
        )

    def series(self) -> list[Any]:
        """Return every family as plain values: name, help, type, samples (name, labels, value)."""
        return [
            [
                family.name,
                family.documentation,
                family.type,
                [[sample.name, sample.labels, sample.value] for sample in family.samples],
            ]
            for family in self.registry.collect()
        ]


_BUILD = ["version", "model", "bundle"]
