"""Rules to one deterministic transducer (contract/transducer.py), leftmost-longest, redaction first.

A state is what is pending: for every undecided byte, the automaton node of a match that would start
there and the matches it has found so far. Reading a byte moves every start; then the first start is
settled as soon as nothing can change it: it is copied when it can match no more, or its longest
match is committed. Redaction has precedence: a markup match waits while a redaction inside it is
open, and gives way to one that overlaps it.

Rows are built in linear time: when the first start dies, the row of a state is the row of its
failure state (the same text without its first byte) with what was decided put in front, so only
the classes on which the first start lives on are computed afresh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ralbuild.contract.transducer import (
    COPY,
    DROP,
    EMIT,
    EVENT,
    PROGRAM_LIMIT,
    STATE_BITS,
    write_transducer,
)
from ralbuild.errors import CompileError
from ralbuild.fold.patterns import DEAD, Dfa, Nfa
from ralbuild.fold.rules import REDACTION, Op, ProfileRules, TextRule

TABLE_BUDGET = 32 << 20
"""Bytes of the transition array; an A100's second-level cache holds it."""

STATE_BUDGET = 1 << 17
"""States that a build may make: a pattern that needs more takes too long to build and to fit a cache."""

Match = tuple[int, int]
"""Length in bytes, index of the text rule."""
Start = tuple[int, tuple[Match, ...]]
"""Automaton node of a match that begins here (DEAD when none can), and the matches found so far."""


@dataclass(frozen=True, slots=True)
class State:
    """What is undecided: profile, whether the last byte was a word byte, one start per pending byte."""

    profile: int
    after_word: bool
    starts: tuple[Start, ...]


@dataclass(frozen=True, slots=True)
class TransducerSize:
    """What the build report prints: table sizes and the longest hold-back in bytes."""

    states: int
    classes: int
    programs: int
    table_bytes: int
    max_held: int


