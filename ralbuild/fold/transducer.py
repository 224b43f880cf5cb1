"""Rules to one table (contract/transducer.py): markup as a deterministic transducer, leftmost-longest.

Rows are built in linear time: when the first start of a state dies, its row is the row of its failure
state (the same text without its first byte) with what was decided put in front; when a word ends, it
is the row of the empty state behind the match. Only the symbols on which the first start lives on are
looked at one by one, and there, too, the failure state mostly knows what becomes of the other starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ralbuild.contract.bundle import Rule
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
from ralbuild.fold.budget import Budget
from ralbuild.fold.modes import MarkerTable, Mode, build_markers, expand_modes
from ralbuild.fold.redactions import RedactionTable, build_redactions
from ralbuild.fold.rules import Op, ProfileRules
from ralbuild.fold.states import STATE_BUDGET, RuleStates, State, longer
from ralbuild.fold.subsets import DEAD
from ralbuild.fold.unicode import word_table

UNFINISHED = 3
"""Bytes of a character that is not complete."""


@dataclass(frozen=True, slots=True)
class Row:
    """A state's row by symbol class: the next state, and which of ``programs`` (all different) to run."""

    targets: npt.NDArray[np.int32]
    which: npt.NDArray[np.intp]
    programs: list[int]


@dataclass(frozen=True, slots=True)
class TransducerSize:
    """What the build report prints: table sizes and the longest hold-back in bytes.

    Attributes:
        table_bytes: of the transition array of the rules.
        front_bytes: of the automata of markers and redactions.
    """

    states: int
    classes: int
    programs: int
    table_bytes: int
    front_bytes: int
    max_held: int


