"""Resident memory of a process, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_KINDS = {"RssAnon:": "anonymous", "RssFile:": "file", "RssShmem:": "shared"}


def resident(process: int | str) -> Mapping[str, int]:
    """Return bytes by kind: ``anonymous``, ``file`` (mapped files) and ``shared``; all 0 once it is gone."""
    found = dict.fromkeys(_KINDS.values(), 0)
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.split()
        if words and words[0] in _KINDS:
            found[_KINDS[words[0]]] = int(words[1]) * 1024
    return found


def own_resident() -> int:
    """Return this process's resident bytes of all kinds."""
    return sum(resident("self").values())
