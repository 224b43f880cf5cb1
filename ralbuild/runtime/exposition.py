"""What `/metrics` says: the supervisor's own series, and its workers' added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ZEROED_HELP = (
    "Bytes of memory released at unload and not yet in use again, as measured; "
    "no CUDA call of this name exists, the name is the one that dashboards already ask for."
)
_LASTING = ("ralbuild_build_info", "ralbuild_slots", "ralbuild_kv_cache_limit_bytes")
"""Gauges that stay as they were while no worker runs; the others are 0 then."""
_VLLM = {
    "ralbuild_requests_running": "vllm:num_requests_running",
    "ralbuild_requests_waiting": "vllm:num_requests_waiting",
    "ralbuild_prompt_tokens": "vllm:prompt_tokens",
    "ralbuild_generated_tokens": "vllm:generation_tokens",
    "ralbuild_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "ralbuild_inter_token_seconds": "vllm:inter_token_latency_seconds",
}
_WAKE_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)

_Key = tuple[str, tuple[tuple[str, str], ...]]


class WorkerSeries:
    """The present worker's series on top of what earlier ones counted, so that counters never fall."""

    def __init__(self) -> None:
        self._families: list[Any] = []
        self._past: dict[_Key, float] = {}

    def update(self, families: list[Any]) -> None:
        """Take the worker's newest values."""
        self._families = families

    def retire(self) -> None:
        """The worker is gone: keep what it counted, and show empty gauges."""
        for name, _, kind, samples in self._families:
            for sample in samples:
                if kind != "gauge":
                    key = _key(sample)
                    self._past[key] = self._past.get(key, 0.0) + sample[2]
                    sample[2] = 0.0
                elif name not in _LASTING:
                    sample[2] = 0.0

    def by_label(self, name: str, label: str, **having: str) -> dict[str, float]:
        """Return the values of a sample name, by one label, of samples that have the others."""
        samples = [sample for metric in self.collect() for sample in metric.samples if sample.name == name]
        return {
            sample.labels[label]: float(sample.value)
            for sample in samples
            if having.items() <= sample.labels.items()
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the families, as a collector of prometheus_client does."""
        for name, text, kind, samples in self._families:
            metric = Metric(name, text, kind)
            for sample in samples:
                metric.add_sample(sample[0], sample[1], sample[2] + self._past.get(_key(sample), 0.0))
            yield metric


class _Aliases:
    """The names that vLLM's dashboards and schedulers ask for, made of ours."""

    def __init__(self, source: WorkerSeries) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield a family for each alias."""
        families = {metric.name: metric for metric in self._source.collect()}
        build = next(iter(families["ralbuild_build_info"].samples), None) if families else None
        labels = {"model_name": build.labels["model"] if build else "", "engine": "0"}
        for name, alias in _VLLM.items():
            if name in families:
                ours = families[name]
                metric = Metric(alias, ours.documentation, ours.type)
                for sample in ours.samples:
                    metric.add_sample(alias + sample.name[len(name) :], labels | sample.labels, sample.value)
                yield metric
        used, limit = (_only(families.get(f"ralbuild_kv_cache{part}_bytes")) for part in ("", "_limit"))
        share = Metric("vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", "gauge")
        share.add_sample(share.name, labels, used / limit if limit else 0.0)
        yield share


class ServerMetrics:
    """The supervisor's own series, and the one place that renders all."""

    def __init__(self, *, compat: str = "") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.worker = WorkerSeries()
        registry.register(self.worker)
        if compat == "vllm":
            registry.register(_Aliases(self.worker))
        self.ready = Gauge("ralbuild_ready", "1 while requests are served.", registry=registry)
        self.loaded = Gauge("ralbuild_model_loaded", "1 while a worker holds the model.", registry=registry)
        self.start_seconds = Gauge(
            "ralbuild_start_seconds", "Seconds from start to each stage.", ["stage"], registry=registry
        )
        self.requests = Counter(
            "ralbuild_requests", "Answers by path and status.", ["path", "status"], registry=registry
        )
        self.held = Gauge(
            "ralbuild_requests_preparing", "Requests in preparation or waiting for a wake.", registry=registry
        )
        self.memory = Gauge(
            "ralbuild_memory_bytes", "Resident bytes by kind, from /proc.", ["kind"], registry=registry
        )
        self.gpu_memory = Gauge(
            "ralbuild_gpu_memory_bytes",
            "Bytes of the worker's GPU by kind, from NVML; worker: of its process, where the driver says it.",
            ["uuid", "kind"],
            registry=registry,
        )
        self.zeroed = Gauge("container_cuda_mem_advise_zeroed_bytes", _ZEROED_HELP, registry=registry)
        self.unloads = Counter("ralbuild_unloads", "Times the memory was released.", registry=registry)
        self.restarts = Counter(
            "ralbuild_worker_restarts", "Workers started because one had died.", registry=registry
        )
        self.wake = Histogram(
            "ralbuild_wake_seconds",
            "From the wish to wake until the model was ready.",
            buckets=_WAKE_SECONDS,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return the exposition."""
        return generate_latest(self.registry)


class RuntimeRuleMetrics:
    """What became of the files with rules of the serving side; their matches are counted by the worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._in_force = Gauge(
            "ralbuild_runtime_rules_in_force",
            "1; the labels say which signed file is applied after the image's rules.",
            ["sha256", "serial"],
            registry=registry,
        )
        self._stale = Gauge(
            "ralbuild_runtime_rules_stale",
            "1 while the file that is there was refused and an earlier one is in force.",
            registry=registry,
        )
        self._loads = Counter(
            "ralbuild_runtime_rules_loads", "Files by what became of them.", ["result"], registry=registry
        )
        for result in ("accepted", "refused"):
            self._loads.labels(result)

    def accept(self, sha256: str, serial: int) -> None:
        """Say what is in force from now on."""
        self._in_force.clear()
        self._in_force.labels(f"sha256:{sha256}", str(serial)).set(1)
        self.settle()
        self._loads.labels("accepted").inc()

    def settle(self) -> None:
        """Say that the file that is there is the one in force."""
        self._stale.set(0)

    def refuse(self) -> None:
        """Say that a file was refused."""
        self._stale.set(1)
        self._loads.labels("refused").inc()


def _only(metric: Metric | None) -> float:
    """Return the value of a family with one sample, 0 without."""
    return float(metric.samples[0].value) if metric is not None and metric.samples else 0.0


def _key(sample: Any) -> _Key:
    return sample[0], tuple(sorted(sample[1].items()))