class TransducerBuilder:
    """Builds one table for all profiles; each profile is a first mode.

    Args:
        profiles: what holds together.
        rules: all rules by their ids, for messages.
    """

    def __init__(self, profiles: tuple[ProfileRules, ...], rules: Sequence[Rule] = ()) -> None:
        self.profiles = profiles
        self.modes, self.starts = expand_modes(profiles)
        self.sets = tuple(dict.fromkeys(mode.texts for mode in self.modes if not mode.dropped))
        self.dropping = len(self.sets)  # the state that forgets everything belongs to no set
        self.reader = RuleStates(self.sets)
        self.budget = Budget(rules)
        self.names = [self.budget.name(rule) for rule in self.reader.rules]
        self.ends_word = ~np.array(self.reader.dfa.class_is_word)
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

    def _join(self, prefix: Iterable[Op], programs: Iterable[int]) -> list[int]:
        """Return the programs that do ``prefix`` first; different ones stay different."""
        ops = tuple(prefix)
        known = self._joined.setdefault(ops, {})
        out = []
        for program in programs:
            number = known.get(program)
            if number is None:
                number = known[program] = self._program((*ops, *self.programs[program]))
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
        elif state.starts:
            row = self._row_from_failure(state)
        else:
            row = self._same_everywhere(number, 0)
            row = self._with_entries(row, state, range(self.reader.dfa.classes))
        self._rows[number] = row
        return row

    def _same_everywhere(self, target: int, program: int) -> Row:
        classes = self.reader.dfa.classes
        return Row(np.full(classes, target, np.int32), np.zeros(classes, np.intp), [program])

    def _row_from_failure(self, state: State) -> Row:
        """Return a row whose first start, where it dies, leaves what it has matched so far."""
        reader, dfa = self.reader, self.reader.dfa
        pending, node, found = state.starts[0]
        rest, ops = reader.settle_first(state)
        failure = self.row(reader.number(state.rules, state.after_word, rest))
        row = Row(failure.targets.copy(), failure.which.copy(), self._join(ops, failure.programs))
        rule = dfa.accept_at_boundary[node] if state.after_word else None
        if rule is not None:
            rule = longer(found, (pending, rule))[1]  # another may match the same
            self._put_word_end(row, state, rule)
        plain = found is None and all(kind == COPY for kind, _ in ops)
        return self._with_entries(row, state, dfa.moves(node), failure if plain else None)

    def _put_word_end(self, row: Row, state: State, rule: int) -> None:
        """Put in the entries on which a word ends, and all that is pending is the match of ``rule``."""
        empty = self.row(self.reader.number(state.rules, True, ()))
        match = self._join(self.reader.rules[rule].operations(state.pending), empty.programs)
        place = np.array([_place(row.programs, program) for program in match])
        np.copyto(row.targets, empty.targets, where=self.ends_word)
        np.copyto(row.which, place[empty.which], where=self.ends_word)

    def _with_entries(
        self, row: Row, state: State, classes: Iterable[int], failure: Row | None = None
    ) -> Row:
        """Compute the entries of ``classes``, and leave out programs that nothing runs any more."""
        for klass in classes:
            entry = self._grown(state, klass, failure) if failure else None
            target, ops = entry or self.reader.read(state, klass)
            row.targets[klass] = target
            row.which[klass] = _place(row.programs, self._program(ops))
        used = sorted(set(row.which.tolist()))
        if len(used) == len(row.programs):
            return row
        new = np.zeros(len(row.programs), np.intp)
        new[used] = np.arange(len(used))
        return Row(row.targets, new[row.which], [row.programs[place] for place in used])

    def _grown(self, state: State, klass: int, failure: Row) -> tuple[int, list[Op]] | None:
        """Return an entry made of the first start's move and the failure state's entry for the others.

        None when the others match something, for then their matches and the first start's meet.
        """
        reader = self.reader
        if not self._copies[failure.programs[failure.which[klass]]]:
            return None
        others = reader.states[failure.targets[klass]].starts
        if any(start[2] for start in others):
            return None
        first = reader.move_first(state, klass)
        if first is None or first[1] == DEAD:
            return None
        starts, ops = reader.settle([first, *others], first[0])
        return reader.number(state.rules, reader.dfa.class_is_word[klass], starts), ops

    # The table

    def build(self, rule_count: int) -> tuple[bytes, TransducerSize]:
        """Return the serialised table and its size.

        Raises:
            CompileError: when the rules need more than the budget; names the heaviest.
        """
        redactions = build_redactions(self.modes, self.budget)
        order, rows = self._reachable()
        return self._write(order, rows, redactions, rule_count)

    def _first_state(self, mode: Mode, *, after_word: bool = False) -> int:
        rules = self.dropping if mode.dropped else self.sets.index(mode.texts)
        return self.reader.number(rules, after_word, ())

    def _reachable(self) -> tuple[list[int], list[Row]]:
        """Return the states that the first states lead to, breadth first, and their rows.

        Behind each first state comes that of a text that goes on after a word character.
        """
        firsts = [self._first_state(mode, after_word=word) for mode in self.modes for word in (False, True)]
        order = list(dict.fromkeys(firsts))
        seen = set(order)
        rows: list[Row] = []
        while len(rows) < len(order):
            row = self.row(order[len(rows)])
            rows.append(row)
            targets = row.targets.tolist()
            if new := set(targets) - seen:
                seen |= new
                order += [target for target in dict.fromkeys(targets) if target in new]
            self.budget.check(self.reader.dfa, self.names, states=len(order), most=STATE_BUDGET)
            if len(self.reader.states) > STATE_BUDGET or len(self.programs) >= 1 << 20:
                raise self._over_budget()
        return order, rows

    def _over_budget(self) -> CompileError:
        found = f"{len(self.reader.states)} states of {STATE_BUDGET}, "
        found += f"{len(self.programs)} programs of {PROGRAM_LIMIT}"
        return self.budget.exceeded(self.reader.dfa, self.names, found)

    def _write(
        self, order: list[int], rows: list[Row], redactions: RedactionTable, rule_count: int
    ) -> tuple[bytes, TransducerSize]:
        reader = self.reader
        states = [reader.states[number] for number in order]
        finals = np.array(
            [[self._final(state, word_follows=follows) for follows in (False, True)] for state in states]
        )
        ends = [self._end_program(mode) for mode in self.modes]
        offsets = np.cumsum([0, *(len(row.programs) for row in rows[:-1])])
        every = np.array([program for row in rows for program in row.programs])
        run = every[np.stack([row.which for row in rows]) + offsets[:, None]]
        # Programs are renumbered in order of first use; some served only as prefixes.
        used = self._used(
            run.ravel(), finals.ravel(), np.array([end for end in ends if end is not None], int)
        )
        new = np.zeros(len(self.programs), np.int64)
        new[used] = np.arange(len(used))
        numbers = np.zeros(len(reader.states), np.int64)
        numbers[order] = np.arange(len(order))
        targets = numbers[np.stack([row.targets for row in rows])]
        strings: dict[bytes, int] = {}
        programs = [
            [
                (kind, strings.setdefault(arg, len(strings)) if isinstance(arg, bytes) else arg)
                for kind, arg in self.programs[program]
            ]
            for program in used.tolist()
        ]
        markers = build_markers(self.modes)
        for _, replacement in redactions.rows:
            strings.setdefault(replacement, len(strings))
        modes = tuple(
            (
                _or_none(markers.starts[index]),
                redact,
                int(numbers[self._first_state(mode)]),
                _or_none(None if (end := ends[index]) is None else int(new[end])),
                row,
            )
            for index, mode in enumerate(self.modes)
            for redact, row in [redactions.starts[index] or (NONE, 0)]
        )
        held = max(state.pending for state in states)
        longest = held + redactions.longest + max(0, markers.longest - 1) + UNFINISHED
        trans = (targets | new[run] << STATE_BITS).astype("<u4")
        data = write_transducer(
            cls=reader.dfa.cls,
            trans=trans.tobytes(),
            final=new[finals].tolist(),
            programs=programs,
            strings=list(strings),
            starts=self.starts,
            front=_front(modes, markers, redactions, strings),
            words=word_table(),
            max_held=longest,
            rules=rule_count,
        )
        front_bytes = 4 * len(markers.next) + redactions.next.nbytes
        return data, TransducerSize(
            len(rows), reader.dfa.classes, len(programs), trans.nbytes, front_bytes, longest
        )

    def _used(self, *named: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the programs that are named, in order of first use, program 0 before them."""
        distinct, firsts = np.unique(np.concatenate([np.zeros(1, np.int64), *named]), return_index=True)
        if len(distinct) > PROGRAM_LIMIT:
            raise self._over_budget()
        return distinct[np.argsort(firsts)]

    def _final(self, state: State, *, word_follows: bool) -> int:
        if state.rules == self.dropping:
            return self._program([])
        return self._program(self.reader.settle_end(state, word_follows=word_follows))

    def _end_program(self, mode: Mode) -> int | None:
        """Return the program that writes what a profile appends to any text."""
        profile = self.profiles[mode.profile]
        if not profile.append:
            return None
        return self._program([(EMIT, profile.append), (EVENT, profile.append_id)])


def _place(programs: list[int], program: int) -> int:
    """Return where ``program`` stands in a row's programs, at their end when it is new."""
    if program not in programs:
        programs.append(program)
    return programs.index(program)


def _or_none(value: int | None) -> int:
    return NONE if value is None else value


def _front(
    modes: tuple[tuple[int, int, int, int, int], ...],
    markers: MarkerTable,
    redactions: RedactionTable,
    strings: dict[bytes, int],
) -> Front:
    return Front(
        modes=modes,
        mark_class=markers.classes,
        mark_next=markers.next,
        mark_actions=markers.actions,
        markers=markers.markers,
        redact_class=redactions.classes,
        redact_next=redactions.next.astype("<u4").tobytes(),
        redact_final=redactions.final,
        accepts=redactions.accepts,
        redactions=tuple((rule, strings[replacement]) for rule, replacement in redactions.rows),
    )
