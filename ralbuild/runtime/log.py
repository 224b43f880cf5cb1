"""Log lines on standard error: ``TIME event key=value ...`` or JSON. Never a prompt or an answer."""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime

# Reentrant: a signal handler logs too, and may interrupt a line.
_LOCK = threading.RLock()
_json = False


def use_json(wanted: bool) -> None:
    """Write lines as JSON objects from now on, for log collectors that index fields."""
    global _json  # noqa: PLW0603 - one switch, set once when the process starts
    _json = wanted


def log_line(text: str) -> None:
    """Write one line behind the time."""
    _write({"event": text} if _json else text)


def log_event(event: str, **fields: object) -> None:
    """Write ``event`` and its fields; a value with spaces or quotes is quoted."""
    if _json:
        _write({"event": event} | {key: _typed(value) for key, value in fields.items()})
    else:
        _write(" ".join([event, *(f"{key}={_plain(value)}" for key, value in fields.items())]))


def _write(content: str | dict[str, object]) -> None:
    with _LOCK:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
        line = f"{now} {content}" if isinstance(content, str) else json.dumps({"time": now} | content)
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _typed(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, int) else str(value)


def _plain(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if text and all(char.isprintable() and char not in ' "=' for char in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in escaped) + '"'
