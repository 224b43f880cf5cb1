"""How fast the image's server starts and answers, against `transformers serve` in the same run.

    python -m benchmarks.runtime [--model DIR] [--peer-python PYTHON] [--quick] [--json]

PYTHON has transformers with its serving packages (`pip install "transformers[serving]"`); without it the
present one is taken, where the `dev` extra has them. All servers are processes on this machine with the same
threads. Rounds alternate between them, and the median counts, so that other work on the machine disturbs all
alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.real_model import add_model_option, model_folder
from benchmarks.serving import Round, Server
from ralbuild.contract import places
from ralbuild.pipeline.compiling import compile_model
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import LineReport

PARTS = ("start", "speed", "rules", "ways")
SERVED = "bench"
WORDS = ("risk", "market", "bank", "loan", "the", "and", "garden", "history", "number", "company")
"""Terms that do occur; further ones are made up and only fill the table."""
HEALTH_STARTS = 12
PEERS = {
    "bfloat16": ("--dtype", "bfloat16"),
    "float32": ("--dtype", "float32"),
    "float32 batching": ("--dtype", "float32", "--continuous-batching", "--cb-num-blocks", "64"),
}


def terms(count: int) -> list[str]:
    """Return ``count`` terms to print in bold."""
    return [*WORDS, *(f"synthetic term {number}" for number in range(count))][:count]


def lay_out(model: Path, folder: Path, rules: int) -> Path:
    """Build a bundle with ``rules`` rules and lay out what the launcher reads; return its root."""
    config = folder / "ral-config.yaml"
    folder.mkdir(parents=True)
    lines = ['version: "0.3"', f'model: "{SERVED}"', "max_batch_size: 8", "max_seq_len: 1024"]
    if rules:
        lines += ["postprocessing:", "  output_transformers:"]
        lines += [f'    - {{name: "html_enhancer", config: {{bold_terms: {json.dumps(terms(rules))}}}}}']
    config.write_text("\n".join(lines) + "\n")
    cache = folder / "cache"
    compiled = compile_model(
        BuildRequest(model, config, archs=(), cache_dir=cache), LineReport(sys.stderr, show=False)
    )
    root = folder / "root"
    objects = Path(f"{root}{places.OBJECTS_DIR}")
    objects.mkdir(parents=True)
    for digest, data in compiled.objects.items():
        (objects / digest).write_bytes(data)
    Path(f"{root}{places.BUNDLE_FILE}").write_bytes(compiled.bundle_json)
    Path(f"{root}{places.CONFIG_FILE}").write_bytes(config.read_bytes())
    Path(f"{root}{places.MODEL_DIR}").symlink_to(model.resolve())
    return root


class Bench:
    """The parts of one run; every part closes the servers that it starts."""

    def __init__(self, model: Path, peer: str, folder: Path, rounds: int, tokens: int) -> None:
        self.model = model
        self.peer = peer
        self.folder = folder
        self.rounds = rounds
        self.tokens = tokens
        self.roots = {count: lay_out(model, folder / f"rules-{count}", count) for count in (0, 10, 1000)}
        self._threads = str(len(os.sched_getaffinity(0)))

    def ours(self, rules: int, env: dict[str, str] | None = None) -> Server:
        """Start our server with so many rules."""
        settings = {"RAL_ROOT": str(self.roots[rules]), "RAL_HOST": "127.0.0.1", "RAL_PORT": "{port}"}
        command = [sys.executable, "-m", "ralbuild.runtime"]
        return Server(command, SERVED, self.folder / f"ours-{rules}.log", settings | (env or {}))

    def theirs(self, mode: str, env: dict[str, str] | None = None) -> Server:
        """Start `transformers serve` in one of `PEERS`' modes."""
        command = [self.peer, "-m", "transformers.cli.transformers", "serve", str(self.model), *PEERS[mode]]
        command += ["--device", "cpu", "--host", "127.0.0.1", "--port", "{port}"]
        settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": self._threads}
        log = self.folder / f"peer-{mode.replace(' ', '-')}.log"
        return Server(command, str(self.model), log, settings | (env or {}))

    def cold_starts(self) -> dict[str, float]:
        """Return seconds from a process's start to its first text; bytecode there, and none anywhere."""
        kinds: dict[str, Callable[[dict[str, str] | None], Server]] = {
            "ralbuild": lambda env: self.ours(10, env),
            "transformers serve": lambda env: self.theirs("bfloat16", env),
        }
        found: dict[str, list[float]] = {}
        for number in range(self.rounds + 1):
            for name, start in kinds.items():
                found.setdefault(name, []).append(_once(start(None), _answer))
                if number == 1:
                    bare = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(self.folder / "none")}
                    found[f"{name}, no bytecode"] = [_once(start(bare), _answer)]
        # The first start of each brings its files into memory and is not counted.
        return {name: statistics.median(times[1:] or times) for name, times in found.items()}

    def health(self) -> float:
        """Return seconds from a start of ours to an answer of /health; the first is not counted."""
        times = [_once(self.ours(10), Server.wait_health) for _ in range(HEALTH_STARTS + 1)]
        return statistics.median(times[1:])

    def speeds(self) -> dict[str, dict[int, list[Round]]]:
        """Return rounds by server and number of clients; ours and every mode of the other, in turn."""
        with ExitStack() as stack:
            servers = {"ralbuild": self.ours(10), **{mode: self.theirs(mode) for mode in PEERS}}
            for server in servers.values():
                stack.callback(server.close)
                server.wait_answer(2)
            out: dict[str, dict[int, list[Round]]] = {name: {1: [], 8: []} for name in servers}
            for _ in range(self.rounds):
                for clients in (1, 8):
                    for name, server in servers.items():
                        if name == "float32" and clients == 8:
                            continue  # serves one after another, as bfloat16 does
                        out[name][clients].append(server.ask_together(clients, self.tokens))
        return out

    def ways(self) -> dict[str, dict[str, float]]:
        """Return the article's table 5.3: the engine alone, a middleware, and folded rules; 1,000 rules."""
        listed = self.folder / "terms.txt"
        listed.write_text("\n".join(terms(1000)))
        with ExitStack() as stack:
            direct, folded = self.ours(0), self.ours(1000)
            upstream = f"http://127.0.0.1:{direct.port}"
            proxy = [sys.executable, "-m", "benchmarks.middleware", "--upstream", upstream]
            proxy += ["--port", "{port}", "--terms", str(listed)]
            middleware = Server(proxy, SERVED, self.folder / "middleware.log")
            servers = {"direct engine": direct, "middleware": middleware, "folded": folded}
            for server in servers.values():
                stack.callback(server.close)
                server.wait_answer(2)
            rounds: dict[str, list[Round]] = {name: [] for name in servers}
            cpu: dict[str, float] = dict.fromkeys(servers, 0.0)
            for _ in range(2 * self.rounds):
                for name, server in servers.items():
                    before = direct.cpu_seconds()
                    rounds[name].append(server.ask_together(8, self.tokens))
                    cpu[name] += rounds[name][-1].cpu
                    cpu[name] += direct.cpu_seconds() - before if name == "middleware" else 0
            memory = {name: server.peak_mb() for name, server in servers.items()}
            memory["middleware"] += memory["direct engine"]
        return {name: _row(rounds[name], memory[name], cpu[name]) for name in servers}

    def folded(self) -> dict[str, Any]:
        """Run `benchmarks.folded` in a process of its own: shares of a step, and steps by rules."""
        roots = [str(root) for root in self.roots.values()]
        command = [sys.executable, "-m", "benchmarks.folded", "--steps", str(12 * self.rounds), *roots]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))


