"""What is undecided while text is read: the states of the rules, and how a symbol moves them.

A state has, for every undecided byte, the automaton node of a match that would start there and the
longest match it has found so far. Reading a symbol moves every start; then the first start is settled as
soon as nothing can change it: it is copied when it can match no more, or its longest match is committed.
So the first start of a state always lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.contract.transducer_table import COPY, STATE_BITS
from ralbuild.fold.patterns import DEAD, Dfa, Nfa
from ralbuild.fold.rules import Op, TextRule

STATE_BUDGET = 1 << STATE_BITS
"""States that a build may make, those among them that no text reaches."""

Match = tuple[int, int]
"""Length in bytes, index of the text rule."""
Start = tuple[int, Match | None]
"""Automaton node of a match that begins here (DEAD when none can), and the longest match found so far."""

DEAD_START: Start = (DEAD, None)


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
        self.dfa = Dfa(nfa, [rule.whole_word for rule in self.rules])
        self.fresh = [
            {
                False: self.dfa.node(first_of[rule] for rule in texts),
                True: self.dfa.node(inside_of[rule] for rule in texts),
            }
            for texts in sets
        ]
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}

    def number(self, rules: int, after_word: bool, starts: tuple[Start, ...]) -> int:
        """Return the number of a state; states are compared once, here."""
        state = State(rules, after_word, starts)
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.states)
            self.states.append(state)
        return number

    def read(self, state: State, klass: int) -> tuple[int, list[Op]]:
        """Read one byte of class ``klass``: every start moves, a new one begins, the first is settled."""
        boundary = not self.dfa.class_is_word[klass]
        count = len(state.starts)
        ends = boundary and state.after_word
        moved = [
            start if start[0] == DEAD else self._move(start, count - index, klass, ends=ends)
            for index, start in enumerate(state.starts)
        ]
        fresh = self.fresh[state.rules][state.after_word]
        moved.append(self._move((fresh, None), 0, klass, ends=False))
        starts, ops = self.settle(moved)
        return self.number(state.rules, not boundary, starts), ops

    def move_first(self, state: State, klass: int) -> Start:
        """Return what becomes of the first start alone."""
        ends = state.after_word and not self.dfa.class_is_word[klass]
        return self._move(state.starts[0], len(state.starts), klass, ends=ends)

    def _move(self, start: Start, length: int, klass: int, *, ends: bool) -> Start:
        """Move one start by one byte; ``ends`` says that a word ends before it."""
        node, found = start
        if node == DEAD:
            return start
        dfa = self.dfa
        if ends and (rule := dfa.accept_at_boundary[node]) is not None:
            found = longer(found, (length, rule))
        node = dfa.moves(node).get(klass, DEAD)
        word = dfa.class_is_word[klass]
        if node != DEAD:
            for rule in (dfa.accept[node], None if word else dfa.accept_at_boundary[node]):
                if rule is not None:
                    found = longer(found, (length + 1, rule))
        return (node if dfa.grows(node, after_word=word) else DEAD), found

    # Decisions

    def settle(self, starts: list[Start]) -> tuple[tuple[Start, ...], list[Op]]:
        """Decide from the left whatever nothing can change any more."""
        ops: list[Op] = []
        while starts:
            node, found = starts[0]
            if node != DEAD:
                break
            if found is None:
                dead = next((i for i, start in enumerate(starts) if start != DEAD_START), len(starts))
                ops.append((COPY, dead))
                del starts[:dead]
                continue
            length, rule = found
            ops += self.rules[rule].operations(length)
            del starts[:length]
        if starts and (found := starts[0][1]) is not None:
            # What begins inside the first start's match cannot win any more.
            for index in range(1, min(found[0], len(starts))):
                starts[index] = DEAD_START
        return tuple(starts), ops

    def settle_end(self, state: State, *, word_follows: bool) -> list[Op]:
        """Return what decides everything when the text, or what these rules see of it, ends in ``state``."""
        count = len(state.starts)
        ended: list[Start] = []
        for index, (node, found) in enumerate(state.starts):
            ends = node != DEAD and state.after_word and not word_follows
            rule = self.dfa.accept_at_boundary[node] if ends else None
            ended.append((DEAD, found if rule is None else longer(found, (count - index, rule))))
        return self.settle(ended)[1]


def longer(found: Match | None, match: Match) -> Match:
    """Return the longer of two matches of one start; of one length, the rule that comes first."""
    if found is not None and found[0] == match[0]:
        return match[0], min(match[1], found[1])
    return match
