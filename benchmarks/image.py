"""What building and pushing a model image costs, beside docker, buildah and skopeo, in one run.

    python -m benchmarks.image [--json] [--quick] [--mb N] [--folder DIR]

Four made-up shards of 1 GB (``--quick``: 256 MB), in the page cache for all. Needs root, a docker engine
(``DOCKER_HOST``), Debian's docker-registry, skopeo and buildah. Each tool starts with an empty cache and
each push goes to an empty registry of its own on loopback. The last line of ``--json`` is one object:

- ``docker_ratio``: `docker build` of the rendered context (the classic builder, which the docker SDK uses)
  and `docker save`, over `ralbuild image --output oci:`.
- ``buildah_ratio``: `buildah bud` and `buildah push oci:`, over the same.
- ``limit_ratio``: ours over the limit: one sha256 pass with two threads, then one copy.
- ``bytes_written_ratio``: bytes that our process wrote to the disk for a layout, over the model's bytes;
  ``push_written_ratio`` for a push.
- ``rule_change_ratio``: docker's no-change rebuild and push, over ours of a changed rule.
- ``flat_ratio``: processor seconds of a changed rule and its push for 64 GB of weights, over those for 1 GB,
  and ``flat_bytes``: bytes sent for each. The weights are sparse files whose digests the cache knows
  already, as after one read; the registry is one of ours that says it has them.
- ``push_skopeo_ratio``, ``push_docker_ratio``: their push of the image to an empty registry, over ours.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ralbuild
from benchmarks.made_model import remember_digests, write_model
from ralbuild.digests import DigestCache
from tests.cli_support import write_fake_base
from tests.registry_server import serve

SHARDS = 4
FLAT_GB = (1, 64)
CONFIG = """version: "0.3"
model: made
max_seq_len: 512
build: {{targets: []}}
postprocessing: {{output_transformers: [{{name: html_enhancer, config: {{bold_terms: [{term}]}}}}]}}
"""
RALBUILD = [sys.executable, "-m", "ralbuild.cli.main"]
BUILDER = {"DOCKER_BUILDKIT": "0"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process and its children took.

    Attributes:
        seconds: wall time.
        cpu: processor seconds.
        peak_mb: memory of the largest process, in MB; never less than this benchmark's own.
        written: bytes that went to the disk's cache.
        out: standard output.
    """

    seconds: float
    cpu: float
    peak_mb: int
    written: int
    out: str

    def figures(self) -> dict[str, float]:
        """Return what goes into the answer."""
        return {"seconds": round(self.seconds, 3), "cpu": round(self.cpu, 2), "peak_mb": self.peak_mb,
                "written": self.written}  # fmt: skip


class Bench:
    """The folder of one run, and the commands that are timed in it."""

    def __init__(self, folder: Path, shard_mb: int, shards: int = SHARDS, *, sparse: bool = False) -> None:
        self.folder = folder
        self.model_bytes = write_model(folder / "model", shards, shard_mb, sparse=sparse)
        self.write_config("alpha")
        write_fake_base(folder / "base")
        self.costs: dict[str, Cost] = {}
        # Nobody's credentials, and no builder or memory of blobs from elsewhere.
        (folder / "docker").mkdir()
        (folder / "docker" / "config.json").write_text("{}")
        self._env = {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "DOCKER_CONFIG": str(folder / "docker"),
            "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode, and so has this one
        }

    def write_config(self, term: str) -> None:
        """Write the rules; ``term`` is the only one."""
        (self.folder / "ral-config.yaml").write_text(CONFIG.format(term=term))

    def run(self, name: str, *command: object, env: Mapping[str, str] | None = None) -> Cost:
        """Run a command in the folder, keep its cost under ``name``, and fail with its messages."""
        log = self.folder / "log"
        with log.open("w+b") as errors, (self.folder / "out").open("w+b") as out:
            begin = time.perf_counter()
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env={**os.environ, **self._env, **(env or {})},
                stdout=out,
                stderr=errors,
            )
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            text = out.read().decode()
        if process.returncode:
            raise SystemExit(f"{name}: exit status {process.returncode}\n{log.read_text()[-2000:]}")
        cpu = usage.ru_utime + usage.ru_stime
        cost = Cost(seconds, cpu, usage.ru_maxrss // 1024, usage.ru_oublock * 512, text)
        self.costs[name] = cost
        print(f"{name:<24}{seconds:9.2f} s", file=sys.stderr)
        return cost

    def image(self, name: str, *outputs: object) -> Cost:
        """Run `ralbuild image` with the model, the base and these options."""
        return self.run(name, *RALBUILD, "image", "--model", "model", "--quiet", "--json", *outputs)

    def limit(self) -> float:
        """Return the seconds of one sha256 pass with two threads and one copy of the weights."""
        paths = sorted((self.folder / "model").glob("*.safetensors"))
        begin = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_sha256, paths))
        for path in paths:
            shutil.copyfile(path, self.folder / "copy")
            (self.folder / "copy").unlink()
        return time.perf_counter() - begin


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def registry(folder: Path, name: str, port: int = 0) -> Iterator[str]:
    """Run an empty registry on loopback; its data goes away with it. Port 0 takes a free one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    place = folder / name
    place.mkdir()
    (place / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {place / 'data'}}}}}\nhttp: {{addr: {host}}}\n"
    )
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", place / "config.yml"], stdout=log, stderr=log)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://{host}/v2/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield host
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(place, ignore_errors=True)


def build_layouts(bench: Bench, base: str, rounds: int) -> float:
    """Time ours and the limit by turns, then docker's and buildah's way; return the limit's best."""
    limits, best = [], None
    for number in range(rounds):
        limits.append(bench.limit())
        for old in ("cache", "ours", ".ral_cache"):
            shutil.rmtree(bench.folder / old, ignore_errors=True)
        cost = bench.image("image", "--base", base, "--output", "oci:ours", "--tag", "bench/ours:v1")
        best = cost if best is None or cost.seconds < best.seconds else best
        print(f"{f'limit, round {number + 1}':<24}{limits[-1]:9.2f} s", file=sys.stderr)
    assert best is not None
    bench.costs["image"] = best
    return min(limits)


