"""How fast verify reads weights, as a ratio to `openssl dgst -sha256` on the same files in the same run.

Verify computes two digests (file and layer) and looks at every value in one read; openssl computes
one digest. Files are in the page cache. Rounds alternate, and the best of each counts, so that other
work on the machine disturbs both alike.

    python -m benchmarks.verify --json                      two made-up shards, 512 MB each
    python -m benchmarks.verify --model DIR                 a real folder
    python -m benchmarks.verify --sparse-gb 46              one sparse shard, for memory
    python -m benchmarks.verify --sparse-gb 3 --shards 282  many shards, for memory
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ralbuild.digests import DigestCache, scan_file
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import read_header
from ralbuild.weights.values import ValueScan, read_verdict


def write_shard(path: Path, size: int, *, sparse: bool) -> None:
    """Write a BF16 shard of about ``size`` bytes: like weights, or a hole that reads as zeros."""
    import numpy as np

    rows, columns = max(1, size // 8192), 4096
    header = {"w": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * columns * 2]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + rows * columns * 2)
            return
        block = np.random.default_rng(7).normal(0, 0.02, (1024, columns)).astype(np.float32)
        data = (block.view(np.uint32) >> 16).astype("<u2").tobytes()
        left = rows * columns * 2
        while left:
            left -= file.write(data[:left])


def read_all(paths: list[Path], jobs: int) -> int:
    """Read files as verify does: two digests and every value; return the number of faults."""

    def one(path: Path) -> int:
        header = read_header(path, path.name, Findings())
        if header is None:
            raise SystemExit(f"{path} is not a safetensors file")
        digests = scan_file(path, DigestCache(None), 0, observer=ValueScan(header), own=True)
        verdict = read_verdict(digests.verdict, header)
        return len(verdict.faults) + verdict.more if verdict else 0

    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(one, paths))


def timed(work: Any) -> float:
    """Return the wall time of a call, in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(paths: list[Path], rounds: int, jobs: int) -> dict[str, Any]:
    """Alternate openssl and verify over the same warm files."""
    size = sum(path.stat().st_size for path in paths)
    openssl = ["openssl", "dgst", "-sha256", *map(str, paths)]
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        theirs.append(timed(lambda: subprocess.run(openssl, check=True, stdout=subprocess.DEVNULL)))
        ours.append(timed(lambda: read_all(paths, jobs)))
    return {
        "bytes": size,
        "files": len(paths),
        "jobs": jobs,
        "openssl_seconds": round(min(theirs), 3),
        "verify_seconds": round(min(ours), 3),
        "verify_gb_per_second": round(size / min(ours) / 1e9, 3),
        "openssl_ratio": round(min(ours) / min(theirs), 3),
    }


def memory(paths: list[Path], jobs: int) -> dict[str, Any]:
    """Read once and report the process's peak memory."""
    seconds = timed(lambda: read_all(paths, jobs))
    return {
        "bytes": sum(path.stat().st_size for path in paths),
        "files": len(paths),
        "seconds": round(seconds, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> int:
    """Run the measurement that the options ask for; the last line is one JSON object with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="measure the safetensors files of this folder")
    parser.add_argument("--mb", type=int, default=512, help="size of a made-up shard; default: 512")
    parser.add_argument(
        "--shards", type=int, default=0, help="number of made-up shards; default: 2, sparse 1"
    )
    parser.add_argument("--sparse-gb", type=int, default=0, help="sparse shards of so much in all: memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ralbuild-bench-") as name:
        if options.model is not None:
            paths = sorted(options.model.glob("*.safetensors"))
        else:
            count = options.shards or (1 if options.sparse_gb else 2)
            each = options.sparse_gb * 10**9 // count if options.sparse_gb else options.mb << 20
            paths = [Path(name) / f"shard-{number:03}.safetensors" for number in range(count)]
            for path in paths:
                write_shard(path, each, sparse=bool(options.sparse_gb))
        if options.sparse_gb:
            result = memory(paths, options.jobs)
        else:
            result = measure(paths, options.rounds, options.jobs)
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:<22} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
