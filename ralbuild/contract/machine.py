"""A transducer's table made ready to run: programs unpacked, characters spelled, steps remembered."""

from __future__ import annotations

from typing import NamedTuple

from ralbuild.contract.memo import Memo
from ralbuild.contract.transducer_table import EMIT, NONE, TransducerTable
from ralbuild.contract.words import WordTable

_SPELLED = 1 << 16
"""Characters whose classes are remembered."""


class Mode(NamedTuple):
    """One row of ``modes``; -1 for what the mode does not have."""

    mark: int
    redact: int
    rule: int
    end: int
    row: int


class Machine:
    """What all slots of a table share."""

    def __init__(self, table: TransducerTable) -> None:
        self.table = table
        pool = bytes(table.pool)
        self.strings = [pool[a:b] for a, b in zip(table.str_off, table.str_off[1:], strict=False)]
        self.programs: list[tuple[tuple[int, int, bytes], ...]] = []
        for a, b in zip(table.prog_off, table.prog_off[1:], strict=False):
            words = [(word & 3, word >> 2) for word in table.prog_ops[a:b]]
            self.programs.append(tuple((k, n, self.strings[n] if k == EMIT else b"") for k, n in words))
        self.words = WordTable(table.word_pages, table.word_bits)
        plain = [-1 if value == NONE else value for value in table.modes]
        self.modes = [Mode(*plain[row : row + 5]) for row in range(0, len(plain), 5)]
        rows = table.redact_rows
        self.redactions = list(zip(rows[0::2], rows[1::2], strict=True))
        self.accepts = [
            tuple(table.accept_rows[a:b])
            for a, b in zip(table.accept_off, table.accept_off[1:], strict=False)
        ]
        self.mark_classes, self.redact_classes = table.mark_classes, table.redact_classes
        self._low = (bytes(table.cls[:256]), bytes(table.redact_class[:256]))
        self._high = (bytes(table.cls[256:]), bytes(table.redact_class[256:]))
        self._spelled: dict[str, tuple[bytes, bytes]] = {}
        self.memo = Memo()

    def classes(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the class of every byte of whole characters, for the rules and for the redactions."""
        if data.isascii():
            return data.translate(self._low[0]), data.translate(self._low[1])
        spelled = [self._spell(char) for char in data.decode("utf-8", "surrogateescape")]
        return b"".join([rule for rule, _ in spelled]), b"".join([redact for _, redact in spelled])

    def _spell(self, char: str) -> tuple[bytes, bytes]:
        found = self._spelled.get(char)
        if found is None:
            data = char.encode("utf-8", "surrogateescape")
            sides = self._high if len(data) > 1 and self.words.is_word(ord(char)) else self._low
            found = data.translate(sides[0]), data.translate(sides[1])
            if len(self._spelled) < _SPELLED:
                self._spelled[char] = found
        return found
