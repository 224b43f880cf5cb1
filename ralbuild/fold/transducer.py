"""Rules to one deterministic transducer (contract/transducer.py), leftmost-longest, redaction first.

Rows are built in linear time: when the first start of a state dies, its row is the row of its failure
state (the same text without its first byte) with what was decided put in front; when a word ends, it
is the row of the empty state behind the match. Only the symbols on which the first start lives on are
looked at one by one, and there, too, the failure state mostly knows what becomes of the other starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ralbuild.contract.transducer_table import (
    COPY,
    DROP,
    EMIT,
    EVENT,
    NONE,
    PROGRAM_LIMIT,
    STATE_BITS,
    Front,
    write_transducer,
)
from ralbuild.errors import CompileError
from ralbuild.fold.kinds import CHECKS, KindTable, build_kinds
from ralbuild.fold.modes import MarkerTable, Mode, build_markers, expand_modes
from ralbuild.fold.patterns import DEAD
from ralbuild.fold.rules import REDACTION, Op, ProfileRules
from ralbuild.fold.states import DEAD_START, STATE_BUDGET, RuleStates, Start, State, StateLimitError
from ralbuild.fold.unicode import word_table

TABLE_BUDGET = 32 << 20
"""Bytes of the transition array; an A100's second-level cache holds it."""
UNFINISHED = 3
"""Bytes of a character that is not complete."""


@dataclass(frozen=True, slots=True)
class Row:
    """A state's row by symbol class: the next state, and which of ``programs`` to run."""

    targets: list[int]
    which: list[int]
    programs: list[int]


@dataclass(frozen=True, slots=True)
class TransducerSize:
    """What the build report prints: table sizes and the longest hold-back in bytes.

    Attributes:
        table_bytes: of the transition array of the rules.
        front_bytes: of the automata of markers and kinds.
    """

    states: int
    classes: int
    programs: int
    table_bytes: int
    front_bytes: int
    max_held: int


