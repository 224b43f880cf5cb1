"""Log lines on standard error: ``TIME event key=value ...``, time in UTC. Never a prompt or an answer."""

from __future__ import annotations

import sys
import threading
from datetime import UTC, datetime

# Reentrant: a signal handler logs too, and may interrupt a line.
_LOCK = threading.RLock()


def log_line(text: str) -> None:
    """Write one line behind the time."""
    with _LOCK:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        sys.stderr.write(f"{now}Z {text}\n")
        sys.stderr.flush()


def log_event(event: str, **fields: object) -> None:
    """Write ``event`` and its fields; a value with spaces or quotes is quoted."""
    log_line(" ".join([event, *(f"{key}={_plain(value)}" for key, value in fields.items())]))


def _plain(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and all(char.isprintable() and char not in ' "=' for char in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in escaped) + '"'
