"""Patterns as one nondeterministic automaton over symbols.

A symbol is a byte of the text, and whether its character is a word character: ``byte`` when it is
not (or is ASCII, where the byte says it), ``256 + byte`` when it is. So word boundaries of every
script are plain transitions. All rules of a build share one `Nfa`, which `ralbuild.fold.subsets` makes
deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ralbuild.config.letters import same_letters
from ralbuild.config.regex import HUGE, Chars, Choice, Node, Sequence
from ralbuild.contract.words import WORD_FLAG
from ralbuild.fold.unicode import is_word

_ASCII_WORD = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
WORD_SYMBOLS = _ASCII_WORD | frozenset(range(WORD_FLAG + 0x80, WORD_FLAG + 0x100))
"""Symbols that make up a word for `whole_words`."""
SYMBOLS = 512

Spelling = tuple[tuple[int, int], ...]
"""Ranges of bytes, one a byte of UTF-8."""
ByteTree = tuple[tuple[frozenset[int], "ByteTree"], ...]
"""Symbols, and what follows them: nothing where the character ends."""


def fold_case(byte: int) -> tuple[int, ...]:
    """Return the bytes that equal ``byte`` when ASCII case is ignored."""
    if 65 <= byte <= 90:
        return (byte, byte + 32)
    if 97 <= byte <= 122:
        return (byte - 32, byte)
    return (byte,)


@dataclass(slots=True)
class Nfa:
    """States are numbers; an edge is (bytes, target); each state belongs to one rule.

    Attributes:
        edges: per state.
        jumps: per state, the states that are reached without reading.
        rule: per state, the number of the rule it belongs to.
        ends: states in which their rule has matched.
    """

    edges: list[list[tuple[frozenset[int], int]]] = field(default_factory=list)
    jumps: list[list[int]] = field(default_factory=list)
    rule: list[int] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)

    def add(self, rule: int, pattern: bytes | Node, *, ignore_case: bool, same_size: bool = False) -> int:
        """Add a literal or a regular expression that the rule numbered ``rule`` matches; return its start.

        With ``same_size`` a letter's other cases count only when they take as many bytes.
        """
        first = self._state(rule)
        spell = _Spelling(self, rule, ignore_case, same_size)
        last = spell.text(pattern, first) if isinstance(pattern, bytes) else spell.node(pattern, first)
        self.ends.add(last)
        return first

    def without_word_start(self, first: int) -> int:
        """Return a start like ``first`` whose matches cannot begin with a word byte."""
        start = self._state(self.rule[first])
        for state in self.closure({first}):
            for mask, target in self.edges[state]:
                if mask - WORD_SYMBOLS:
                    self.edges[start].append((mask - WORD_SYMBOLS, target))
        return start

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """Return ``states`` and all that is reached from them without reading."""
        given = frozenset(states)
        todo = [state for state in given if self.jumps[state]]
        if not todo:
            return given
        found = set(given)
        while todo:
            for target in self.jumps[todo.pop()]:
                if target not in found:
                    found.add(target)
                    todo.append(target)
        return frozenset(found)

    def _state(self, rule: int) -> int:
        self.edges.append([])
        self.jumps.append([])
        self.rule.append(rule)
        return len(self.edges) - 1


class _Spelling:
    """Writes the states of one rule's pattern; every method starts at a state and returns the last one."""

    def __init__(self, nfa: Nfa, rule: int, ignore_case: bool, same_size: bool) -> None:
        self.nfa = nfa
        self.rule = rule
        self.ignore_case = ignore_case
        self.same_size = same_size

    def text(self, text: bytes, here: int) -> int:
        for char in text.decode("utf-8", "surrogateescape"):
            end = self._new()
            single, longer = spelled_letters(char, self.ignore_case, self.same_size)
            if single:
                self._edge(here, single, end)
            for symbols in longer:
                at = here
                for symbol in symbols[:-1]:
                    at = self._edge(at, symbol, self._new())
                self._edge(at, symbols[-1], end)
            here = end
        return here

    def node(self, node: Node, here: int) -> int:
        if isinstance(node, Chars):
            return self._chars(node, here)
        if isinstance(node, Sequence):
            for item in node.items:
                here = self.node(item, here)
            return here
        if isinstance(node, Choice):
            end = self._new()
            for option in node.options:
                self.nfa.jumps[self.node(option, here)].append(end)
            return end
        for _ in range(node.least):
            here = self.node(node.item, here)
        if node.most >= HUGE:
            again = self._new()
            self.nfa.jumps[here].append(again)
            self.nfa.jumps[self.node(node.item, again)].append(again)
            return again
        end = self._new()
        for _ in range(node.most - node.least):
            self.nfa.jumps[here].append(end)
            here = self.node(node.item, here)
        self.nfa.jumps[here].append(end)
        return end

    def _chars(self, node: Chars, here: int) -> int:
        end = self._new()
        self._branches(byte_tree(node, self.ignore_case), here, end)
        return end

    def _branches(self, tree: ByteTree, here: int, end: int) -> None:
        for symbols, rest in tree:
            if rest:
                self._branches(rest, self._edge(here, symbols, self._new()), end)
            else:
                self._edge(here, symbols, end)

    def _new(self) -> int:
        return self.nfa._state(self.rule)

    def _edge(self, here: int, members: frozenset[int], target: int) -> int:
        self.nfa.edges[here].append((members, target))
        return target