def build_docker(bench: Bench, tag: str) -> float:
    """Return the seconds of `docker build` and `docker save`; the image stays in the engine."""
    first = bench.run("docker build", "docker", "build", "-q", "-t", tag, "context", env=BUILDER)
    second = bench.run("docker save", "docker", "save", "-o", "docker.tar", tag)
    (bench.folder / "docker.tar").unlink()
    return first.seconds + second.seconds


def build_buildah(bench: Bench) -> float:
    """Return the seconds of `buildah bud` and its push to a layout, without compression."""
    place = bench.folder / "buildah"
    state: list[str | Path] = ["buildah", "--root", place / "root", "--runroot", place / "run"]
    try:
        options = ["-q", "--isolation", "chroot", "--tls-verify=false"]
        built = bench.run("buildah bud", *state, "bud", *options, "-t", "bench", "context")
        pushed = bench.run(
            "buildah push", *state, "push", "-q", "--disable-compression", "bench", "oci:theirs"
        )
    finally:
        subprocess.run([*state, "rmi", "--all", "--force"], capture_output=True, check=False)
        for mount in ("root/overlay", "root/vfs"):
            subprocess.run(["umount", place / mount], capture_output=True, check=False)
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(bench.folder / "theirs", ignore_errors=True)
    return built.seconds + pushed.seconds


def push_all(bench: Bench, base: str, stack: ExitStack) -> dict[str, float]:
    """Push ours with each tool to an empty registry, then a changed rule against docker's unchanged image."""
    with registry(bench.folder, "skopeo-registry") as host:
        bench.run("skopeo copy", "skopeo", "copy", "-q", "--preserve-digests", "--dest-tls-verify=false",
                  "oci:ours", f"docker://{host}/bench:v1")  # fmt: skip
    host = stack.enter_context(registry(bench.folder, "our-registry"))
    bench.run("push", *RALBUILD, "push", "oci:ours", f"registry:{host}/bench:v1", "--quiet")
    bench.write_config("beta")
    changed = bench.image("rule change", "--base", base, "--output", f"registry:{host}/bench:v2")
    with registry(bench.folder, "docker-registry") as theirs:
        tag = f"{theirs}/bench:v1"
        try:
            bench.run("docker tag", "docker", "tag", "bench/docker:v1", tag)
            bench.run("docker push", "docker", "push", "-q", tag)
            again = bench.run(
                "docker build, again", "docker", "build", "-q", "-t", tag, "context", env=BUILDER
            )
            pushed = bench.run("docker push, again", "docker", "push", "-q", tag)
        finally:
            subprocess.run(["docker", "rmi", "-f", tag], capture_output=True, check=False)
    return {
        "docker_again": again.seconds + pushed.seconds,
        "sent": json.loads(changed.out)["written"],
    }