class TransducerBuilder:
    """Builds one table for all profiles; each profile is a first mode."""

    def __init__(self, profiles: tuple[ProfileRules, ...]) -> None:
        self.profiles = profiles
        self.modes, self.starts = expand_modes(profiles)
        self.sets = tuple(dict.fromkeys(mode.texts for mode in self.modes if not mode.dropped))
        self.dropping = len(self.sets)  # the state that forgets everything belongs to no set
        self.reader = RuleStates(self.sets)
        self.literal = all(isinstance(rule.pattern, bytes) for rule in self.reader.rules)
        self.ends_word = [k for k, word in enumerate(self.reader.dfa.class_is_word) if not word]
        self.programs: list[tuple[Op, ...]] = []
        self._copies: list[bool] = []
        """Per program: it only copies."""
        self._program_ids: dict[tuple[Op, ...], int] = {}
        self._joined: dict[tuple[Op, ...], dict[int, int]] = {}
        self._rows: dict[int, Row] = {}
        self._program([(COPY, 1)])  # number 0 by contract

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
            self._copies.append(all(kind == COPY for kind, _ in key))
        return number

    def _join(self, prefix: tuple[Op, ...], programs: Iterable[int]) -> list[int]:
        """Return the programs that do ``prefix`` first."""
        if not prefix:
            return list(programs)
        known = self._joined.setdefault(prefix, {})
        out = []
        for program in programs:
            number = known.get(program)
            if number is None:
                number = known[program] = self._program((*prefix, *self.programs[program]))
            out.append(number)
        return out

    # Rows

    def row(self, number: int) -> Row:
        """Return the row of a state."""
        known = self._rows.get(number)
        if known is not None:
            return known
        state = self.reader.states[number]
        if state.rules == self.dropping:
            row = self._same_everywhere(number, self._program([(DROP, 1)]))
        elif state.starts and (self.literal or self._can_commit(state)):
            row = self._row_from_failure(state)
        else:
            row = self._same_everywhere(number, 0)
            row = self._with_entries(row, state, range(self.reader.dfa.classes))
        self._rows[number] = row
        return row

    def _same_everywhere(self, target: int, program: int) -> Row:
        classes = self.reader.dfa.classes
        return Row([target] * classes, [0] * classes, [program])

    def _can_commit(self, state: State) -> bool:
        """Tell whether what the first start has matched is certain as soon as it can match no more.

        Else the row comes from a state that no text may ever reach. Among literals these are few.
        """
        (node, found), reader = state.starts[0], self.reader
        if node == DEAD or not found:
            return node != DEAD
        length, rule = found[-1]
        return reader.rules[rule].level == REDACTION or not reader.redaction_open(state.starts, length)

    def _row_from_failure(self, state: State) -> Row:
        """Return a row whose first living start, where it dies, leaves what it has matched so far."""
        reader, dfa, starts = self.reader, self.reader.dfa, state.starts
        index = next(index for index, (node, _) in enumerate(starts) if node != DEAD)
        node, found = starts[index]
        rest, ops = reader.settle([*starts[:index], (DEAD, found), *starts[index + 1 :]])
        failure = self.row(reader.number(state.rules, state.after_word, rest))
        row = self._behind(tuple(ops), failure)
        own: Iterable[int] = dfa.moves(node)
        rule = dfa.accept_at_boundary[node] if state.after_word else None
        if rule is not None:
            rule = reader.add_match(found, (len(starts) - index, rule))[-1][1]  # another may match the same
            certain = reader.rules[rule].level == REDACTION or not reader.redaction_open(starts, len(starts))
            if index or not certain:
                return self._with_entries(row, state, sorted({*own, *self.ends_word}))
            self._put_word_end(row, state, rule)
        plain = not index and not found and all(kind == COPY for kind, _ in ops)
        return self._with_entries(row, state, own, failure if plain else None)

    def _behind(self, prefix: tuple[Op, ...], row: Row) -> Row:
        return Row(row.targets.copy(), row.which.copy(), self._join(prefix, row.programs))

    def _put_word_end(self, row: Row, state: State, rule: int) -> None:
        """Put in the entries on which a word ends, and all that is pending is the match of ``rule``."""
        empty = self.row(self.reader.number(state.rules, True, ()))
        match = self._behind(self.reader.rules[rule].operations(len(state.starts)), empty)
        for klass in self.ends_word:
            row.targets[klass] = match.targets[klass]
            row.which[klass] = match.which[klass] + len(row.programs)
        row.programs.extend(match.programs)

    def _with_entries(
        self, row: Row, state: State, classes: Iterable[int], failure: Row | None = None
    ) -> Row:
        """Compute the entries of ``classes``, and leave out programs that nothing runs any more."""
        for klass in classes:
            entry = self._grown(state, klass, failure) if failure else None
            target, ops = entry or self.reader.read(state, klass)
            row.targets[klass] = target
            row.which[klass] = len(row.programs)
            row.programs.append(self._program(ops))
        used = {old: new for new, old in enumerate(dict.fromkeys(row.which))}
        return Row(row.targets, [used[old] for old in row.which], [row.programs[old] for old in used])

    def _grown(self, state: State, klass: int, failure: Row) -> tuple[int, list[Op]] | None:
        """Return an entry made of the first start's move and the failure state's entry for the others.

        None when the others match something, for then their matches and the first start's meet.
        """
        reader = self.reader
        if not self._copies[failure.programs[failure.which[klass]]]:
            return None
        others = reader.states[failure.targets[klass]].starts
        if any(found for _, found in others):
            return None
        count = len(state.starts)
        first = reader.move_first(state, klass)
        if first[0] == DEAD:
            return None
        starts: tuple[Start, ...] = (first, *(DEAD_START,) * (count - len(others)), *others)
        ops: list[Op] = []
        if first[1]:
            starts, ops = reader.settle(list(starts))
        return reader.number(state.rules, reader.dfa.class_is_word[klass], starts), ops

    # The table

    def build(self, rule_count: int) -> tuple[bytes, TransducerSize]:
        """Return the serialised table and its size.

        Raises:
            CompileError: when the rules need more than the budget; names the heaviest.
        """
        try:
            order, rows = self._reachable()
        except StateLimitError:
            raise self._over_budget(STATE_BUDGET + 1) from None
        states = [self.reader.states[number] for number in order]
        finals = [
            self._program([] if state.rules == self.dropping else self.reader.settle_end(state))
            for state in states
        ]
        return self._write(order, rows, finals, max(len(state.starts) for state in states), rule_count)

    def _first_state(self, mode: Mode) -> int:
        rules = self.dropping if mode.dropped else self.sets.index(mode.texts)
        return self.reader.number(rules, False, ())

    def _reachable(self) -> tuple[list[int], list[Row]]:
        """Return the states that the first states lead to, breadth first, and their rows."""
        order = list(dict.fromkeys(self._first_state(mode) for mode in self.modes))
        seen = set(order)
        rows: list[Row] = []
        while len(rows) < len(order):
            row = self.row(order[len(rows)])
            rows.append(row)
            for target in dict.fromkeys(row.targets):
                if target not in seen:
                    seen.add(target)
                    order.append(target)
            if len(order) * self.reader.dfa.classes * 4 > TABLE_BUDGET or len(self.programs) >= 1 << 20:
                raise self._over_budget(len(order))
        return order, rows

    def _over_budget(self, states: int) -> CompileError:
        rules = self.reader.rules
        heavy = Counter(self.reader.dfa.nfa.rule).most_common(3)
        names = ", ".join(repr(rules[number].shown[:40]) for number, _ in heavy)
        size = states * self.reader.dfa.classes * 4
        return CompileError(
            f"the rules need too large a table: {states} states of {STATE_BUDGET}, "
            f"{size >> 20} MiB of {TABLE_BUDGET >> 20}, {len(self.programs)} programs of {PROGRAM_LIMIT}",
            place="fold",
            hint=f"shorten or drop rules; the heaviest are {names}",
        )

    def _write(
        self, order: list[int], rows: list[Row], finals: list[int], held: int, rule_count: int
    ) -> tuple[bytes, TransducerSize]:
        numbers = np.zeros(len(self.reader.states), np.int64)
        numbers[order] = np.arange(len(order))
        run = np.array([[row.programs[place] for place in row.which] for row in rows])
        ends = [self._end_program(mode) for mode in self.modes]
        # Programs are renumbered in order of first use; some served only as prefixes.
        named = np.concatenate([[0], run.ravel(), finals, [end for end in ends if end is not None]])
        distinct, firsts = np.unique(named, return_index=True)
        used = distinct[np.argsort(firsts)].astype(np.int64)
        if len(used) > PROGRAM_LIMIT:
            raise self._over_budget(len(order))
        new = np.zeros(len(self.programs), np.int64)
        new[used] = np.arange(len(used))
        targets = numbers[np.array([row.targets for row in rows])]
        strings: dict[bytes, int] = {}
        programs = [
            [
                (kind, strings.setdefault(arg, len(strings)) if isinstance(arg, bytes) else arg)
                for kind, arg in self.programs[program]
            ]
            for program in used.tolist()
        ]
        kinds, markers = build_kinds(self.modes), build_markers(self.modes)
        for kind in kinds.rules:
            strings.setdefault(kind.replacement, len(strings))
        modes = tuple(
            (
                _or_none(markers.starts[index]),
                _or_none(kinds.starts[index]),
                int(numbers[self._first_state(mode)]),
                _or_none(None if (end := ends[index]) is None else int(new[end])),
            )
            for index, mode in enumerate(self.modes)
        )
        longest = held + kinds.longest + max(0, markers.longest - 1) + UNFINISHED
        data = write_transducer(
            cls=self.reader.dfa.cls,
            trans=(targets | new[run] << STATE_BITS).astype("<u4").tobytes(),
            final=new[finals].tolist(),
            programs=programs,
            strings=list(strings),
            starts=self.starts,
            front=_front(modes, markers, kinds, strings),
            words=word_table(),
            max_held=longest,
            rules=rule_count,
        )
        classes = self.reader.dfa.classes
        front_bytes = 4 * (len(markers.next) + len(kinds.next))
        return data, TransducerSize(
            len(rows), classes, len(programs), len(rows) * classes * 4, front_bytes, longest
        )

    def _end_program(self, mode: Mode) -> int | None:
        """Return the program that writes what a profile appends to any text."""
        profile = self.profiles[mode.profile]
        if not profile.append:
            return None
        return self._program([(EMIT, profile.append), (EVENT, profile.append_id)])


def _or_none(value: int | None) -> int:
    return NONE if value is None else value


def _front(
    modes: tuple[tuple[int, int, int, int], ...],
    markers: MarkerTable,
    kinds: KindTable,
    strings: dict[bytes, int],
) -> Front:
    return Front(
        modes=modes,
        mark_class=markers.classes,
        mark_next=markers.next,
        mark_actions=markers.actions,
        markers=markers.markers,
        kind_class=kinds.classes,
        kind_next=kinds.next,
        kind_final=kinds.final,
        accepts=kinds.accepts,
        kinds=tuple((rule.id, CHECKS.get(rule.kind, 0), strings[rule.replacement]) for rule in kinds.rules),
    )
