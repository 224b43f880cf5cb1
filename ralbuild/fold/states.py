"""What is undecided while text is read: the states of the rules, and how a symbol moves them.

A state has, for every undecided byte, the automaton node of a match that would start there and the
matches it has found so far. Reading a symbol moves every start; then the first start is settled as
soon as nothing can change it: it is copied when it can match no more, or its longest match is
committed. Redaction has precedence: a markup match waits while a redaction inside it is open, and
gives way to one that overlaps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.contract.transducer_table import COPY
from ralbuild.fold.patterns import DEAD, Dfa, Nfa
from ralbuild.fold.rules import REDACTION, Op, TextRule

STATE_BUDGET = 1 << 17
"""States that a build may make: a pattern that needs more takes too long to build and to fit a cache."""

Match = tuple[int, int]
"""Length in bytes, index of the text rule."""
Start = tuple[int, tuple[Match, ...]]
"""Automaton node of a match that begins here (DEAD when none can), and the matches found so far."""

DEAD_START: Start = (DEAD, ())


class StateLimitError(Exception):
    """The rules need more than `STATE_BUDGET` states."""


@dataclass(frozen=True, slots=True)
class State:
    """What is undecided: set of rules, whether a word character came last, one start per pending byte."""

    rules: int
    after_word: bool
    starts: tuple[Start, ...]


class RuleStates:
    """The states of several sets of rules, numbered as they are met.

    Attributes:
        rules: every rule, in the order that decides ties.
        states: by number.
    """

    def __init__(self, sets: Sequence[tuple[TextRule, ...]]) -> None:
        # Numbered by rule id: of two matches of one length, the rule that comes first in the file wins.
        every = dict.fromkeys(rule for texts in sets for rule in texts)
        self.rules: list[TextRule] = sorted(every, key=lambda rule: rule.id)
        nfa = Nfa()
        first_of = {
            rule: nfa.add(number, rule.pattern, ignore_case=rule.ignore_case, same_size=rule.rewrites_inside)
            for number, rule in enumerate(self.rules)
        }
        # After a word character a whole word can only start with another one.
        inside_of = {
            rule: nfa.without_word_start(first) if rule.whole_word else first
            for rule, first in first_of.items()
        }
        self.dfa = Dfa(nfa, [rule.level for rule in self.rules], [rule.whole_word for rule in self.rules])
        self.fresh = [
            {
                False: self.dfa.node(first_of[rule] for rule in texts),
                True: self.dfa.node(inside_of[rule] for rule in texts),
            }
            for texts in sets
        ]
        self.redacting = any(rule.level == REDACTION for rule in self.rules)
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}

    def number(self, rules: int, after_word: bool, starts: tuple[Start, ...]) -> int:
        """Return the number of a state; states are compared once, here."""
        state = State(rules, after_word, starts)
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.states)
            self.states.append(state)
            if len(self.states) > STATE_BUDGET:
                raise StateLimitError
        return number

    def read(self, state: State, klass: int) -> tuple[int, list[Op]]:
        """Read one byte of class ``klass``: every start moves, a new one begins, the first is settled."""
        boundary = not self.dfa.class_is_word[klass]
        count = len(state.starts)
        ends = boundary and state.after_word
        moved = [
            start if start[0] == DEAD else self._move(start[0], start[1], count - index, klass, ends=ends)
            for index, start in enumerate(state.starts)
        ]
        moved.append(self._move(self.fresh[state.rules][state.after_word], (), 0, klass, ends=False))
        starts, ops = self.settle(moved)
        return self.number(state.rules, not boundary, starts), ops

    def move_first(self, state: State, klass: int) -> Start:
        """Return what becomes of the first start alone."""
        ends = state.after_word and not self.dfa.class_is_word[klass]
        return self._move(*state.starts[0], len(state.starts), klass, ends=ends)

    def _move(self, node: int, found: tuple[Match, ...], length: int, klass: int, *, ends: bool) -> Start:
        """Move one start by one byte; ``ends`` says that a word ends before it."""
        if node == DEAD:
            return DEAD, found
        dfa = self.dfa
        if ends and (rule := dfa.accept_at_boundary[node]) is not None:
            found = self.add_match(found, (length, rule))
        node = dfa.moves(node).get(klass, DEAD)
        word = dfa.class_is_word[klass]
        if node != DEAD:
            for rule in (dfa.accept[node], None if word else dfa.accept_at_boundary[node]):
                if rule is not None:
                    found = self.add_match(found, (length + 1, rule))
        if found and self._redacts(found):
            node = dfa.redaction_only(node)
        return (node if dfa.grows(node, after_word=word) else DEAD), found

    def add_match(self, found: tuple[Match, ...], match: Match) -> tuple[Match, ...]:
        """Add a match of one start. A redaction displaces markup; of one length, the lower rule wins."""
        if self.rules[match[1]].level == REDACTION:
            if found and found[-1][0] == match[0] and self._redacts(found):
                return ((match[0], min(match[1], found[-1][1])),)
            return (match,)
        if found and self._redacts(found):
            return found
        if found and found[-1][0] == match[0]:
            return (*found[:-1], (match[0], min(match[1], found[-1][1])))
        return (*found, match)

    def _redacts(self, found: tuple[Match, ...]) -> bool:
        return self.rules[found[-1][1]].level == REDACTION

    # Decisions

    def settle(self, starts: list[Start]) -> tuple[tuple[Start, ...], list[Op]]:
        """Decide from the left whatever nothing can change any more."""
        ops: list[Op] = []
        self._cut_markup(starts)
        while starts:
            node, found = starts[0]
            if node != DEAD:
                break
            if not found:
                dead = next((i for i, start in enumerate(starts) if start != (DEAD, ())), len(starts))
                ops.append((COPY, dead))
                del starts[:dead]
                continue
            length, rule = found[-1]
            if not self._redacts(found) and self.redaction_open(starts, length):
                break
            ops += self.rules[rule].operations(length)
            del starts[:length]
            self._cut_markup(starts)
        self._drop_covered(starts)
        return tuple(starts), ops

    def _cut_markup(self, starts: list[Start]) -> None:
        """Where a redaction is certain, take back markup that starts before it and reaches into it."""
        if not self.redacting:
            return
        for index, (node, found) in enumerate(starts):
            if found and self._redacts(found):
                for earlier in range(index):
                    kept = tuple(match for match in starts[earlier][1] if match[0] <= index - earlier)
                    starts[earlier] = (DEAD, kept)
                return
            if node != DEAD and self.dfa.holds_redaction[node]:
                return  # an earlier redaction may still cover the later one

    def redaction_open(self, starts: Sequence[Start], length: int) -> bool:
        """Tell whether a redaction that begins inside the first ``length`` bytes is open or found."""
        return self.redacting and any(
            (node != DEAD and self.dfa.holds_redaction[node]) or (found and self._redacts(found))
            for node, found in starts[1:length]
        )

    def _drop_covered(self, starts: list[Start]) -> None:
        """Forget starts inside the first one's match: it is at least this long, so they cannot win."""
        if not starts or not starts[0][1]:
            return
        length = starts[0][1][-1][0]
        if self._redacts(starts[0][1]) or not self.redaction_open(starts, length):
            for index in range(1, min(length, len(starts))):
                starts[index] = (DEAD, ())
        else:
            return
        # Shorter matches matter only while a redaction could cut the longest one.
        starts[0] = (starts[0][0], starts[0][1][-1:])

    def settle_end(self, state: State) -> list[Op]:
        """Return what decides everything when the text ends in ``state``."""
        count = len(state.starts)
        ended: list[Start] = []
        for index, (node, found) in enumerate(state.starts):
            rule = self.dfa.accept_at_boundary[node] if node != DEAD and state.after_word else None
            ended.append((DEAD, found if rule is None else self.add_match(found, (count - index, rule))))
        return self.settle(ended)[1]
