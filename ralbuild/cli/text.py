"""Text for a terminal of any width: wrapped rows, and bars where there is room for them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator

from ralbuild.report import printable

_NARROW = 90
_WIDEST = 140


def width() -> int:
    """Return the columns to write in: the terminal's, or 100 where there is none."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 40), _WIDEST)


def rows(items: Iterable[tuple[str, str]], columns: int, indent: int = 2) -> Iterator[str]:
    """Yield label and value side by side, the values aligned and wrapped below each other."""
    pairs = [(printable(label), printable(value)) for label, value in items]
    wide = min(max((len(label) for label, _ in pairs), default=0), columns // 3)
    lead = " " * indent
    for label, value in pairs:
        room = columns - indent - wide - 2
        parts = textwrap.wrap(value, max(room, 20), break_on_hyphens=False) or [""]
        if len(label) > wide:  # too long to stand beside its value
            yield lead + label
            label = ""
        yield f"{lead}{label:<{wide}}  {parts[0]}".rstrip()
        yield from (f"{lead}{'':<{wide}}  {part}" for part in parts[1:])


def cut(text: str, columns: int) -> str:
    """Return ``text`` as one line of at most ``columns`` characters."""
    clean = printable(text)
    return clean if len(clean) <= columns else f"{clean[: max(columns - 1, 1)]}…"


def bar(part: int, total: int, columns: int) -> str:
    """Return a bar for ``part`` of ``total``, as wide as the terminal allows; empty where it is narrow."""
    if columns < _NARROW or not total:
        return ""
    room = columns - _NARROW + 10
    return "█" * max(round(room * part / total), 1 if part else 0)


def digest(text: str, columns: int) -> str:
    """Return a digest whole where it fits, else its first twelve digits, by which it can be found."""
    return text if columns >= len(text) + 12 else text[:19]
