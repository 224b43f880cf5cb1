"""What this process may use: processors and memory, as affinity and the control group limit them."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """Return how many threads can run at once: the affinity mask, cut by the CPU quota, at least 1."""
    count = len(os.sched_getaffinity(0))
    quota = _words(cgroup / "cpu.max")  # "max 100000" or "150000 100000"
    if len(quota) == 2 and quota[0].isdecimal():
        count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return max(count, 1)


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether the processor multiplies bfloat16 itself (AVX-512 BF16, AMX, or Arm's BF16)."""
    flags = {word for line in _lines(cpuinfo) if line[0] in ("flags", "Features") for word in line}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes this process can still take: free on the host and within the group's limit."""
    free = next((int(line[1]) * 1024 for line in _lines(meminfo) if line[0] == "MemAvailable:"), 1 << 62)
    limit = _words(cgroup / "memory.max")
    if len(limit) == 1 and limit[0].isdecimal():
        used = int(_words(cgroup / "memory.current")[0])
        # File pages are counted as used but are dropped when memory is needed.
        cached = next(
            (int(line[1]) for line in _lines(cgroup / "memory.stat") if line[0] == "inactive_file"), 0
        )
        free = min(free, int(limit[0]) - used + cached)
    return max(free, 0)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no such control group here
        return []


def _lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines() if line]
    except OSError:
        return []
