"""Progress and messages, on standard error: rich on a terminal, plain lines in CI, JSON on request.

Standard output carries data only and is not touched by a report; `print_findings` writes a table of data
to it, for people at a terminal. Only this module imports rich.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.progress import Progress, TaskID
    from rich.text import Text

    from ralbuild.weights.findings import Finding

LINE_SECONDS = 10.0
"""In a log, a line now and then shows that work goes on."""

Mode = Literal["auto", "rich", "plain", "json"]


@dataclass(slots=True)
class Stage:
    """One stage of a build; whoever runs it says in ``summary`` what it came to."""

    name: str
    summary: str = ""
    seconds: float = 0.0


class Report(Protocol):
    """What a stage may tell."""

    stages: list[Stage]

    def stage(self, name: str) -> contextlib.AbstractContextManager[Stage]:
        """Open a stage; it is reported with its summary and time when it ends well."""

    def step(self, text: str) -> None:
        """Say what is being done now."""

    def note(self, text: str) -> None:
        """Say something that the reader should know afterwards."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the current stage is; ``unit`` is ``B`` for bytes or a plural noun."""


def make_report(mode: Mode, *, quiet: bool = False, stream: TextIO | None = None) -> Report:
    """Return the report for ``mode``; ``auto`` is rich on a terminal that can move its cursor."""
    out = stream if stream is not None else sys.stderr
    if quiet:
        return LineReport(out, show=False)
    if mode == "json":
        return JsonReport(out)
    capable = out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("CI")
    if mode == "rich" or (mode == "auto" and capable):
        return RichReport(out)
    return LineReport(out)


def printable(text: str) -> str:
    """Return ``text`` with control characters written out: a file's name cannot move the cursor."""
    return "".join(
        char if char.isprintable() or char == " " else char.encode("unicode_escape").decode() for char in text
    )


def format_bytes(count: float) -> str:
    """Return a size for people, in decimal units: ``269 MB``, ``1.2 GB``."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: ``0.04 s``, ``12.3 s``, ``3 min 20 s``."""
    if seconds >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"


def byte_counter(report: Report, total: int) -> Callable[[int], None]:
    """Return what adds up bytes for the report, whichever thread dealt with them."""
    done = 0
    lock = threading.Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            report.progress(min(done, total), total, "B")

    return count


