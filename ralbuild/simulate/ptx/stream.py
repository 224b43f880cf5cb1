"""The tokens being read, and the errors that name where reading stopped."""

from __future__ import annotations

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.tokens import Token

MAX_VARIABLE_BYTES = 1 << 26


def parse_integer(text: str) -> int:
    """Return the value of an integer literal: in any base (PTX ISA, "Constants")."""
    digits = text.rstrip("U")
    if digits[:2] in ("0x", "0X"):
        return int(digits, 16)
    if digits[:2] in ("0b", "0B"):
        return int(digits, 2)
    if len(digits) > 1 and digits[0] == "0" and set(digits) <= set("01234567"):
        return int(digits, 8)
    return int(digits)


class Stream:
    """Tokens, read from the left."""

    def __init__(self, tokens: list[Token], lines: list[str]) -> None:
        self._tokens = tokens
        self._lines = lines
        self._at = 0

    @property
    def done(self) -> bool:
        """True when nothing is left."""
        return self._at >= len(self._tokens)

    @property
    def line(self) -> int:
        """Line of the next token; of the last one at the end."""
        if not self._tokens:
            return 1
        return self._tokens[min(self._at, len(self._tokens) - 1)].line

    def source(self, line: int) -> str:
        """Return a line of the text, without the blanks around it."""
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    def peek(self, ahead: int = 0) -> str:
        """Return the text of a token ahead; empty at the end."""
        at = self._at + ahead
        return self._tokens[at].text if at < len(self._tokens) else ""

    def take(self) -> Token:
        """Return the next token and move past it."""
        if self.done:
            raise PtxError("the text ends too early", self.line)
        self._at += 1
        return self._tokens[self._at - 1]

    def accept(self, text: str) -> bool:
        """Move past the next token if it is ``text``."""
        if self.peek() == text:
            self._at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Move past ``text``, or raise."""
        found = self.take()
        if found.text != text:
            raise self.error_before(f"needs {text!r}, found {found.text!r}")

    def take_word(self) -> str:
        """Return the next token, which must be a name or directive."""
        found = self.take()
        if found.kind != "word":
            raise self.error_before(f"needs a name, found {found.text!r}")
        return found.text

    def take_integer(self, least: int, most: int) -> int:
        """Return the next token as a number within bounds."""
        found = self.take()
        if found.kind != "number" or not found.text.isdigit():
            raise self.error_before(f"needs a whole number, found {found.text!r}")
        value = parse_integer(found.text)
        if not least <= value <= most:
            raise self.error_before(f"needs {least} to {most}, found {found.text}")
        return value

    def take_power_of_two(self, most: int) -> int:
        """Return the next token as an alignment."""
        value = self.take_integer(1, most)
        if value & (value - 1):
            raise self.error_before(f"needs a power of two, found {value}")
        return value

    def skip_line(self) -> None:
        """Move past all tokens of the line just entered (``.file``, ``.loc``)."""
        line = self._tokens[self._at - 1].line
        while not self.done and self._tokens[self._at].line == line:
            self._at += 1

    def skip_section(self) -> None:
        """Move past a debug section: a name and a block in braces."""
        self.take()
        self.expect("{")
        depth = 1
        while depth:
            text = self.take().text
            depth += (text == "{") - (text == "}")

    def error_before(self, message: str) -> PtxError:
        """Return an error at the token that was just taken."""
        line = self._tokens[max(self._at - 1, 0)].line if self._tokens else 1
        return PtxError(message, line, self.source(line))
