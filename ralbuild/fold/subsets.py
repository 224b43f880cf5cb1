"""Subset construction over an `Nfa`, on demand and over symbol classes.

Symbols that no rule tells apart are one class, which keeps the tables small. What leads from a node is
grouped by target: most nodes look alike, and how their classes fall into groups is worked out once for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ralbuild.fold.patterns import SYMBOLS, WORD_SYMBOLS, Nfa, byte_classes

DEAD = -1
"""No node: nothing is left that could match."""

Partition = list[tuple[int, tuple[int, ...]]]
"""Classes (bit k is class k), and the places of the masks that hold them."""


def partition(masks: Sequence[int]) -> Partition:
    """Split classes by which of ``masks`` they are in, by their least class."""
    blocks: Partition = []
    for number, left in enumerate(masks):
        split = []
        for classes, which in blocks:
            shared = classes & left
            if shared:
                split.append((shared, (*which, number)))
                left ^= shared
            if classes != shared:
                split.append((classes ^ shared, which))
        if left:
            split.append((left, (number,)))
        blocks = split
    return sorted(blocks, key=lambda block: block[0] & -block[0])


Group = tuple[int, int, int]
"""Classes of no word and classes of a word, as numbers of `Dfa.parts`, and the node that they lead to."""


class Dfa:
    """Subset construction over an `Nfa`; nodes are made when they are first reached.

    A node knows the rules that end in it (``ended``, lowest number first), and the best of them: one that
    needs no word boundary (``accept``) and one that does (``accept_at_boundary``).

    Attributes:
        parts: sets of classes that lead from a node to one other; the first is empty.
    """

    def __init__(self, nfa: Nfa, whole_word: Sequence[bool]) -> None:
        self.nfa = nfa
        self.whole_word = whole_word
        masks = {mask for edges in nfa.edges for mask, _ in edges}
        self.cls = byte_classes(masks | {WORD_SYMBOLS}, SYMBOLS)
        self.classes = max(self.cls) + 1
        self._word = self._classes_of(WORD_SYMBOLS)
        self.class_is_word = [bool(self._word >> klass & 1) for klass in range(self.classes)]
        classes_of = {mask: self._classes_of(mask) for mask in masks}
        self._edges = [[(classes_of[mask], target) for mask, target in edges] for edges in nfa.edges]
        self.parts: list[tuple[int, ...]] = [()]
        self._part_numbers: dict[int, int] = {0: 0}
        self._partitions: dict[tuple[int, ...], list[tuple[int, int, tuple[int, ...]]]] = {}
        self._alone: dict[int, int] = {}
        self._opened: dict[frozenset[int], int] = {}
        self._numbers: dict[frozenset[int], int] = {}
        self._members: list[frozenset[int]] = []
        self._next: list[dict[int, int] | None] = []
        self.ended: list[tuple[int, ...]] = []
        self.accept: list[int | None] = []
        self.accept_at_boundary: list[int | None] = []

    def node(self, states: Iterable[int]) -> int:
        """Return the node for a set of NFA states; `DEAD` for the empty set."""
        open_ = frozenset(states)
        found = self._opened.get(open_)
        if found is None:
            found = self._opened[open_] = self._node(open_)
        return found

    def _node(self, states: frozenset[int]) -> int:
        closed = self.nfa.closure(states)
        if not closed:
            return DEAD
        number = self._numbers.get(closed)
        if number is None:
            number = self._numbers[closed] = len(self._members)
            self._members.append(closed)
            self._next.append(None)
            ends = () if closed.isdisjoint(self.nfa.ends) else closed & self.nfa.ends
            ended = sorted({self.nfa.rule[state] for state in ends})
            plain = [rule for rule in ended if not self.whole_word[rule]]
            words = [rule for rule in ended if self.whole_word[rule]]
            self.ended.append(tuple(ended))
            self.accept.append(plain[0] if plain else None)
            self.accept_at_boundary.append(words[0] if words else None)
        return number

    def moves(self, node: int) -> dict[int, int]:
        """Return class to node for every class that leads somewhere."""
        found = self._next[node]
        if found is None:
            parts = self.parts
            every = [
                (klass, target)
                for plain, word, target in self.groups(node)
                for klass in parts[plain] + parts[word]
            ]
            found = self._next[node] = dict(sorted(every))
        return found

    def groups(self, node: int) -> list[Group]:
        """Return what `moves` does, the classes that lead to one node together, by their least class."""
        leads: dict[int, list[int]] = {}
        for state in self._members[node]:
            for mask, target in self._edges[state]:
                if mask in leads:
                    leads[mask].append(target)
                else:
                    leads[mask] = [target]
        masks = tuple(leads)
        parts = self._partitions.get(masks)
        if parts is None:
            word = self._word
            parts = self._partitions[masks] = [
                (self._part(classes & ~word), self._part(classes & word), which)
                for classes, which in partition(masks)
            ]
        targets = list(leads.values())
        out = []
        for plain, words, which in parts:
            states = targets[which[0]] if len(which) == 1 else [*chain(*[targets[k] for k in which])]
            # Most lead to one state: its number is a shorter key than the set of it.
            target = self._alone.get(states[0], DEAD) if len(states) == 1 else self.node(states)
            if target == DEAD:
                target = self._alone[states[0]] = self._node(frozenset(states))
            out.append((plain, words, target))
        return out

    def _part(self, classes: int) -> int:
        """Number some classes (bit k is class k)."""
        number = self._part_numbers.setdefault(classes, len(self.parts))
        if number == len(self.parts):
            self.parts.append(tuple(k for k in range(classes.bit_length()) if classes >> k & 1))
        return number

    def _classes_of(self, mask: frozenset[int]) -> int:
        """Return the classes of some symbols: bit k is class k."""
        found = 0
        for klass in {self.cls[symbol] for symbol in mask}:
            found |= 1 << klass
        return found

    def grows(self, node: int, *, after_word: bool) -> bool:
        """Tell whether what follows can still make a match: more bytes, or a word boundary."""
        if node == DEAD:
            return False
        return self.goes_on(node) or (after_word and self.accept_at_boundary[node] is not None)

    def goes_on(self, node: int) -> bool:
        """Tell whether any class leads from ``node`` to another one."""
        return any(self._edges[state] for state in self._members[node])