def push_changed_rules(folder: Path) -> dict[str, Any]:
    """Push a changed rule of models of 1 and 64 GB that nobody can read; return seconds and bytes of each."""
    sent: dict[str, int] = {}
    cpu: dict[str, float] = {}
    for size in FLAT_GB:
        place = folder / f"flat-{size}"
        place.mkdir()
        bench = Bench(place, shard_mb=size * 1000 // 16, shards=16, sparse=True)
        known = remember_digests(place / "model", DigestCache(place / "cache/ralbuild/digests"))
        with serve(promised=known) as registry:
            base = bench.run(
                "push base", *RALBUILD, "push", "oci:base", f"registry:{registry.host}/base:v1", "--quiet"
            )
            words = (
                "--base",
                f"{registry.host}/base@{base.out.strip()}",
                "--output",
                f"registry:{registry.host}/m:v1",
            )
            for term in ("alpha", "beta", "gamma", "delta"):
                bench.write_config(term)
                cost = bench.image(f"rule change, {size} GB", *words)
                if term != "alpha":  # the first one fills the cache
                    cpu[str(size)] = min(cpu.get(str(size), cost.cpu), cost.cpu)
                    sent[str(size)] = json.loads(cost.out)["written"]
        shutil.rmtree(place)
    return {
        "flat_ratio": round(cpu[str(FLAT_GB[-1])] / cpu[str(FLAT_GB[0])], 2),
        "flat_cpu": cpu,
        "flat_bytes": sent,
    }


def measure(folder: Path, shard_mb: int, rounds: int) -> dict[str, Any]:
    """Do everything once and return the answer."""
    compileall.compile_dir(str(Path(ralbuild.__file__).parent), quiet=2)
    bench = Bench(folder, shard_mb)
    with ExitStack() as stack:
        host = stack.enter_context(registry(folder, "base-registry"))
        pushed = bench.run("push base", *RALBUILD, "push", "oci:base", f"registry:{host}/base:v1", "--quiet")
        base = f"{host}/base@{pushed.out.strip()}"
        limit = build_layouts(bench, base, rounds)
        bench.run(
            "render", *RALBUILD, "render", "--model", "model", "--base", base, "--out", "context", "--quiet"
        )
        stack.callback(subprocess.run, ["docker", "rmi", "-f", "bench/docker:v1", base], capture_output=True)
        docker = build_docker(bench, "bench/docker:v1")
        buildah = build_buildah(bench)
        again = push_all(bench, base, stack)
    flat = push_changed_rules(folder)
    cost = {name: value.seconds for name, value in bench.costs.items()}
    return {
        "docker_ratio": round(docker / cost["image"], 2),
        "buildah_ratio": round(buildah / cost["image"], 2),
        "limit_ratio": round(cost["image"] / limit, 2),
        "bytes_written_ratio": round(bench.costs["image"].written / bench.model_bytes, 3),
        "push_written_ratio": round(bench.costs["push"].written / bench.model_bytes, 3),
        "rule_change_ratio": round(again["docker_again"] / cost["rule change"], 1),
        "rule_change_bytes": again["sent"],
        **flat,
        "push_skopeo_ratio": round(cost["skopeo copy"] / cost["push"], 2),
        "push_docker_ratio": round(cost["docker push"] / cost["push"], 2),
        "model_bytes": bench.model_bytes,
        "limit_seconds": round(limit, 3),
        "commands": {name: value.figures() for name, value in bench.costs.items()},
        "load": [round(value, 1) for value in os.getloadavg()],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the other tools."""
    asked = {
        "docker engine": ["docker", "version", "--format", "{{.Server.Version}}"],
        "buildah": ["buildah", "--version"],
        "skopeo": ["skopeo", "--version"],
        "registry": ["docker-registry", "--version"],
    }
    return {
        name: subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for name, command in asked.items()
    }


def main() -> int:
    """Measure; print a table and, with --json, one object on the last line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.image", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="four shards of 256 MB")
    parser.add_argument("--mb", type=int, default=0, metavar="N", help="size of a shard; default: 1000")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of ours and the limit; default: 3"
    )
    parser.add_argument("--folder", type=Path, help="where to work; 5 times the model's bytes are needed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ralbuild-bench-", dir=options.folder) as name:
        answer = measure(Path(name), options.mb or (256 if options.quick else 1000), max(1, options.rounds))
    print("| command | seconds | CPU seconds | peak MB | MB written |\n|---|---|---|---|---|")
    for name, cost in answer["commands"].items():
        written = f"{cost['written'] / 1e6:,.0f}"
        print(f"| {name} | {cost['seconds']:.2f} | {cost['cpu']:.2f} | {cost['peak_mb']} | {written} |")
    print(f"| limit | {answer['limit_seconds']:.2f} | | | |")
    print(
        json.dumps(answer)
        if options.json
        else "\n".join(f"{key}: {answer[key]}" for key in list(answer)[:12])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
