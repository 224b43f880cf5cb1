"""Which characters make up words, from Unicode's data."""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from ralbuild.contract.words import PAGE_BYTES, PAGES

_NO_SPACE_BLOCKS = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x19E0, 0x19FF), (0x3000, 0x312F),
    (0x31A0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA9E0, 0xA9FF),
    (0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x16FE0, 0x18D8F), (0x1AFF0, 0x1B2FF),
    (0x20000, 0x3FFFF),
)  # fmt: skip
"""Thai, Lao, Myanmar, Khmer, kana, Bopomofo, Han, Yi, Tangut, Nushu: no spaces between words."""
_LETTERS = ((0, 0x1FFFF), (0xE0000, 0xE01FF))
"""Where word characters are, apart from the blocks above."""


def is_word(char: str) -> bool:
    """Tell whether a character belongs to a word: letters, marks, digits and ``_``.

    Characters of scripts that are written without spaces do not: a term in them matches anywhere.
    """
    if char == "_":
        return True
    if unicodedata.category(char)[0] not in "LMN":
        return False
    code = ord(char)
    return not any(low <= code <= high for low, high in _NO_SPACE_BLOCKS)


@cache
def word_table() -> tuple[bytes, bytes]:
    """Return ``pages`` and ``bits`` as `ralbuild.contract.words` reads them."""
    word = np.zeros(8 * PAGES * PAGE_BYTES, bool)
    for first, last in _LETTERS:
        categories = map(unicodedata.category, map(chr, range(first, last + 1)))
        majors = np.frombuffer("".join(categories).encode(), np.uint8)[::2]
        word[first : last + 1] = np.isin(majors, list(b"LMN"))
    word[ord("_")] = True
    for first, last in _NO_SPACE_BLOCKS:
        word[first : last + 1] = False
    bits = np.packbits(word, bitorder="little").tobytes()
    numbers: dict[bytes, int] = {}
    pages = bytearray()
    for page in range(PAGES):
        pages.append(numbers.setdefault(bits[page * PAGE_BYTES : (page + 1) * PAGE_BYTES], len(numbers)))
    return bytes(pages), b"".join(numbers)
