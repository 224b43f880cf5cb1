"""What the folded rules take of a decode step, measured inside one process. `benchmarks.runtime` runs it.

    python -m benchmarks.folded [--steps N] ROOT [ROOT ...]

Each ROOT is an image's file tree; all hold the same model, each its own rules. One loaded model steps
with the rules of each in turn. Times are processor time, for other work on the machine moves them least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import parse_json
from ralbuild.contract.decoder_spec import DecoderSpec, read_spec
from ralbuild.runtime.host import usable_cpus
from ralbuild.runtime.lanes import Read
from ralbuild.runtime.model.graph import DecodeGraph, Lane
from ralbuild.runtime.model.weights import DTYPES, load_decoder, prepare_torch, read_weights
from ralbuild.runtime.preflight import Checked, check_files
from ralbuild.runtime.sampler import Draw, Logits
from ralbuild.runtime.settings import Settings
from ralbuild.runtime.steps import Patch, PatchSlot, PenalizeStep, SampleStep, link_patch, read_tables

PROMPT = tuple(range(300, 339))


class TimedPatch(Patch):
    """A patch that adds up its own processor time, by what it does."""

    def __init__(self, patch: Patch) -> None:
        super().__init__(patch.tables, patch.steps, patch.sampler)
        self.sampling = self.rules = 0.0

    def run(self, logits: Logits, slots: Any) -> None:
        """Run every step and time it."""
        for step in self.steps:
            begin = time.process_time()
            step.run(logits, slots)
            if isinstance(step, PenalizeStep | SampleStep):
                self.sampling += time.process_time() - begin
            else:
                self.rules += time.process_time() - begin


def measure(checked: list[Checked], batch: int, steps: int) -> dict[str, Any]:
    """Step ``batch`` texts with the rules of every image in turn; seconds of processor time a step."""
    first = checked[0]
    spec = read_spec(parse_json(first.files["config.json"], "config.json"))
    if not isinstance(spec, DecoderSpec):
        raise SystemExit(spec)
    dtype = DTYPES[first.bundle.engine.dtype]
    weights = read_weights(first.weights)
    model = load_decoder(spec, weights, dtype, widen=False, progress=lambda _done, _total: None)
    lanes: list[list[Lane]] = []
    graphs: list[DecodeGraph] = []
    patches: list[TimedPatch] = []
    for item in checked:
        tables = read_tables(item.bundle, item.objects)
        patch = TimedPatch(link_patch(item.bundle, item.manifest, tables, item.objects))
        graph = DecodeGraph(model, patch, first.bundle.engine.max_seq_len)
        patches.append(patch)
        graphs.append(graph)
        lanes.append([_read(graph, patch.open(0, Draw(seed=number))) for number in range(batch)])
    for patch in patches:
        patch.sampling = patch.rules = 0.0
    times: list[list[float]] = [[] for _ in checked]
    for _ in range(steps):
        for number, graph in enumerate(graphs):
            begin = time.process_time()
            graph.advance([], lanes[number])
            times[number].append(time.process_time() - begin)
    return {
        "step_s": [statistics.median(item) for item in times],
        "share": [patch.rules / sum(item) for patch, item in zip(patches, times, strict=True)],
        "sampling_share": [patch.sampling / sum(item) for patch, item in zip(patches, times, strict=True)],
    }


def _read(graph: DecodeGraph, slot: PatchSlot) -> Lane:
    lane = graph.open(slot, PROMPT)
    graph.advance([Read(lane, PROMPT)], [])
    return lane


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("roots", nargs="+", type=Path)
    options = parser.parse_args()
    prepare_torch(usable_cpus())
    checked = [check_files(Settings(root=str(root))) for root in options.roots]
    found = {str(batch): measure(checked, batch, options.steps) for batch in (1, 8)}
    worst = max(
        max(a + b for a, b in zip(v["share"], v["sampling_share"], strict=True)) for v in found.values()
    )
    ratio = found["8"]["step_s"][0] / found["8"]["step_s"][-1]
    rules_only = max(max(item["share"]) for item in found.values())
    print(
        json.dumps(
            {
                "folded_share": worst,
                "rules_share": rules_only,
                "rules_1000_ratio": ratio,
                "steps": found,
            }
        )
    )


if __name__ == "__main__":
    main()
