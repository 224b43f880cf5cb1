"""Letters that are equal when case is ignored: Unicode's simple case folding."""

from __future__ import annotations

from functools import cache

_CASED_END = 0x1F000
"""No letter from here on has another case."""
_BLOCK = 256


@cache
def letter_cases() -> dict[str, tuple[str, ...]]:
    """Return, for each character that has another case, all that equal it, itself among them, sorted."""
    groups: dict[str, list[str]] = {}
    for first in range(0, _CASED_END, _BLOCK):
        block = "".join(map(chr, range(first, first + _BLOCK)))
        if block.casefold() == block:
            continue  # no letter of it has another case: true of nine blocks in ten
        for char in block:
            folded = _folded(char)
            if folded != char:
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
