"""Steps of a trace for people: coloured on a terminal, plain lines elsewhere. Imports rich when used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ralbuild.debug.trace import END, Step
from ralbuild.report import printable

if TYPE_CHECKING:
    from rich.text import Text

    from ralbuild.debug.kernel import Launch

SHOWN_CHANGES = 12
"""Changed elements that are shown of each buffer."""
HELP = "Enter: next token   c: to the next breakpoint, or the end   q: quit"


def as_json(steps: Iterable[Step], breaks: frozenset[int]) -> Iterator[str]:
    """Yield a JSON line per step; with breakpoints, stop after the first step that meets one."""
    for step in steps:
        hit = meets(step, breaks)
        yield json.dumps(step.plain() | ({"break": hit} if breaks else {}), ensure_ascii=False)
        if hit:
            return


def meets(step: Step, breaks: frozenset[int]) -> bool:
    """Tell whether a rule of ``breaks`` decided something in the step."""
    return any(item.id in breaks for item in step.matches)


def show(
    steps: Iterable[Step], breaks: frozenset[int], ask: Callable[[], str] | None, *, step_all: bool
) -> None:
    """Print steps on standard output.

    Args:
        steps: as `trace` yields them.
        breaks: rules to stop at.
        ask: reads a command of `HELP`; None prints everything, up to the first breakpoint.
        step_all: stop after every step, not at breakpoints only.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if ask is not None:
        console.print(HELP, style="dim")
    waiting = step_all
    for step in steps:
        for line in _lines(step):
            console.print(line)
        hit = meets(step, breaks)
        if hit:
            console.print("breakpoint", style="bold red")
            if ask is None:
                return
        if ask is not None and (hit or waiting) and step.index != END:
            answer = ask().strip().lower()
            if answer.startswith("q"):
                return
            waiting = not answer.startswith("c")


def _lines(step: Step) -> Iterator[Text]:
    from rich.text import Text

    where = "end" if step.index == END else f"{step.index}"
    line = Text().append(f"{where:>5} ", "dim")
    if step.index != END:
        line.append(f"{_quoted(step.data):<16}", "strike red" if step.refused else "bold")
        line.append(f" {step.token:>7}" if step.token is not None else "", "dim")
    line.append(f"  {step.before}→{step.after}", "dim")
    if step.emitted:
        line.append("  out ").append(_quoted(step.emitted), "green")
    if step.held:
        line.append("  held ").append(_quoted(step.held), "yellow")
    yield line
    for item in step.matches:
        what = "refused by" if step.refused else "rule"
        match = Text().append(f"      └ {what} ", "dim")
        match.append(f"{item.kind} {_quoted(item.text.encode())}", "magenta")
        match.append(f"  {item.place}  ({item.source}, rule {item.id})", "dim")
        yield match


def _quoted(data: bytes) -> str:
    return f'"{printable(data.decode("utf-8", "replace"))}"'


def show_launches(launches: Iterable[Launch]) -> None:
    """Print what each launch of a kernel changed."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for number, launch in enumerate(launches):
        line = Text().append(f"{number:>5} ", "dim").append(f"{_quoted(launch.data):<16}", "bold")
        console.print(line.append(f" {launch.token:>7}" if launch.token is not None else "", "dim"))
        for name, items in launch.changes.items():
            if not items:
                continue
            row = Text().append(f"      └ {name} ", "dim")
            for at, before, after in items[:SHOWN_CHANGES]:
                row.append(f"[{at}] ", "dim").append(f"{before}", "yellow").append("→").append(
                    f"{after}  ", "green"
                )
            if len(items) > SHOWN_CHANGES:
                row.append(f"and {len(items) - SHOWN_CHANGES} more", "dim")
            console.print(row)
