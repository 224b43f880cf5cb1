"""Figures of the GPU's decode loop: what the patch adds to a step, launches, bytes, memory. **Not run yet.**

    python -m benchmarks.gpu [--steps N] [--json] ROOT

ROOT is the file tree of an image that was built with ``--target cuda``, unpacked. Each number of slots is
measured in its smallest graph with the patch, and in one that was captured without it; rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import parse_json
from ralbuild.runtime.cuda.decode import CudaGraph
from ralbuild.runtime.cuda.graphs import Graphs
from ralbuild.runtime.cuda.kv import StepView
from ralbuild.runtime.cuda.report import HEAD, WORD_BYTES
from ralbuild.runtime.cuda.start import load_model, make_graph
from ralbuild.runtime.preflight import check_files
from ralbuild.runtime.settings import Settings
from ralbuild.runtime.steps import read_tables

ROUNDS = 7


def without_patch(graph: CudaGraph) -> Graphs:
    """Capture the model's forward passes alone, over the same buffers."""
    found, pool = graph._buffers.tensors, graph.cache.pool

    def step(slots: int, span: int) -> None:
        view = StepView(pool, found["position"][:slots], span)
        found["logits"][:slots].copy_(graph._model(found["input_id"][:slots], view))

    bare = Graphs(graph._device, graph._graphs._driver, graph._sizes.slots, pool.capacity)
    with graph._device.active():
        bare.warm(step)
        bare.capture(step, lambda _done, _total: None)
    return bare


def seconds(graph: CudaGraph, graphs: Graphs, slots: int, steps: int) -> tuple[float, float]:
    """Return the seconds that a step takes, and those of them that the host is busy with."""
    with graph._device.active():
        begin = time.perf_counter()
        for _ in range(steps):
            graphs.replay(slots, 1)
        host = time.perf_counter() - begin
        graph._device.mark()()
        return (time.perf_counter() - begin) / steps, host / steps


def launches(step: Callable[[], None]) -> int:
    """Return the kernels that ``step`` launches, as CUPTI counts them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
    return sum(event.device_type.name == "CUDA" for event in seen.events())


def measure(root: Path, steps: int) -> dict[str, Any]:
    """Load an image and measure every number of slots."""
    from ralbuild.runtime.cuda.driver import Driver

    driver = Driver()
    total = driver.memory()[1]
    used = {"before": total - driver.memory()[0]}
    from ralbuild.runtime.cuda.device import Device

    checked = check_files(Settings(root=str(root)))
    tables = read_tables(checked.bundle, checked.objects)
    device = Device()
    plain = parse_json(checked.files["config.json"], "config.json")
    told: Callable[[int, int], None] = lambda _done, _total: None  # noqa: E731
    with device.active():
        model = load_model(checked, plain, driver, device.place, told)
    used["weights"] = total - driver.memory()[0]
    begin = time.perf_counter()
    graph = make_graph(checked, tables, model, device, driver, told)
    captured = time.perf_counter() - begin
    used["captured"] = total - driver.memory()[0]
    bare = without_patch(graph)
    rows = []
    for slots in sorted({slots for slots, _ in graph.shapes}):
        both: list[list[tuple[float, float]]] = [[], []]
        for _ in range(ROUNDS):
            for found, graphs in zip(both, (graph._graphs, bare), strict=True):
                found.append(seconds(graph, graphs, slots, steps))
        whole, alone = (statistics.median(step for step, _ in found) for found in both)
        host = statistics.median(host for _, host in both[0])
        rows.append(
            {"slots": slots, "step_us": 1e6 * whole, "patch_us": 1e6 * (whole - alone), "host_us": 1e6 * host}
        )
    with device.active():
        span = min(span for _, span in graph.shapes)
        count = launches(lambda: graph._step(1, span))
    return {
        "capture_seconds": captured,
        "graphs": len(graph.shapes),
        "launches_step": count,
        "patch_launches": len(checked.bundle.patch),
        "bytes_to_host_token": WORD_BYTES + HEAD,
        "bytes_to_host_step": 4 * max(tables.machine.table.rules, 1),
        "memory_bytes": used,
        "steps": rows,
    }


def main() -> None:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("root", type=Path)
    options = parser.parse_args()
    found = measure(options.root, options.steps)
    if not options.json:
        for row in found["steps"]:
            step, patch, host = row["step_us"], row["patch_us"], row["host_us"]
            print(f"{row['slots']:4} slots {step:9.1f} us a step, {patch:7.1f} the patch, {host:7.1f} host")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
