"""Reads a large JSON object member by member: memory is one member and a window, whatever the text's size."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # documented in its source only
from typing import Any

from ralbuild.contract.codec import MAX_DEPTH, FormatError, check_depth, strict_decoder

CHUNK = 1 << 18
MOST_IN_MEMBER = 8 << 20
"""Characters of one member: metadata is the only long one."""
MOST_PARTS = 600_000
"""Objects, lists and commas of one member: what parsing it may cost."""
_AFTER = frozenset(",} \t\n\r")
_BLANKS = re.compile(r"[ \t\n\r]*").match


class Members:
    """The members of one JSON object, in the order of the text, with duplicates.

    Args:
        read: returns the next bytes of the text, at most as many as asked for; none at its end.
        where: names the text in errors.

    Attributes:
        blanks: True when the object does not begin with the first character.

    Iterating raises FormatError for anything that is not one strict JSON object.
    """

    def __init__(self, read: Callable[[int], bytes], where: str) -> None:
        self.blanks = False
        self._read = read
        self._where = where
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._value = strict_decoder(where).scan_once  # type: ignore[attr-defined]  # what raw_decode calls
        self._text = ""
        self._at = 0
        self._ended = False
        self._passed = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            yield from self._members()
        except UnicodeDecodeError as error:
            raise FormatError(self._where, f"not UTF-8: {error.reason}") from None
        except RecursionError:
            raise FormatError(self._where, "nested too deeply") from None

    def _members(self) -> Iterator[tuple[str, Any]]:
        first = self._peek()
        self.blanks = self._passed + self._at > 0
        if first != "{":
            raise FormatError(self._where, "must be a JSON object")
        self._at += 1
        if self._peek() == "}":
            self._at += 1
        else:
            yield from self._filled()
        if self._peek():
            raise FormatError(self._where, f"not JSON: {self._peek()!r} follows the object")

    def _filled(self) -> Iterator[tuple[str, Any]]:
        while True:
            if self._peek() != '"':
                raise self._unexpected('a name in "quotes"')
            key = self._decode(_string)
            if self._peek() != ":":
                raise self._unexpected("a colon")
            self._at += 1
            self._peek()
            yield key, self._decode(self._value)
            after = self._peek()
            if after == "}":
                self._at += 1
                return
            if after != ",":
                raise self._unexpected("a comma or the end of the object")
            self._at += 1

    def _peek(self) -> str:
        """Skip blanks and return the next character without taking it; empty at the end."""
        while True:
            self._at = _BLANKS(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing too
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _decode(self, decode: Callable[[str, int], tuple[Any, int]]) -> Any:
        """Take what begins here, with as much text as it needs."""
        while True:
            try:
                if len(self._text) - self._at > 2 * CHUNK:
                    self._check_parts()
                value, end = decode(self._text, self._at)
                if self._ended or isinstance(value, str | dict | list) or self._text[end : end + 1] in _AFTER:
                    break  # anything else, such as a number, may go on behind the window
                fault = "not JSON"
            except json.JSONDecodeError as error:
                fault = f"not JSON: {error.msg} at character {self._passed + error.pos}"
            except StopIteration:
                fault = f"not JSON: needs a value at character {self._passed + self._at}"
            except FormatError:
                raise
            except ValueError as error:  # an integer of thousands of digits
                raise FormatError(self._where, f"not JSON: {error}") from None
            if len(self._text) - self._at > MOST_IN_MEMBER:
                raise FormatError(self._where, f"a member of more than {MOST_IN_MEMBER:,} characters")
            if not self._more(double=True):
                raise FormatError(self._where, fault)
        self._check(value, end)
        self._at = end
        return value

    def _check_parts(self) -> None:
        """Bound what one member may cost before it is parsed; the usual window cannot cost much."""
        if sum(self._text.count(mark, self._at) for mark in "{[,") > MOST_PARTS:
            raise FormatError(self._where, "holds far more than its tensors explain")

    def _check(self, value: Any, end: int) -> None:
        """Refuse lone surrogates, which only escapes can spell, and deep nesting."""
        if self._text.find("\\u", self._at, end) >= 0:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise FormatError(self._where, "a string holds a lone surrogate") from None
        opened = self._text.count("{", self._at, end) + self._text.count("[", self._at, end)
        if opened >= MAX_DEPTH:
            check_depth(value, self._where)

    def _more(self, *, double: bool = False) -> bool:
        """Read on, dropping what was taken; False at the end of the text."""
        if self._ended:
            return False
        kept = self._text[self._at :]
        data = self._read(max(CHUNK, len(kept)) if double else CHUNK)
        self._ended = not data
        self._passed += self._at
        self._text = kept + self._utf8.decode(data, final=self._ended)
        self._at = 0
        return True

    def _unexpected(self, needed: str) -> FormatError:
        found = repr(self._peek()) if self._peek() else "the end"
        return FormatError(
            self._where, f"not JSON: needs {needed} at character {self._passed + self._at}, found {found}"
        )


def _string(text: str, at: int) -> tuple[str, int]:
    """Take the string whose opening quote is at ``at``."""
    value, end = scanstring(text, at + 1, True)
    return value, end