class _Base:
    """Times stages; subclasses say how a finished one looks."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        stage = Stage(name)
        started = time.monotonic()
        self._begin(stage)
        try:
            yield stage
        except BaseException:
            self._failed(stage)
            raise
        stage.seconds = time.monotonic() - started
        self.stages.append(stage)
        self._end(stage)

    def _begin(self, stage: Stage) -> None:
        raise NotImplementedError

    def _end(self, stage: Stage) -> None:
        raise NotImplementedError

    def _failed(self, stage: Stage) -> None:
        """Leave the screen as an error message expects it."""


class LineReport(_Base):
    """Plain lines: one per finished stage and one per note, nothing that moves."""

    def __init__(self, out: TextIO, *, show: bool = True) -> None:
        super().__init__()
        self.out = out
        self.show = show
        self._next_line = 0.0

    def _say(self, text: str) -> None:
        if self.show:
            print(printable(text), file=self.out, flush=True)

    def _begin(self, stage: Stage) -> None:  # noqa: ARG002
        self._next_line = time.monotonic() + LINE_SECONDS

    def _end(self, stage: Stage) -> None:
        self._say(f"{stage.name:<8} {stage.summary} ({format_seconds(stage.seconds)})")

    def step(self, text: str) -> None:
        self._say(f"         {text}")

    def note(self, text: str) -> None:
        self._say(f"note     {text}")

    def progress(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if now < self._next_line or not total:
            return
        self._next_line = now + LINE_SECONDS
        amount = (
            f"{format_bytes(done)} of {format_bytes(total)}" if unit == "B" else f"{done} of {total} {unit}"
        )
        self._say(f"         {amount} ({100 * done // total} %)")


class JsonReport(_Base):
    """One JSON object a line, for tools."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self.out = out
        self._last = 0.0

    def _say(self, **event: Any) -> None:
        print(json.dumps(event, sort_keys=True), file=self.out, flush=True)

    def _begin(self, stage: Stage) -> None:
        self._say(event="begin", stage=stage.name)

    def _end(self, stage: Stage) -> None:
        self._say(event="end", stage=stage.name, summary=stage.summary, seconds=round(stage.seconds, 3))

    def step(self, text: str) -> None:
        self._say(event="step", text=text)

    def note(self, text: str) -> None:
        self._say(event="note", text=text)

    def progress(self, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        if done < total and now - self._last < 0.5:
            return
        self._last = now
        self._say(event="progress", done=done, total=total, unit=unit)


class RichReport(_Base):
    """A line per finished stage, and below it one live line with a bar, rate and time left."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        from rich.console import Console

        self.console = Console(file=out, highlight=False, soft_wrap=False)
        self._live: Progress | None = None
        self._task: TaskID | None = None

    def _escape(self, text: str) -> str:
        from rich.markup import escape

        return escape(printable(text))

    def _begin(self, stage: Stage) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[amount]}"),
        )
        self._live = Progress(*columns, console=self.console, transient=True)
        self._task = self._live.add_task(stage.name, total=None, amount="")
        self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _end(self, stage: Stage) -> None:
        self._stop()
        from rich.table import Table

        row = Table.grid(padding=(0, 1))
        row.add_column(width=1)
        row.add_column(width=8)
        row.add_column(overflow="fold")
        row.add_row(
            "[green]✓",
            f"[bold]{stage.name}",
            f"{self._escape(stage.summary)} [dim]({format_seconds(stage.seconds)})",
        )
        self.console.print(row)

    def _failed(self, stage: Stage) -> None:
        self._stop()
        self.console.print(f"[red]✗[/] [bold]{stage.name}[/]")

    def step(self, text: str) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, amount=self._escape(text))
        else:
            self.console.print(f"  [dim]{self._escape(text)}")

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]![/] {self._escape(text)}")

    def progress(self, done: int, total: int, unit: str) -> None:
        if self._live is None or self._task is None:
            return
        amount = (
            f"{format_bytes(done)} of {format_bytes(total)}" if unit == "B" else f"{done} of {total} {unit}"
        )
        task = self._live.tasks[0]
        if task.speed and unit == "B" and done < total:
            left = (total - done) / task.speed
            amount += f", {format_bytes(task.speed)}/s, {format_seconds(left)} left"
        self._live.update(self._task, completed=done, total=total, amount=amount)


WIDE = 100
"""Columns from which findings are a table; below it they are stacked."""
_LOOK = {"error": ("bold red", "✗"), "warning": ("yellow", "!"), "info": ("dim", "i")}


def print_findings(findings: Sequence[Finding], out: TextIO) -> None:
    """Print what `ralbuild verify` found to a terminal, worst first: a table when it is wide enough."""
    from rich.console import Console

    console = Console(file=out, highlight=False, soft_wrap=False)
    if findings:
        table = _wide_table(findings) if console.width >= WIDE else _stacked(findings)
        console.print(table)


def _wide_table(findings: Sequence[Finding]) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=True)
    table.add_column("", width=1)
    table.add_column("finding", no_wrap=True)
    table.add_column("where", overflow="fold", ratio=2)
    table.add_column("what is wrong, and what to do", overflow="fold", ratio=4)
    for item in findings:
        style, mark = _LOOK[item.severity]
        name = Text.assemble((item.rule.id, style), " ", item.rule.name)
        table.add_row(Text(mark, style), name, Text(_lines(item.file, item.tensor)), _what(item))
    return table


def _stacked(findings: Sequence[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for item in findings:
        style, mark = _LOOK[item.severity]
        table.add_row(Text(mark, style), Text.assemble((item.rule.id, style), " ", (item.rule.name, "bold")))
        place = _lines(item.file, item.tensor)
        if place:
            table.add_row("", Text(place))
        table.add_row("", _what(item))
    return table


def _what(item: Finding) -> Text:
    """Return the message and, below it, the hint."""
    from rich.text import Text

    hint = item.hint if item.severity != "info" else ""
    return Text.assemble(item.message, ("\n" + hint if hint else "", "dim"))


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
