"""Banned phrases and allowed texts to one automaton (contract/bans.py).

Bans are Aho and Corasick's automaton, ASCII case ignored. `allow` is a trie of texts beside the
UTF-8 of a character class; both walk along with the profile's bans, and states from which no allowed
text can be completed become the sink: so a text never runs into a dead end.

Every profile has its own start state; equal ones share it. A profile that limits nothing starts in
a state with only loops, which the sampler skips. Work is linear in the bytes of all texts.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ralbuild.config.regex import Chars
from ralbuild.contract.bans import BANNED, write_bans
from ralbuild.errors import CompileError
from ralbuild.fold.patterns import byte_classes, fold_case, utf8_ranges

Row: TypeAlias = "array.array[int]"
"""Next state by byte class."""
_Rest = tuple[tuple[int, int], ...]
"""Ranges of the bytes that complete a character; empty between two characters."""
_BETWEEN: frozenset[_Rest] = frozenset({()})


@dataclass(frozen=True, slots=True)
class Limits:
    """What the texts of one profile may be.

    Attributes:
        bans: phrases that never occur.
        texts: if not empty, the text is one of these ...
        characters: ... or, if given, made of these characters alone.
        name: the action, for messages.
    """

    bans: tuple[bytes, ...] = ()
    texts: tuple[bytes, ...] = ()
    characters: Chars | None = None
    name: str = ""

    @property
    def strict(self) -> bool:
        """True when only some texts are allowed."""
        return bool(self.texts) or self.characters is not None


NO_LIMITS = Limits()


def build_bans(limits_of: Sequence[Limits]) -> bytes:
    """Return the serialised automaton; ``limits_of`` has one entry per profile.

    Raises:
        CompileError: when an allowed text is banned, or nothing that is allowed is left.
    """
    ban_cls = byte_classes(
        {frozenset(fold_case(byte)) for item in limits_of for text in item.bans for byte in text}
    )
    cls = _classes(ban_cls, limits_of)
    columns = [ban_cls[cls.index(number)] for number in range(max(cls) + 1)]
    rows: list[Row] = [array.array("I", [BANNED]) * len(columns)]
    accepts = bytearray(1)
    starts: list[int] = []
    made: dict[object, int] = {}
    for item in limits_of:
        key = (frozenset(item.bans), frozenset(item.texts), item.characters)
        if key not in made:
            made[key] = base = len(rows)
            phrases = tuple({bytes(ban_cls[byte] for byte in text) for text in item.bans})
            first = 1 if item.strict else base
            own = _ban_rows(phrases, max(ban_cls) + 1, first)
            if item.strict:
                added, ends = _Allowed(item, own, ban_cls, cls).rows(base)
            else:
                added, ends = _widened(own, columns), bytes([1]) * len(own)
            rows += added
            accepts += ends
        starts.append(made[key])
    strict = [int(item.strict) for item in limits_of]
    return write_bans(cls=cls, rows=rows, starts=starts, accepts=accepts, strict=strict)


def _classes(ban_cls: list[int], limits_of: Sequence[Limits]) -> list[int]:
    """Return classes of bytes that neither bans nor allowed texts tell apart."""
    if not any(item.strict for item in limits_of):
        return ban_cls
    sets = {frozenset(byte for byte in range(256) if ban_cls[byte] == number) for number in set(ban_cls)}
    for item in limits_of:
        sets |= {frozenset({byte}) for text in item.texts for byte in text}
        for sequence in _sequences(item.characters):
            sets |= {frozenset(range(low, high + 1)) for low, high in sequence}
    return byte_classes(sets)


def _sequences(characters: Chars | None) -> Iterator[_Rest]:
    for low, high in characters.code_points(ignore_case=False) if characters else ():
        yield from utf8_ranges(low, high)


def _ban_rows(phrases: Sequence[bytes], classes: int, start: int) -> list[Row]:
    """Return an automaton over strings of ban classes: states ``start`` (where it begins) and up.

    A state's row is that of its longest proper suffix, with the state's own children put in. What
    follows a complete phrase is never reached and not made.
    """
    trie: list[dict[int, int]] = [{}]
    complete = [False]
    for phrase in phrases:
        node = 0
        for symbol in phrase:
            if symbol not in trie[node]:
                trie[node][symbol] = len(trie)
                trie.append({})
                complete.append(False)
            node = trie[node][symbol]
        complete[node] = True
    rows: list[Row] = []
    # (trie node, state of its longest proper suffix), in the order of their states.
    queue: deque[tuple[int, int]] = deque([(0, start)])
    number = start
    while queue:
        node, suffix = queue.popleft()
        row = array.array("I", [start]) * classes if node == 0 else rows[suffix - start][:]
        for symbol, child in sorted(trie[node].items()):
            behind = row[symbol]
            if complete[child] or behind == BANNED:
                row[symbol] = BANNED
                continue
            number += 1
            row[symbol] = number
            queue.append((child, behind))
        rows.append(row)
    return rows


def _widened(own: list[Row], columns: list[int]) -> list[Row]:
    """Return rows over ban classes as rows over the classes of the table."""
    if columns == list(range(len(own[0]))):
        return own
    return [array.array("I", [row[column] for column in columns]) for row in own]


_State = tuple[int, int, frozenset[_Rest]]
"""Ban state, trie node of the texts (-1: none of them any more), ways to complete a character."""


class _Allowed:
    """Allowed texts of one profile, walked together with its bans."""

    def __init__(self, limits: Limits, bans: list[Row], ban_cls: list[int], cls: list[int]) -> None:
        self.limits = limits
        self.bans = bans
        self.ban_cls = ban_cls
        self.cls = cls
        self.sequences = frozenset(_sequences(limits.characters))
        self._spans: dict[tuple[int, int], set[int]] = {}
        self.trie: list[dict[int, int]] = [{}]
        self.ends: set[int] = set()
        for text in limits.texts:
            self._add(text)

    def _add(self, text: bytes) -> None:
        node, state = 0, 1
        for byte in text:
            node = self.trie[node].setdefault(byte, len(self.trie))
            if node == len(self.trie):
                self.trie.append({})
            state = self.bans[state - 1][self.ban_cls[byte]] if state else BANNED
        if state == BANNED:
            shown = text.decode(errors="replace")
            raise CompileError(
                f"action {self.limits.name!r} allows {shown!r} and bans it",
                place="fold",
                hint="remove one of the two",
            )
        self.ends.add(node)

    def rows(self, base: int) -> tuple[list[Row], bytes]:
        """Return the rows of the reachable states, the start first, and which of them accept."""
        start: _State = (1, 0 if self.limits.texts else -1, _BETWEEN if self.sequences else frozenset())
        number = {start: 0}
        order = [start]
        moves: list[dict[int, int]] = []
        for state in order:
            row = {}
            for byte in self._ways_on(state):
                target = self._move(state, byte)
                if target is not None:
                    row[self.cls[byte]] = number.setdefault(target, len(order))
                    if number[target] == len(order):
                        order.append(target)
            moves.append(row)
        accepts = [node in self.ends or rest == _BETWEEN for _, node, rest in order]
        kept = _completable(moves, accepts)
        if not kept[0]:
            raise CompileError(f"action {self.limits.name!r} bans all that it allows", place="fold")
        place = {old: base + new for new, old in enumerate(index for index, keep in enumerate(kept) if keep)}
        rows: list[Row] = []
        for old in place:
            line = array.array("I", [BANNED]) * (max(self.cls) + 1)
            for symbol, following in moves[old].items():
                line[symbol] = place.get(following, BANNED)
            rows.append(line)
        return rows, bytes(accepts[old] for old in place)

    def _ways_on(self, state: _State) -> list[int]:
        """Return one byte of every class that may lead somewhere."""
        _, node, rest = state
        found = set(self.trie[node]) if node >= 0 else set()
        for way in self.sequences if rest == _BETWEEN else rest:
            found |= self._first_bytes(way[0])
        return sorted(found)

    def _first_bytes(self, span: tuple[int, int]) -> set[int]:
        if span not in self._spans:
            bytes_of = {self.cls[byte]: byte for byte in range(span[0], span[1] + 1)}
            self._spans[span] = set(bytes_of.values())
        return self._spans[span]

    def _move(self, state: _State, byte: int) -> _State | None:
        banned, node, rest = state
        banned = self.bans[banned - 1][self.ban_cls[byte]]
        node = self.trie[node].get(byte, -1) if node >= 0 else -1
        ways = self.sequences if rest == _BETWEEN else rest
        rest = frozenset(way[1:] for way in ways if way[0][0] <= byte <= way[0][1])
        return (banned, node, rest) if banned != BANNED and (node >= 0 or rest) else None


def _completable(moves: list[dict[int, int]], accepts: list[bool]) -> list[bool]:
    """Tell for each state whether some accepting state can be reached from it."""
    into: list[list[int]] = [[] for _ in moves]
    for state, row in enumerate(moves):
        for target in set(row.values()):
            into[target].append(state)
    kept = list(accepts)
    todo = [state for state, keep in enumerate(kept) if keep]
    while todo:
        for state in into[todo.pop()]:
            if not kept[state]:
                kept[state] = True
                todo.append(state)
    return kept
