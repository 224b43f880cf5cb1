"""PTX text to tokens with line numbers (PTX ISA, "Syntax")."""

from __future__ import annotations

import re
from typing import NamedTuple

from ralbuild.simulate.faults import PtxError

_TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r\f\v]+|//[^\n]*)
    | (?P<line>\n)
    | (?P<comment>/\*.*?\*/)
    | (?P<string>"[^"\n]*")
    | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?\b|0[bB][01]+U?\b
                |\d+\.\d+(?:[eE][+-]?\d+)?|\d+U?(?![\w.]))
    | (?P<word>[%$]?[A-Za-z_][\w$]*(?:(?:\.|::)\w+)*|\.\w+(?:(?:\.|::)\w+)*|%\w+(?:\.\w+)*)
    | (?P<mark>[{}()\[\];:,@!|+\-<>=])
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)

_LONGEST_NUMBER = 67


class Token(NamedTuple):
    """``kind`` is word, number, string or mark; ``line`` counts from 1."""

    kind: str
    text: str
    line: int


def tokenize(text: str) -> list[Token]:
    """Split PTX text.

    Raises:
        PtxError: for a character that no PTX token starts with.
    """
    tokens: list[Token] = []
    line, at = 1, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise PtxError(f"no PTX token starts with {text[at]!r}", line)
        kind, at = str(found.lastgroup), found.end()
        if kind == "line":
            line += 1
        elif kind == "comment":
            line += found.group().count("\n")
        elif kind == "number" and len(found.group()) > _LONGEST_NUMBER:
            raise PtxError("a number is longer than 64 bits", line)
        elif kind != "space":
            tokens.append(Token(kind, found.group(), line))
    return tokens
