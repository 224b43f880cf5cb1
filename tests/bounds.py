"""What one hostile input may cost: processor time and memory, measured around it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

CPU_SECONDS = 2.0
MEMORY_MB = 200

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail when what is inside takes more processor time, its processes included, or memory than it may.

    The kernel's mark of the highest memory is set back first, so that each input is measured alone;
    processes of its own have limits of the kernel.
    """
    Path("/proc/self/clear_refs").write_text("5")
    memory, times = _peak_mb(), os.times()
    yield
    seconds, grown = sum(os.times()[:4]) - sum(times[:4]), _peak_mb() - memory
    assert seconds < CPU_SECONDS
    assert grown < MEMORY_MB


def _peak_mb() -> int:
    found = _PEAK.search(_STATUS.read_text())
    assert found is not None
    return int(found[1]) >> 10