class TransducerBuilder:
    """Builds one table for all profiles; each profile is a start state."""

    def __init__(self, profiles: tuple[ProfileRules, ...]) -> None:
        self.profiles = profiles
        # Numbered by rule id: of two matches of one length, the rule that comes first in the file wins.
        every = dict.fromkeys(rule for profile in profiles for rule in profile.texts)
        self.rules: list[TextRule] = sorted(every, key=lambda rule: rule.id)
        nfa = Nfa()
        first_of = {
            rule: nfa.add(number, rule.pattern, ignore_case=rule.ignore_case)
            for number, rule in enumerate(self.rules)
        }
        # After a word byte a whole word can only start with another byte.
        inside_of = {
            rule: nfa.without_word_start(first) if rule.whole_word else first
            for rule, first in first_of.items()
        }
        self.dfa = Dfa(nfa, [rule.level for rule in self.rules], [rule.whole_word for rule in self.rules])
        self.fresh = [
            {
                False: self.dfa.node(first_of[rule] for rule in profile.texts),
                True: self.dfa.node(inside_of[rule] for rule in profile.texts),
            }
            for profile in profiles
        ]
        self.programs: list[tuple[Op, ...]] = []
        self._program_ids: dict[tuple[Op, ...], int] = {}
        self._joined: dict[tuple[tuple[Op, ...], int], int] = {}
        self._states: list[State] = []
        self._state_ids: dict[State, int] = {}
        self._rows: dict[int, list[tuple[int, int]]] = {}

    # Programs

    def _program(self, ops: Iterable[Op]) -> int:
        merged: list[Op] = []
        for kind, arg in ops:
            if kind == EMIT and not arg:
                continue
            if kind in (COPY, DROP) and merged and merged[-1][0] == kind:
                merged[-1] = (kind, int(merged[-1][1]) + int(arg))
            else:
                merged.append((kind, arg))
        key = tuple(merged)
        number = self._program_ids.get(key)
        if number is None:
            number = self._program_ids[key] = len(self.programs)
            self.programs.append(key)
        return number

    def _join(self, prefix: tuple[Op, ...], program: int) -> int:
        key = (prefix, program)
        number = self._joined.get(key)
        if number is None:
            number = self._joined[key] = self._program((*prefix, *self.programs[program]))
        return number

    # One byte

    def _state(self, profile: int, after_word: bool, starts: tuple[Start, ...]) -> int:
        """Return the number of a state; states are compared once, here."""
        state = State(profile, after_word, starts)
        number = self._state_ids.get(state)
        if number is None:
            number = self._state_ids[state] = len(self._states)
            self._states.append(state)
            self._check_budget(len(self._states))
        return number

    def _read(self, state: State, klass: int) -> tuple[int, list[Op]]:
        """Read one byte of class ``klass``: every start moves, a new one begins, the first is settled."""
        boundary = not self.dfa.class_is_word[klass]
        count = len(state.starts)
        ends = boundary and state.after_word
        moved = [
            self._move(node, found, count - index, klass, ends=ends)
            for index, (node, found) in enumerate(state.starts)
        ]
        moved.append(self._move(self.fresh[state.profile][state.after_word], (), 0, klass, ends=False))
        starts, ops = self._settle(moved)
        return self._state(state.profile, not boundary, starts), ops

    def _move(self, node: int, found: tuple[Match, ...], length: int, klass: int, *, ends: bool) -> Start:
        """Move one start by one byte; ``ends`` says that a word ends before it."""
        if node == DEAD:
            return DEAD, found
        dfa = self.dfa
        if ends and (rule := dfa.accept_at_boundary[node]) is not None:
            found = self._found(found, (length, rule))
        node = dfa.moves(node).get(klass, DEAD)
        word = dfa.class_is_word[klass]
        if node != DEAD:
            for rule in (dfa.accept[node], None if word else dfa.accept_at_boundary[node]):
                if rule is not None:
                    found = self._found(found, (length + 1, rule))
        if found and self._redacts(found):
            node = dfa.redaction_only(node)
        return (node if dfa.grows(node, after_word=word) else DEAD), found

    def _found(self, found: tuple[Match, ...], match: Match) -> tuple[Match, ...]:
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

    def _settle(self, starts: list[Start]) -> tuple[tuple[Start, ...], list[Op]]:
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
            if not self._redacts(found) and self._redaction_open(starts, length):
                break
            ops += self.rules[rule].operations(length)
            del starts[:length]
            self._cut_markup(starts)
        self._drop_covered(starts)
        return tuple(starts), ops

    def _cut_markup(self, starts: list[Start]) -> None:
        """Where a redaction is certain, take back markup that starts before it and reaches into it."""
        for index, (node, found) in enumerate(starts):
            if found and self._redacts(found):
                for earlier in range(index):
                    kept = tuple(match for match in starts[earlier][1] if match[0] <= index - earlier)
                    starts[earlier] = (DEAD, kept)
                return
            if node != DEAD and self.dfa.holds_redaction[node]:
                return  # an earlier redaction may still cover the later one

    def _redaction_open(self, starts: list[Start], length: int) -> bool:
        """Tell whether a redaction that begins inside the first ``length`` bytes is open or found."""
        return any(
            (node != DEAD and self.dfa.holds_redaction[node]) or (found and self._redacts(found))
            for node, found in starts[1:length]
        )

    def _drop_covered(self, starts: list[Start]) -> None:
        """Forget starts inside the first one's match: it is at least this long, so they cannot win."""
        if not starts or not starts[0][1]:
            return
        length = starts[0][1][-1][0]
        if self._redacts(starts[0][1]) or not self._redaction_open(starts, length):
            for index in range(1, min(length, len(starts))):
                starts[index] = (DEAD, ())
        else:
            return
        # Shorter matches matter only while a redaction could cut the longest one.
        starts[0] = (starts[0][0], starts[0][1][-1:])

    # Rows

    def row(self, number: int) -> list[tuple[int, int]]:
        """Return, per byte class, the next state and the program to run."""
        known = self._rows.get(number)
        if known is not None:
            return known
        state = self._states[number]
        if state.starts and not state.starts[0][1] and self._dies_silently(state):
            row = self._row_from_failure(state)
        else:
            row = [self._entry(state, klass) for klass in range(self.dfa.classes)]
        self._rows[number] = row
        return row

    def _dies_silently(self, state: State) -> bool:
        """Tell whether the first start, where it cannot go on, leaves no match behind."""
        node = state.starts[0][0]
        return node != DEAD and not (state.after_word and self.dfa.accept_at_boundary[node] is not None)

    def _row_from_failure(self, state: State) -> list[tuple[int, int]]:
        rest, ops = self._settle(list(state.starts[1:]))
        failure = self.row(self._state(state.profile, state.after_word, rest))
        prefix: tuple[Op, ...] = ((COPY, 1), *ops)
        row = [(target, self._join(prefix, program)) for target, program in failure]
        for klass in self.dfa.moves(state.starts[0][0]):
            row[klass] = self._entry(state, klass)
        return row

    def _entry(self, state: State, klass: int) -> tuple[int, int]:
        target, ops = self._read(state, klass)
        return target, self._program(ops)

    def final(self, state: State) -> int:
        """Return the program that decides everything when the text ends in ``state``."""
        count = len(state.starts)
        ended: list[Start] = []
        for index, (node, found) in enumerate(state.starts):
            rule = self.dfa.accept_at_boundary[node] if node != DEAD and state.after_word else None
            ended.append((DEAD, found if rule is None else self._found(found, (count - index, rule))))
        _, ops = self._settle(ended)
        profile = self.profiles[state.profile]
        if profile.append:
            ops += [(EMIT, profile.append), (EVENT, profile.append_id)]
        return self._program(ops)

    # The table

    def build(self, rule_count: int) -> tuple[bytes, TransducerSize]:
        """Return the serialised table and its size.

        Raises:
            CompileError: when the rules need more than the budget; names the heaviest.
        """
        self._program([(COPY, 1)])  # number 0 by contract
        numbers: dict[int, int] = {}
        order: list[int] = []

        def place(state: int) -> int:
            found = numbers.get(state)
            if found is None:
                found = numbers[state] = len(order)
                order.append(state)
            return found

        starts = [place(self._state(index, False, ())) for index in range(len(self.profiles))]
        rows: list[list[tuple[int, int]]] = []
        while len(rows) < len(order):
            rows.append([(place(target), program) for target, program in self.row(order[len(rows)])])
        states = [self._states[number] for number in order]
        finals = [self.final(state) for state in states]
        return self._write(rows, finals, starts, max(len(s.starts) for s in states), rule_count)

    def _check_budget(self, states: int) -> None:
        size = states * self.dfa.classes * 4
        if size <= TABLE_BUDGET and states <= STATE_BUDGET and len(self.programs) < PROGRAM_LIMIT:
            return
        heavy = Counter(self.dfa.nfa.rule).most_common(3)
        names = ", ".join(repr(self.rules[number].shown[:40]) for number, _ in heavy)
        raise CompileError(
            f"the rules need too large a table: {states} states of {STATE_BUDGET}, "
            f"{size >> 20} MiB of {TABLE_BUDGET >> 20}, {len(self.programs)} programs of {PROGRAM_LIMIT}",
            place="fold",
            hint=f"shorten or drop rules; the heaviest are {names}",
        )

    def _write(
        self,
        rows: list[list[tuple[int, int]]],
        finals: list[int],
        starts: list[int],
        max_held: int,
        rule_count: int,
    ) -> tuple[bytes, TransducerSize]:
        used = {0: 0}  # programs are renumbered in order of first use; some served only as prefixes
        for program in [program for row in rows for _, program in row] + finals:
            used.setdefault(program, len(used))
        strings: dict[bytes, int] = {}
        programs = [
            [
                (kind, strings.setdefault(arg, len(strings)) if isinstance(arg, bytes) else arg)
                for kind, arg in self.programs[program]
            ]
            for program in used
        ]
        data = write_transducer(
            cls=self.dfa.cls,
            rows=[[state | used[program] << STATE_BITS for state, program in row] for row in rows],
            final=[used[program] for program in finals],
            programs=programs,
            strings=list(strings),
            starts=starts,
            max_held=max_held,
            rules=rule_count,
        )
        table_bytes = len(rows) * self.dfa.classes * 4
        return data, TransducerSize(len(rows), self.dfa.classes, len(programs), table_bytes, max_held)