def _once(server: Server, wait: Callable[[Server], float]) -> float:
    """Return what ``wait`` says of a server that was just started, and end it."""
    try:
        return wait(server)
    finally:
        server.close()


def _answer(server: Server) -> float:
    return server.wait_answer(1)


def _row(rounds: list[Round], peak_mb: float, cpu: float) -> dict[str, float]:
    totals = sorted(answer.total for item in rounds for answer in item.answers)
    return {
        "mean_s": statistics.mean(totals),
        "p99_s": totals[min(len(totals) - 1, int(len(totals) * 0.99))],
        "first_s": statistics.mean(item.first for item in rounds),
        "peak_mb": peak_mb,
        "cpu_s": cpu,
    }


def summary(found: dict[str, dict[int, list[Round]]]) -> dict[str, dict[str, float]]:
    """Return median speeds, processor time and waiting by server and number of clients."""
    return {
        f"{name}, {clients}": {
            "tokens_s": statistics.median(item.speed for item in rounds),
            "cpu_ms": statistics.median(item.cpu_ms for item in rounds),
            "first_s": statistics.median(item.first for item in rounds),
        }
        for name, by_clients in found.items()
        for clients, rounds in by_clients.items()
        if rounds
    }


def start_part(bench: Bench) -> dict[str, Any]:
    """Compare cold starts."""
    starts = bench.cold_starts()
    return {
        "cold_start_ratio": starts["transformers serve"] / starts["ralbuild"],
        "cold_start_bare_ratio": starts["transformers serve, no bytecode"] / starts["ralbuild"],
        "health_s": bench.health(),
        "cold_start": starts,
    }


