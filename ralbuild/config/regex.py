"""The regular expressions that rules may use: a bounded subset of Python's, as a small tree.

A match is held back until it is decided, so its length must be bounded, and the longest match is
taken, so lazy repeats mean nothing. Parsed with Python's own parser: what is accepted here means the
same to `re`, except that the longest alternative wins. Classes such as ``\\d`` are ASCII.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ralbuild.config.letters import letter_cases, same_letters

MAX_MATCH_BYTES = 256
MAX_NODES = 4096
MAX_CODE_POINT = 0x10FFFF
_DIGITS = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = ((9, 13), (32, 32))

Ranges = tuple[tuple[int, int], ...]
"""Code points, as sorted inclusive ranges."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One code point out of ``ranges``, or one that is not in them."""

    ranges: Ranges
    negated: bool = False

    def code_points(self, *, ignore_case: bool) -> Ranges:
        """Return what it matches. Case is folded before a class is negated, as `re` does it."""
        ranges = case_folded(self.ranges) if ignore_case else self.ranges
        return complement(ranges) if self.negated else ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """All of ``items``, one after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of ``options``."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``item``, from ``least`` to ``most`` times."""

    item: Node
    least: int
    most: int


Node = Chars | Sequence | Choice | Repeat


def parse_regex(text: str, longest: int = MAX_MATCH_BYTES) -> Node:
    """Parse a pattern whose matches may have up to ``longest`` bytes.

    Raises:
        ValueError: saying which part is no regular expression, not supported, or not bounded.
    """
    try:
        parsed = _parser.parse(text, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if parsed.state.flags & ~re.ASCII:
        raise ValueError("inline flags are not supported; use 'case_sensitive'")
    node = _sequence(parsed)
    if _size(node) > MAX_NODES:
        raise ValueError(f"too large: its repeats unfold to more than {MAX_NODES} characters")
    least, most = width(node)
    if least == 0:
        raise ValueError("matches the empty text; a rule must match at least one character")
    if most > longest:
        raise ValueError(
            f"unbounded hold-back: a match may have {'any number of' if most >= HUGE else most} bytes, "
            f"at most {longest} are allowed; bound the repeats, as in [0-9]{{6,12}}"
        )
    return node


def parse_class(text: str) -> Chars:
    """Parse the inside of a character class, such as ``0-9.,``.

    Raises:
        ValueError: when it is not that, or matches nothing.
    """
    node = parse_regex(f"[{text}]") if text else None
    if not isinstance(node, Chars):
        raise ValueError("needs the inside of a character class; write \\] and \\\\ for ] and \\")
    return node


@dataclass(frozen=True, slots=True)
class RouteRegex:
    """The regular expression of a route: it must match the whole name, so its length is not bounded."""

    node: Node
    ignore_case: bool


def parse_route(text: str) -> RouteRegex:
    """Parse the pattern of a route.

    Anchors at its ends and lazy repeats change nothing where all of a name must match; both are accepted.
    ``(?i)`` at the beginning ignores ASCII case.

    Raises:
        ValueError: saying which part is no regular expression, or not supported.
    """
    try:
        parsed = _parser.parse(text, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if parsed.state.flags & ~(re.ASCII | re.IGNORECASE):
        raise ValueError("no inline flag but (?i) is supported")
    node = _sequence(_whole(parsed, first=True, last=True))
    if _size(node) > MAX_NODES:
        raise ValueError(f"too large: its repeats unfold to more than {MAX_NODES} characters")
    return RouteRegex(node, bool(parsed.state.flags & re.IGNORECASE))


_BEGINNINGS = (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING)
_ENDS = (sre.AT_END, sre.AT_END_STRING)


def _whole(parsed: Any, *, first: bool, last: bool) -> list[tuple[Any, Any]]:
    """Drop anchors at the ends of a parsed pattern, and make lazy repeats greedy."""
    items = list(parsed)
    while first and items and items[0][0] is sre.AT and items[0][1] in _BEGINNINGS:
        del items[0]
    while last and items and items[-1][0] is sre.AT and items[-1][1] in _ENDS:
        del items[-1]
    out = []
    for index, (op, argument) in enumerate(items):
        ends = {"first": first and index == 0, "last": last and index == len(items) - 1}
        if op is sre.BRANCH:
            argument = (argument[0], [_whole(option, **ends) for option in argument[1]])
        elif op is sre.SUBPATTERN:
            argument = (*argument[:3], _whole(argument[3], **ends))
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            op = sre.MAX_REPEAT
            argument = (*argument[:2], _whole(argument[2], first=False, last=False))
        out.append((op, argument))
    return out


HUGE = 1 << 40
"""Stands for no bound in a repeat."""


def width(node: Node, *, ignore_case: bool = False) -> tuple[int, int]:
    """Return the least and the most bytes of UTF-8 that a match of ``node`` has."""
    if isinstance(node, Chars):
        return _char_width(node, ignore_case)
    if isinstance(node, Sequence):
        parts = [width(item, ignore_case=ignore_case) for item in node.items]
        return sum(low for low, _ in parts), min(HUGE, sum(high for _, high in parts))
    if isinstance(node, Choice):
        parts = [width(item, ignore_case=ignore_case) for item in node.options]
        return min(low for low, _ in parts), max(high for _, high in parts)
    low, high = width(node.item, ignore_case=ignore_case)
    return low * node.least, min(HUGE, high * node.most)


@lru_cache(4096)
def _char_width(node: Chars, ignore_case: bool) -> tuple[int, int]:
    ends = [end for pair in node.code_points(ignore_case=ignore_case) for end in pair]
    sizes = [len(chr(_encodable(end)).encode()) for end in ends]
    return min(sizes), max(sizes)


def can_match(node: Node, char: str) -> bool:
    """Tell whether a match of ``node`` can hold the character ``char``."""
    if isinstance(node, Chars):
        return any(low <= ord(char) <= high for low, high in node.code_points(ignore_case=True))
    parts = node.items if isinstance(node, Sequence) else node.options if isinstance(node, Choice) else ()
    return any(can_match(part, char) for part in parts) or (
        isinstance(node, Repeat) and can_match(node.item, char)
    )


def _size(node: Node) -> int:
    """Return how many characters ``node`` unfolds to, an unbounded repeat counting once."""
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Repeat):
        return (_size(node.item) + 1) * (1 if node.most >= HUGE else node.most)
    parts = node.items if isinstance(node, Sequence) else node.options
    return 1 + sum(_size(part) for part in parts)


def _encodable(code: int) -> int:
    return 0xE000 if 0xD800 <= code <= 0xDFFF else code


def _sequence(parsed: Any) -> Node:
    items = tuple(_node(op, argument) for op, argument in parsed)
    return items[0] if len(items) == 1 else Sequence(items)


def _node(op: Any, argument: Any) -> Node:
    if op is sre.LITERAL:
        return Chars(_encodable_ranges([(argument, argument)]))
    if op is sre.NOT_LITERAL:
        return Chars(((argument, argument),), negated=True)
    if op is sre.ANY:
        return Chars(((10, 10),), negated=True)
    if op is sre.IN:
        return _class(argument)
    if op is sre.BRANCH:
        return Choice(tuple(_sequence(option) for option in argument[1]))
    if op is sre.SUBPATTERN:
        if argument[1] or argument[2]:
            raise ValueError("inline flags are not supported; use 'case_sensitive'")
        return _sequence(argument[3])
    if op is sre.MAX_REPEAT:
        least, most, item = argument
        return Repeat(_sequence(item), int(least), HUGE if most is sre.MAXREPEAT else int(most))
    names = {
        sre.MIN_REPEAT: "lazy repeats are not supported: the longest match is taken",
        sre.AT: "anchors and \\b are not supported; use 'whole_words'",
        sre.ASSERT: "look-ahead and look-behind are not supported",
        sre.ASSERT_NOT: "look-ahead and look-behind are not supported",
        sre.GROUPREF: "back-references are not supported",
    }
    raise ValueError(names.get(op, f"{str(op).lower()} is not supported"))


def _class(parts: Any) -> Chars:
    negate = parts[0][0] is sre.NEGATE
    ranges: list[tuple[int, int]] = []
    for op, argument in parts[1:] if negate else parts:
        if op is sre.LITERAL:
            ranges.append((argument, argument))
        elif op is sre.RANGE:
            ranges.append(argument)
        else:
            ranges += _category(argument)
    chars = Chars(_encodable_ranges(ranges), negate)
    chars.code_points(ignore_case=False)  # a class that matches nothing is an error here
    return chars


def _category(name: Any) -> Ranges:
    table = {
        sre.CATEGORY_DIGIT: _DIGITS,
        sre.CATEGORY_WORD: _WORD,
        sre.CATEGORY_SPACE: _SPACE,
        sre.CATEGORY_NOT_DIGIT: complement(_DIGITS),
        sre.CATEGORY_NOT_WORD: complement(_WORD),
        sre.CATEGORY_NOT_SPACE: complement(_SPACE),
    }
    return table[name]


def _encodable_ranges(ranges: Any) -> Ranges:
    """Sort, merge and drop surrogates, which no UTF-8 text holds."""
    without = [
        part
        for low, high in ranges
        for part in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high))
        if part[0] <= part[1]
    ]
    merged: list[tuple[int, int]] = []
    for low, high in sorted(without):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    if not merged:
        raise ValueError("a character class matches nothing")
    return tuple(merged)


@cache
def case_folded(ranges: Ranges) -> Ranges:
    """Return ``ranges`` with every letter that equals one in them when case is ignored."""
    cased = _cased()
    out = list(ranges)
    for low, high in ranges:
        for code in cased[bisect_left(cased, low) : bisect_right(cased, high)]:
            out += [(ord(other), ord(other)) for other in same_letters(chr(code))]
    return _encodable_ranges(out)


@cache
def _cased() -> list[int]:
    """Return the code points of all letters that have another case, ascending."""
    return sorted(map(ord, letter_cases()))


def complement(ranges: Any) -> Ranges:
    """Return every code point that is not in ``ranges``, surrogates left out."""
    out, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            out.append((at, low - 1))
        at = max(at, high + 1)
    if at <= MAX_CODE_POINT:
        out.append((at, MAX_CODE_POINT))
    return _encodable_ranges(out)
