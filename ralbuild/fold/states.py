"""What is undecided while text is read: the states of the rules, and how a symbol moves them.

A state has, for every undecided byte where a match can still begin, the automaton node of that match and
the longest one found so far. Reading a symbol moves every start; then the first start is settled as soon as
nothing can change it: it is copied when it can match no more, or its longest match is committed. So the
first start of a state always lives. A start is known by the bytes since it began, which settling what comes
before it leaves as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ralbuild.contract.transducer_table import COPY, STATE_BITS
from ralbuild.fold.patterns import Nfa
from ralbuild.fold.rules import Op, TextRule
from ralbuild.fold.subsets import DEAD, Dfa

STATE_BUDGET = 1 << STATE_BITS
"""States that a build may make, those among them that no text reaches."""

Match = tuple[int, int]
"""Length in bytes, index of the text rule."""
Start = tuple[int, int, Match | None]
"""Bytes since it began, its automaton node (DEAD when it goes no further), and the longest match found."""


class State(NamedTuple):
    """What is undecided; a tuple, for states are compared more often than anything else is done with them.

    Attributes:
        rules: number of the set of rules.
        after_word: a word character came last.
        starts: longest first; the first one is of the first undecided byte.
    """

    rules: int
    after_word: bool
    starts: tuple[Start, ...]

    @property
    def pending(self) -> int:
        """The number of undecided bytes."""
        return self.starts[0][0] if self.starts else 0


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
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
        return number

    def read(self, state: State, klass: int) -> tuple[int, list[Op]]:
        """Read one byte of class ``klass``: every start moves, a new one begins, the first is settled."""
        word = self.dfa.class_is_word[klass]
        ends = state.after_word and not word
        fresh: Start = (0, self.fresh[state.rules][state.after_word], None)
        moved = [self._move(start, klass, ends=ends) for start in state.starts]
        moved.append(self._move(fresh, klass, ends=False))
        starts, ops = self.settle([start for start in moved if start is not None], state.pending + 1)
        return self.number(state.rules, word, starts), ops

    def move_first(self, state: State, klass: int) -> Start | None:
        """Return what becomes of the first start alone; None when it is gone."""
        ends = state.after_word and not self.dfa.class_is_word[klass]
        return self._move(state.starts[0], klass, ends=ends)

    def _move(self, start: Start, klass: int, *, ends: bool) -> Start | None:
        """Move one start by one byte; ``ends`` says that a word ends before it."""
        length, node, found = start
        if node == DEAD:
            return None if found is None else (length + 1, DEAD, found)
        dfa = self.dfa
        if ends and (rule := dfa.accept_at_boundary[node]) is not None:
            found = longer(found, (length, rule))
        node = dfa.moves(node).get(klass, DEAD)
        if node != DEAD:
            word = dfa.class_is_word[klass]
            for rule in (dfa.accept[node], None if word else dfa.accept_at_boundary[node]):
                if rule is not None:
                    found = longer(found, (length + 1, rule))
            if not dfa.grows(node, after_word=word):
                node = DEAD
        return None if node == DEAD and found is None else (length + 1, node, found)

    # Decisions

    def settle(self, starts: list[Start], pending: int) -> tuple[tuple[Start, ...], list[Op]]:
        """Decide from the left whatever nothing can change any more of ``pending`` bytes."""
        ops: list[Op] = []
        at = 0
        while pending:
            length, node, found = starts[at] if at < len(starts) else (0, DEAD, None)
            if length < pending:
                ops.append((COPY, pending - length))
                pending = length
            elif node != DEAD or found is None:
                break
            else:
                size, rule = found
                ops += self.rules[rule].operations(size)
                pending -= size
                while at < len(starts) and starts[at][0] > pending:
                    at += 1
        if not pending:
            return (), ops
        first, *others = starts[at:]
        if first[2] is not None:
            # What begins inside the first start's match cannot win any more.
            left = pending - first[2][0]
            others = [start for start in others if start[0] <= left]
        return (first, *others), ops

    def settle_first(self, state: State) -> tuple[tuple[Start, ...], list[Op]]:
        """Decide what can be decided when the first start goes on no more."""
        pending, _, found = state.starts[0]
        ended: list[Start] = [] if found is None else [(pending, DEAD, found)]
        return self.settle([*ended, *state.starts[1:]], pending)

    def settle_end(self, state: State, *, word_follows: bool) -> list[Op]:
        """Return what decides everything when the text, or what these rules see of it, ends in ``state``."""
        ended: list[Start] = []
        for length, node, found in state.starts:
            if node != DEAD and state.after_word and not word_follows:
                rule = self.dfa.accept_at_boundary[node]
                found = found if rule is None else longer(found, (length, rule))
            if found is not None:
                ended.append((length, DEAD, found))
        return self.settle(ended, state.pending)[1]


def longer(found: Match | None, match: Match) -> Match:
    """Return the longer of two matches of one start; of one length, the rule that comes first."""
    if found is not None and found[0] == match[0]:
        return match[0], min(match[1], found[1])
    return match