def speed_part(bench: Bench) -> dict[str, Any]:
    """Compare with the other's fastest mode, for one client and for eight."""
    table = summary(bench.speeds())
    out: dict[str, Any] = {}
    for clients in (1, 8):
        names = [f"{mode}, {clients}" for mode in PEERS if f"{mode}, {clients}" in table]
        best = max(names, key=lambda name: table[name]["tokens_s"])
        ours, theirs = table[f"ralbuild, {clients}"], table[best]
        out[f"batch{clients}_ratio"] = ours["tokens_s"] / theirs["tokens_s"]
        out[f"batch{clients}_cpu_ratio"] = theirs["cpu_ms"] / ours["cpu_ms"]
        out[f"batch{clients}_first_ratio"] = theirs["first_s"] / ours["first_s"]
        out[f"batch{clients}_best_peer"] = best.rpartition(",")[0]
    return out | {"speed": table}


def result(bench: Bench, parts: list[str]) -> dict[str, Any]:
    """Run the parts; ratios above 1 mean that ours is the better one."""
    out: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "load": os.getloadavg()[0],
        "tokens": bench.tokens,
    }
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "start": lambda: start_part(bench),
        "speed": lambda: speed_part(bench),
        "rules": bench.folded,
        "ways": lambda: {"ways": bench.ways()},
    }
    for part in parts:
        begin = time.monotonic()
        out |= work[part]()
        print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return out


def show(found: dict[str, Any]) -> None:
    """Print the result as tables."""
    for key, value in found.items():
        if not isinstance(value, dict):
            print(f"{key:<22} {value:.3f}" if isinstance(value, float) else f"{key:<22} {value}")
            continue
        print(f"\n{key}")
        for name, row in value.items():
            cells = row.items() if isinstance(row, dict) else [("", row)]
            text = "  ".join(f"{v:.3f} {k}" if isinstance(v, float) else f"{v} {k}" for k, v in cells)
            print(f"  {name:<36} {text}")


def main() -> int:
    """Run the measurement; with --json the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_model_option(parser)
    parser.add_argument("--peer-python", default=sys.executable, help="Python with transformers[serving]")
    parser.add_argument("--quick", action="store_true", help="one round of each: about 3 minutes")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens an answer; default: %(default)s")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    rounds = 1 if options.quick else 5
    with tempfile.TemporaryDirectory(prefix="ralbuild-bench-") as name:
        model = model_folder(options.model)
        found = result(Bench(model, options.peer_python, Path(name), rounds, options.tokens), parts)
    show(found)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
