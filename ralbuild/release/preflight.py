"""What fits on this machine: memory asked by an image's labels against what is free, and the driver."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ralbuild.contract.archs import runs_on
from ralbuild.errors import HostError

HEADROOM = 1.2
"""Weights are not all: keys, values, the interpreter and its libraries come on top."""
PROCESS_BYTES = 700 << 20
CONTEXT_BYTES = 1 << 30
"""Of a GPU, beside weights, keys and values: CUDA's context, libraries and workspaces; not measured."""
LOAD_RATE = 50 << 20
"""Bytes of weights a slow disk gives in a second."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that is free for a server, in bytes, and of which kind (``RAM`` or ``VRAM``)."""

    free: int
    kind: str


def needs_of(labels: Mapping[str, str]) -> int:
    """Return the bytes that a server of this image takes of what `free_room` measures, by its labels."""
    device = _number(labels.get("io.ralbuild.cuda.memory", "0"))
    return device + CONTEXT_BYTES if device else host_needs_of(labels)


def host_needs_of(labels: Mapping[str, str]) -> int:
    """Return the bytes of main memory that a server of this image takes, estimated from its labels."""
    weights = _number(labels.get("io.ralbuild.weights.memory", "0"))
    return int(weights * HEADROOM) + PROCESS_BYTES


def ready_budget(labels: Mapping[str, str]) -> int:
    """Return the seconds that a start may take: imports, reading and checking the weights."""
    return 120 + _number(labels.get("io.ralbuild.weights.bytes", "0")) // LOAD_RATE


def free_room(target: str) -> Room:
    """Measure what is free now.

    Raises:
        HostError: for a CUDA image on a machine whose GPUs do not answer. A server uses the first one.
    """
    if target != "cuda":
        return Room(_available_memory(Path("/proc/meminfo").read_text("ascii")), "RAM")
    return Room(int(_ask_gpus("memory.free")[0][0]) << 20, "VRAM")


def check_device(labels: Mapping[str, str]) -> None:
    """Refuse a CUDA image whose kernels the first GPU does not run, or on a driver that is too old for it.

    Raises:
        HostError: with both sides.
    """
    check_driver(labels)
    archs = [arch for arch in labels.get("io.ralbuild.cuda.archs", "").split(",") if arch]
    if labels.get("io.ralbuild.target") != "cuda" or not archs:
        return
    major, minor, *_ = _version(_ask_gpus("compute_cap")[0][0])
    if not any(runs_on(arch, (major, minor)) for arch in archs):
        raise HostError(
            f"the GPU is sm_{major}{minor}, the image has kernels for {', '.join(archs)}",
            place="release",
            hint="build the image with the GPU's architecture in build.targets",
        )


def check_driver(labels: Mapping[str, str]) -> None:
    """Refuse a CUDA image on a driver that is too old for it.

    Raises:
        HostError: with both versions.
    """
    floor = labels.get("io.ralbuild.cuda.driver", "")
    if labels.get("io.ralbuild.target") != "cuda" or not floor:
        return
    for (version,) in _ask_gpus("driver_version"):
        if _version(version) < _version(floor):
            raise HostError(
                f"the NVIDIA driver is {version}, the image needs {floor}",
                place="release",
                hint="update the driver of this machine, or release an image for it",
            )


def _ask_gpus(field: str) -> list[list[str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise HostError("a CUDA image needs a GPU: nvidia-smi is not here", place="release")
    command = [tool, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows:
        said = (done.stderr or done.stdout).strip()[:200]
        raise HostError(f"nvidia-smi fails: {said or done.returncode}", place="release")
    return rows


def _available_memory(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise HostError("/proc/meminfo has no MemAvailable", place="release")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() else 0
