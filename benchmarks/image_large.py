"""A changed rule of a large model, against docker's unchanged build and push of it, in one run.

    python -m benchmarks.image_large [--gb 15] [--rounds 3] [--json] [--folder DIR]

The weights are real bytes (15 GB is a model of 7 billion parameters), and both tools push to one
docker-registry on loopback that has the earlier image. Rounds alternate: a rule is changed and pushed with
`ralbuild image --output registry:`, then nothing is changed and `docker build` and `docker push` run again.
The last line of ``--json`` is one object:

- ``rule_change_ratio``: docker's seconds over ours, medians of the rounds.
- ``rule_change_bytes``: most bytes that one of ours sent.
- ``docker_seconds``, ``ours_seconds``: every round's.

Needs root, a docker engine (``DOCKER_HOST``), Debian's docker-registry, and room for the weights four times:
as files, as docker's layers, and in the registry as each tool pushes them. Docker's first push takes 40 s
a GB.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ralbuild
from benchmarks.image import BUILDER, RALBUILD, Bench, registry, versions

COPIES = 4.3
"""Times the weights' bytes that are on the disk at most, with what is small beside them."""
SHARD_GB = 4


def require_room(folder: Path, gb: int) -> None:
    """End with the bytes needed where they are not there."""
    asked = ["docker", "info", "--format", "{{.DockerRootDir}}"]
    root = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    places = {place.stat().st_dev: place for place in (Path(root), folder)}
    needed = int(gb * 1e9 * COPIES) // len(places)
    for place in places.values():
        if (free := shutil.disk_usage(place).free) < needed:
            raise SystemExit(
                f"error: {place}: needs {needed / 1e9:.0f} GB free, found {free / 1e9:.0f}; use --gb"
            )


def measure(folder: Path, gb: int, rounds: int) -> dict[str, Any]:
    """Do everything once and return the answer."""
    compileall.compile_dir(str(Path(ralbuild.__file__).parent), quiet=2)
    require_room(folder, gb)
    shards = -(-gb // SHARD_GB)
    bench = Bench(folder, gb * 1000 // shards, shards)
    ours: list[float] = []
    theirs: list[float] = []
    sent: list[int] = []
    with ExitStack() as stack:
        host = stack.enter_context(registry(folder, "registry"))
        pushed = bench.run("push base", *RALBUILD, "push", "oci:base", f"registry:{host}/base:v1", "--quiet")
        base, tag = f"{host}/base@{pushed.out.strip()}", f"{host}/docker:v1"
        bench.image("image and push", "--base", base, "--output", f"registry:{host}/ours:v0")
        options = ["--model", "model", "--base", base, "--out", "context", "--quiet"]
        bench.run("render", *RALBUILD, "render", *options)
        stack.callback(subprocess.run, ["docker", "rmi", "-f", tag, base], capture_output=True)
        build = ["docker", "build", "-q", "-t", tag, "context"]
        bench.run("docker build", *build, env=BUILDER)
        bench.run("docker push", "docker", "push", "-q", tag)
        for number in range(1, rounds + 1):
            bench.write_config(f"term {number}")
            words = ["--base", base, "--output", f"registry:{host}/ours:v{number}"]
            changed = bench.image("rule change", *words)
            ours.append(changed.seconds)
            sent.append(json.loads(changed.out)["written"])
            again = bench.run("docker build, again", *build, env=BUILDER)
            repeated = bench.run("docker push, again", "docker", "push", "-q", tag)
            theirs.append(again.seconds + repeated.seconds)
    return {
        "rule_change_ratio": round(statistics.median(theirs) / statistics.median(ours), 1),
        "rule_change_bytes": max(sent),
        "model_bytes": bench.model_bytes,
        "ours_seconds": [round(value, 2) for value in ours],
        "docker_seconds": [round(value, 1) for value in theirs],
        "commands": {name: value.figures() for name, value in bench.costs.items()},
        "load": [round(value, 1) for value in os.getloadavg()],
        "versions": versions(),
    }


def main() -> int:
    """Measure; print the figures and, with --json, one object on the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.image_large", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--gb", type=int, default=15, metavar="N", help="size of the weights; default: 15")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--folder", type=Path, help="where to work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ralbuild-bench-", dir=options.folder) as name:
        answer = measure(Path(name), max(1, options.gb), max(1, options.rounds))
    print("\n".join(f"{key}: {value}" for key, value in answer.items()))
    if options.json:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
