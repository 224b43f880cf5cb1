"""Routing rules to one table, and what their patterns have in common."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ralbuild.config.regex import parse_route
from ralbuild.contract.routes import write_routes
from ralbuild.errors import CompileError
from ralbuild.fold.patterns import Nfa, byte_classes

GROUP_STATES = 512
"""Automaton states above which a group of rules is split in two."""
RULE_STATES = 8192
"""States that one rule alone may need."""
TABLE_STATES = 1 << 16
"""States that all rules may need together."""
SEARCH_NODES = 10_000
"""States that the search for overlaps looks at; with more, some names are not compared."""

Node = frozenset[int]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two rules of which one hides the other, or part of it.

    Attributes:
        winner, loser: indices of the rules, in the order in which they are tried.
        whole: nothing is left for the loser.
        example: a route name that both match.
    """

    winner: int
    loser: int
    whole: bool
    example: str


@dataclass(frozen=True, slots=True)
class Overlaps:
    """What was found; ``complete`` is False when the search was cut short."""

    found: tuple[Overlap, ...]
    complete: bool


class RoutePatterns:
    """The patterns of all rules, in the order in which they are tried.

    Args:
        patterns: regular expressions that `parse_route` takes.
        places: where each stands, for messages.
    """

    def __init__(self, patterns: Sequence[str], places: Sequence[str] = ()) -> None:
        self.places = places or patterns
        self.nfa = Nfa()
        self.starts = []
        for number, text in enumerate(patterns):
            route = parse_route(text)
            self.starts.append(self.nfa.add(number, route.node, ignore_case=route.ignore_case))
        self.nfa.edges = [
            [(frozenset(symbol & 0xFF for symbol in mask), target) for mask, target in edges]
            for edges in self.nfa.edges
        ]
        masks = [mask for edges in self.nfa.edges for mask, _ in edges]
        self.cls = byte_classes(masks)
        self.classes = max(self.cls) + 1
        self._classes_of = {mask: sorted({self.cls[byte] for byte in mask}) for mask in masks}
        self._letters = [self._letter(number) for number in range(self.classes)]
        self._moves: dict[Node, list[tuple[int, Node]]] = {}

    def table(self) -> bytes:
        """Return the serialised table.

        Raises:
            CompileError: when one rule needs more than `RULE_STATES` states.
        """
        rows: list[list[int]] = [[0] * self.classes]
        accept, starts = [0], []
        for first, last in self._groups(0, len(self.starts)):
            numbers: dict[Node, int] = {}
            starts.append(len(rows))
            if len(rows) > TABLE_STATES:
                hint = "use fewer rules, or patterns without `.*` in their middle"
                raise CompileError(
                    f"the routes need more than {TABLE_STATES} states", place="routing", hint=hint
                )
            for node in self._reachable(first, last, 1 << 30) or ():
                numbers[node] = len(rows) + len(numbers)
            for node in numbers:
                row = [0] * self.classes
                for klass, target in self._next(node):
                    row[klass] = numbers[target]
                rows.append(row)
                accept.append(min(self.ended(node), default=-1) + 1)
        return write_routes(cls=self.cls, rows=rows, accept=accept, starts=starts)

    def matching(self, route: str) -> list[int]:
        """Return every rule that matches all of ``route``, in the order in which they are tried."""
        node = self.nfa.closure(self.starts)
        for byte in route.encode("utf-8", "replace"):
            node = dict(self._next(node)).get(self.cls[byte], frozenset())
        return sorted(self.ended(node))

    def overlaps(self) -> Overlaps:
        """Compare all rules in one walk over their automaton."""
        examples: dict[tuple[int, int], str] = {}
        together: Counter[tuple[int, int]] = Counter()
        matched: Counter[int] = Counter()
        winners: set[int] = set()
        names, complete = self._walk()
        for node, name in names.items():
            ended = sorted(self.ended(node))
            matched.update(ended)
            winners.update(ended[:1])
            for pair in itertools.combinations(ended, 2):
                together[pair] += 1
                examples.setdefault(pair, name.decode("utf-8", "replace"))
        found = []
        for winner, loser in sorted(examples, key=lambda pair: (pair[1], pair[0])):
            whole = complete and loser not in winners
            found.append(Overlap(winner, loser, whole, examples[winner, loser]))
        alone = {
            item.loser: item
            for item in reversed(found)
            if together[item.winner, item.loser] == matched[item.loser]
        }
        # Where one rule hides another by itself, the others that overlap it do not matter.
        kept = (item for item in found if not item.whole or alone.get(item.loser, item) == item)
        return Overlaps(tuple(kept), complete)

    def _walk(self) -> tuple[dict[Node, bytes], bool]:
        """Return a shortest name for each node of the automaton of all rules, and whether those are all."""
        start = self.nfa.closure(self.starts)
        names = {start: b""}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for klass, target in sorted(self._next(node), key=lambda move: self._letters[move[0]]):
                if target not in names:
                    if len(names) >= SEARCH_NODES:
                        return names, False
                    names[target] = names[node] + bytes([self._letters[klass][1]])
                    queue.append(target)
        return names, True

    def ended(self, node: Node) -> set[int]:
        """Return the rules that match what leads to ``node``."""
        return {self.nfa.rule[state] for state in node & self.nfa.ends}

    def _groups(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Split rules into runs whose automata are small; usually all are one run."""
        if first == last:
            return
        alone = last - first == 1
        if self._reachable(first, last, RULE_STATES if alone else GROUP_STATES) is not None:
            yield first, last
        elif alone:
            raise CompileError(
                f"the pattern needs more than {RULE_STATES} states",
                place=self.places[first],
                hint="shorten its counted repeats",
            )
        else:
            middle = (first + last) // 2
            yield from self._groups(first, middle)
            yield from self._groups(middle, last)

    def _reachable(self, first: int, last: int, limit: int) -> list[Node] | None:
        """Return the automaton's nodes in breadth-first order, or None when they are too many."""
        start = self.nfa.closure(self.starts[first:last])
        order = {start: None}
        queue = deque([start])
        while queue:
            for _, target in self._next(queue.popleft()):
                if target not in order:
                    if len(order) >= limit:
                        return None
                    order[target] = None
                    queue.append(target)
        return list(order)

    def _next(self, node: Node) -> list[tuple[int, Node]]:
        """Return the class and target of every move, by class."""
        found = self._moves.get(node)
        if found is None:
            targets: dict[int, set[int]] = {}
            for state in node:
                for mask, target in self.nfa.edges[state]:
                    for klass in self._classes_of[mask]:
                        targets.setdefault(klass, set()).add(target)
            found = [(klass, self.nfa.closure(states)) for klass, states in sorted(targets.items())]
            self._moves[node] = found
        return found

    def _letter(self, klass: int) -> tuple[int, int]:
        """Return a byte of the class that reads well, letters first."""
        members = [byte for byte in range(256) if self.cls[byte] == klass]
        ranked = (
            (0 if chr(byte).islower() else 1 if chr(byte).isalnum() else 2, byte)
            for byte in members
            if byte < 128
        )
        return min(ranked, default=(3, members[0]))
