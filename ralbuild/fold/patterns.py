"""Patterns over bytes as one nondeterministic automaton, and its subset construction on demand.

All rules of a build share one `Nfa`. `Dfa` determinises it lazily, over byte classes: bytes that no
rule tells apart are one class, which keeps the tables small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WORD_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
"""Bytes that make up a word for `whole_words`; bytes of other scripts are not among them."""

DEAD = -1


def fold_case(byte: int) -> tuple[int, ...]:
    """Return the bytes that equal ``byte`` when ASCII case is ignored."""
    if 65 <= byte <= 90:
        return (byte, byte + 32)
    if 97 <= byte <= 122:
        return (byte - 32, byte)
    return (byte,)


@dataclass(frozen=True, slots=True)
class Accept:
    """A pattern ends here: rule number, and whether the next byte must not be a word byte."""

    rule: int
    needs_boundary: bool


@dataclass(slots=True)
class Nfa:
    """States are numbers; an edge is (bytes, target); ``accepts`` marks pattern ends."""

    edges: list[list[tuple[frozenset[int], int]]] = field(default_factory=list)
    accepts: dict[int, Accept] = field(default_factory=dict)

    def state(self) -> int:
        """Add a state and return its number."""
        self.edges.append([])
        return len(self.edges) - 1

    def literal(self, text: bytes, *, ignore_case: bool, accept: Accept) -> int:
        """Add a chain of states that spells ``text``; return its first state."""
        first = here = self.state()
        for byte in text:
            target = self.state()
            self.edges[here].append((frozenset(fold_case(byte) if ignore_case else (byte,)), target))
            here = target
        self.accepts[here] = accept
        return first


def byte_classes(sets: Iterable[frozenset[int]]) -> list[int]:
    """Return the class of each byte: two bytes share one when every set holds both or neither."""
    distinct = sorted({tuple(sorted(item)) for item in sets})
    signatures: list[list[int]] = [[] for _ in range(256)]
    for number, members in enumerate(distinct):
        for byte in members:
            signatures[byte].append(number)
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(signature), len(numbers)) for signature in signatures]


class Dfa:
    """Subset construction over an `Nfa`; nodes are made when they are first reached.

    A node knows the best rule that ends in it, with and without a needed word boundary. "Best" is
    the lowest (level, rule number): ``levels[rule]`` 0 is redaction, which wins over markup.
    """

    def __init__(self, nfa: Nfa, levels: Sequence[int]) -> None:
        self.nfa = nfa
        self.levels = levels
        self.cls = byte_classes([mask for edges in nfa.edges for mask, _ in edges] + [WORD_BYTES])
        self.classes = max(self.cls) + 1
        self.class_is_word = [False] * self.classes
        for byte in WORD_BYTES:
            self.class_is_word[self.cls[byte]] = True
        self._classes_of: dict[frozenset[int], tuple[int, ...]] = {}
        self._numbers: dict[frozenset[int], int] = {}
        self._members: list[frozenset[int]] = []
        self._next: list[dict[int, int] | None] = []
        self._restricted: dict[int, int] = {}
        self.accept: list[int | None] = []
        self.accept_at_boundary: list[int | None] = []
        self.holds_redaction: list[bool] = []
        self._rule_level = self._levels_by_state()

    def _levels_by_state(self) -> list[int]:
        """Return the level of the rule that each state belongs to (a chain ends in its accept)."""
        level = [0] * len(self.nfa.edges)
        for state in range(len(level) - 1, -1, -1):
            if state in self.nfa.accepts:
                level[state] = self.levels[self.nfa.accepts[state].rule]
            else:
                level[state] = max((level[target] for _, target in self.nfa.edges[state]), default=0)
        return level

    def node(self, states: frozenset[int]) -> int:
        """Return the node for a set of NFA states; `DEAD` for the empty set."""
        if not states:
            return DEAD
        number = self._numbers.get(states)
        if number is None:
            number = self._numbers[states] = len(self._members)
            self._members.append(states)
            self._next.append(None)
            self.accept.append(self._best(states, at_boundary=False))
            self.accept_at_boundary.append(self._best(states, at_boundary=True))
            self.holds_redaction.append(
                any(self._rule_level[state] == 0 and self._can_grow(state) for state in states)
            )
        return number

    def _can_grow(self, state: int) -> bool:
        accept = self.nfa.accepts.get(state)
        return bool(self.nfa.edges[state]) or (accept is not None and accept.needs_boundary)

    def _best(self, states: frozenset[int], *, at_boundary: bool) -> int | None:
        rules = [
            self.nfa.accepts[state].rule
            for state in states
            if state in self.nfa.accepts and self.nfa.accepts[state].needs_boundary is at_boundary
        ]
        return min(rules, key=lambda rule: (self.levels[rule], rule), default=None)

    def moves(self, node: int) -> dict[int, int]:
        """Return class to node for every class that leads somewhere."""
        found = self._next[node]
        if found is None:
            targets: dict[int, set[int]] = {}
            for state in self._members[node]:
                for mask, target in self.nfa.edges[state]:
                    for number in self._mask_classes(mask):
                        targets.setdefault(number, set()).add(target)
            found = {number: self.node(frozenset(states)) for number, states in sorted(targets.items())}
            self._next[node] = found
        return found

    def _mask_classes(self, mask: frozenset[int]) -> tuple[int, ...]:
        found = self._classes_of.get(mask)
        if found is None:
            found = self._classes_of[mask] = tuple(sorted({self.cls[byte] for byte in mask}))
        return found

    def grows(self, node: int) -> bool:
        """Tell whether reading on from ``node`` can still lead to a match."""
        return node != DEAD and (bool(self.moves(node)) or self.accept_at_boundary[node] is not None)

    def redaction_only(self, node: int) -> int:
        """Return the node with the states of redaction rules alone."""
        if node == DEAD:
            return DEAD
        found = self._restricted.get(node)
        if found is None:
            keep = frozenset(state for state in self._members[node] if self._rule_level[state] == 0)
            found = self._restricted[node] = self.node(keep)
        return found
