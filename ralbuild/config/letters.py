"""Letters that are equal when case is ignored: Unicode's simple case folding."""

from __future__ import annotations

from functools import cache

_CASED_END = 0x1F000
"""No letter from here on has another case."""


@cache
def letter_cases() -> dict[str, tuple[str, ...]]:
    """Return, for each character that has another case, all that equal it, itself among them, sorted."""
    groups: dict[str, list[str]] = {}
    every = list(map(chr, range(_CASED_END)))
    for char, full in zip(every, map(str.casefold, every), strict=True):
        if full != char and (folded := _folded(char)) != char:
            groups.setdefault(folded, [folded]).append(char)
    return {char: tuple(sorted(group)) for group in groups.values() for char in group}


def _folded(char: str) -> str:
    """Return Unicode's simple case folding of one character."""
    full = char.casefold()
    if len(full) == 1:
        return full
    lower = char.lower()
    return lower if len(lower) == 1 else char


def same_letters(char: str) -> tuple[str, ...]:
    """Return the characters that equal ``char`` when case is ignored, itself among them, sorted."""
    return letter_cases().get(char, (char,))
