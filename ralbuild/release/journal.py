"""The journal of one release: a line before and after every step, on disk before the step goes on.

A process that is killed leaves the plan and the steps that were done; `resume` and `undo` read them.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, from_plain, parse_json, to_plain
from ralbuild.errors import UsageError
from ralbuild.files import write_atomically
from ralbuild.release.site import Deployed

JOURNAL_FILE, LAST_FILE = "journal.jsonl", "journal.last.jsonl"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a release does, fixed before it begins.

    Attributes:
        action: ``up`` or ``rollback``.
        mode: ``blue-green`` or ``in-place``.
        colour: where the new image goes.
        old: the colour that serves before; empty for the first release.
        new: the image.
        probes: path of the probe file; empty for none.
        keep_warm: leave the old container running at the end.
        ready_seconds: most time until the new container is ready.
    """

    action: str
    mode: str
    colour: str
    old: str
    new: Deployed
    probes: str
    keep_warm: bool
    ready_seconds: int


class Journal:
    """The file of a release that has begun and not ended."""

    def __init__(self, folder: Path, plan: Plan, done: list[str]) -> None:
        self._path = folder / JOURNAL_FILE
        self.plan = plan
        self.done = done

    @classmethod
    def begin(cls, folder: Path, plan: Plan) -> Journal:
        """Start a journal.

        Raises:
            UsageError: when another release began here and has not ended.
        """
        if (folder / JOURNAL_FILE).exists():
            hint = "run `ralbuild release resume` to go on with it, or `ralbuild release undo`"
            raise UsageError("an earlier release was interrupted", place=str(folder), hint=hint)
        write_atomically(folder / JOURNAL_FILE, _line({"plan": to_plain(plan)}), durable=True)
        return cls(folder, plan, [])

    @classmethod
    def read(cls, folder: Path) -> Journal | None:
        """Return the journal of an interrupted release, or None.

        Raises:
            UsageError: when it is damaged; a last line that was cut short is not.
        """
        path = folder / JOURNAL_FILE
        try:
            lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut short
        except FileNotFoundError:
            return None
        try:
            entries: list[Any] = [parse_json(line, f"{path.name}:{n}") for n, line in enumerate(lines, 1)]
            for number, entry in enumerate(entries, 1):
                needed = "plan" if number == 1 else "step"
                if not isinstance(entry, dict) or needed not in entry:
                    raise FormatError(f"{path.name}:{number}", f"needs an object with {needed!r}")
            plan = from_plain(Plan, entries[0]["plan"], f"{path.name}:1")
            done = [str(entry["step"]) for entry in entries[1:] if entry.get("state") == "done"]
        except (FormatError, IndexError, KeyError, TypeError, AttributeError) as error:
            hint = "look at the containers and the proxy, then remove the file"
            raise UsageError(f"is damaged: {error}", place=str(path), hint=hint) from None
        return cls(folder, plan, done)

    def write(self, step: str, state: str, note: str = "") -> None:
        """Add a line: ``state`` is ``begin``, ``done`` or ``failed``."""
        entry = {"step": step, "state": state, "note": note, "time": round(time.time(), 3)}
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, _line(entry))
            os.fsync(fd)
        finally:
            os.close(fd)
        if state == "done":
            self.done.append(step)

    def close(self) -> None:
        """The release has ended, well or not; its journal stays as the last one."""
        self._path.replace(self._path.with_name(LAST_FILE))


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True).encode() + b"\n"