Letters = tuple[frozenset[int], tuple[tuple[frozenset[int], ...], ...]]
"""Symbols of the letters that are one byte, and the symbols of each of the others, byte by byte."""


@lru_cache(4096)
def spelled_letters(char: str, ignore_case: bool, same_size: bool) -> Letters:
    """Return how the letters that equal ``char`` are spelled.

    All letters of one byte are one set: what no rule tells apart shares a class. With ``same_size`` a
    letter's other cases count only when they take as many bytes.
    """
    spelled = [char_symbols(letter) for letter in (same_letters(char) if ignore_case else (char,))]
    if same_size:
        size = len(char_symbols(char))
        spelled = [symbols for symbols in spelled if len(symbols) == size]
    longer = [symbols for symbols in spelled if len(symbols) > 1]
    return (
        frozenset(symbols[0] for symbols in spelled if len(symbols) == 1),
        tuple(tuple(frozenset((symbol,)) for symbol in symbols) for symbols in longer),
    )


def char_symbols(char: str) -> tuple[int, ...]:
    """Return the symbols of one character; a byte that is no UTF-8 comes as its surrogate escape."""
    data = char.encode("utf-8", "surrogateescape")
    flag = WORD_FLAG if len(data) > 1 and is_word(char) else 0
    return tuple(byte + flag for byte in data)


@lru_cache(4096)
def byte_tree(node: Chars, ignore_case: bool) -> ByteTree:
    """Return how the characters of a class are spelled; bytes that go on alike are one branch."""
    ranges = node.code_points(ignore_case=ignore_case)
    return _tree([parts for low, high in ranges for parts in utf8_ranges(low, high)])


def _tree(spellings: Iterable[Spelling]) -> ByteTree:
    last: set[int] = set()
    more: dict[int, list[Spelling]] = {}
    for (low, high), *rest in spellings:
        for byte in range(low, high + 1):
            if rest:
                more.setdefault(byte, []).append(tuple(rest))
            else:
                last.add(byte)
    alike: dict[tuple[Spelling, ...], list[int]] = {}
    for byte in sorted(more):
        alike.setdefault(tuple(sorted(more[byte])), []).append(byte)
    branches = [(_both(leads), _tree(rest)) for rest, leads in alike.items()]
    return ((_both(last), ()), *branches) if last else tuple(branches)


def _both(members: Iterable[int]) -> frozenset[int]:
    """Return the symbols of bytes, of word characters and of others."""
    return frozenset(members) | frozenset(byte + WORD_FLAG for byte in members if byte >= 0x80)


def utf8_ranges(low: int, high: int) -> Iterator[Spelling]:
    """Split a range of code points (no surrogates) into sequences of byte ranges, one a byte of UTF-8.

    Method: Russ Cox, "Regular Expression Matching in the Wild" (2010).
    """
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from utf8_ranges(low, limit)
            yield from utf8_ranges(limit + 1, high)
            return
    for bits in (6, 12, 18):
        block = (1 << bits) - 1
        if high <= 0x7F or (low | block) >= high:
            continue
        if low & block:
            yield from utf8_ranges(low, low | block)
            yield from utf8_ranges((low | block) + 1, high)
            return
        if high & block != block:
            yield from utf8_ranges(low, (high & ~block) - 1)
            yield from utf8_ranges(high & ~block, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def byte_classes(sets: Iterable[frozenset[int]], size: int = 256) -> list[int]:
    """Return the class of each of ``size`` symbols: two share one when every set holds both or neither."""
    distinct = sorted({tuple(sorted(item)) for item in sets})
    signatures: list[list[int]] = [[] for _ in range(size)]
    for number, members in enumerate(distinct):
        for symbol in members:
            signatures[symbol].append(number)
    signatures[WORD_FLAG : WORD_FLAG + 0x80] = signatures[:0x80] if size > WORD_FLAG else []
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(signature), len(numbers)) for signature in signatures]
