"""Which characters make up words, as two small arrays that every executor reads.

``pages[code >> 8]`` is the number of a page of 32 bytes in ``bits``; bit ``code & 7`` of its byte
``code >> 3 & 31`` says whether the character is a word character. The builder fills them from
Unicode's data (`ralbuild.fold.unicode`); what is in the file counts, not what the host's Python knows.
"""

from __future__ import annotations

PAGES = 0x110000 >> 8
PAGE_BYTES = 32
WORD_FLAG = 256
"""Added to each byte of a word character above ASCII: the symbols that the rules read."""


class WordTable:
    """Text to the symbols of its characters."""

    def __init__(self, pages: memoryview, bits: memoryview) -> None:
        self.pages = pages
        self.bits = bits
        self._ascii = [self.is_word(code) for code in range(128)]

    def is_word(self, code: int) -> bool:
        """Tell whether a code point is a word character."""
        byte = self.bits[self.pages[code >> 8] * PAGE_BYTES + (code >> 3 & 31)]
        return bool(byte >> (code & 7) & 1)

    def character(self, data: bytes, at: int) -> tuple[int, bool]:
        """Return the bytes of the character at ``at``, and whether it is a word's; a broken byte is one."""
        first = data[at]
        if first < 0x80:
            return 1, self._ascii[first]
        size = 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        try:
            return size, self.is_word(ord(data[at : at + size].decode()))
        except UnicodeDecodeError:
            return 1, False


def unfinished(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` can still become one character of UTF-8."""
    for size in range(1, min(3, len(data)) + 1):
        byte = data[-size]
        if byte >= 0xC0:
            try:
                data[-size:].decode()
            except UnicodeDecodeError as error:
                return size if error.reason == "unexpected end of data" else 0
            return 0
        if byte < 0x80:
            return 0
    return 0
