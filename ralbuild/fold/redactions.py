"""Redactions to the automaton that finds them: literals, patterns and named kinds, leftmost-longest.

The automaton is anchored: it follows one candidate from the place where it begins, and the executor reads
again when that fails. So its states are those of a prefix tree, whatever the rules have in common: no
rule is multiplied with another one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ralbuild.config.letters import same_letters
from ralbuild.config.regex import Node, width
from ralbuild.contract.transducer_table import ACCEPT_LIMIT, DEAD, DONE, NO_CHECK, REDACT_BITS
from ralbuild.fold.budget import Budget
from ralbuild.fold.kinds import CHECKS, pattern_of
from ralbuild.fold.modes import Mode
from ralbuild.fold.patterns import Nfa
from ralbuild.fold.rules import KindRule, Redaction
from ralbuild.fold.subsets import DEAD as NO_NODE
from ralbuild.fold.subsets import Dfa

_BROKEN = frozenset(range(0x80, 0x100))
"""Symbols above ASCII of characters that are not word characters."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a redaction looks for.

    Attributes:
        pattern: a literal or a regular expression.
        check: what must hold besides.
        only_words: above ASCII it has word characters alone, so that a broken byte never begins one.
    """

    pattern: bytes | Node
    ignore_case: bool
    whole_word: bool
    check: int = NO_CHECK
    only_words: bool = False

    def width(self) -> tuple[int, int]:
        """Return the least and the most bytes that a match has."""
        if not isinstance(self.pattern, bytes):
            return width(self.pattern, ignore_case=self.ignore_case)
        if not self.ignore_case:
            return len(self.pattern), len(self.pattern)
        sizes = [[len(letter.encode()) for letter in same_letters(char)] for char in self.pattern.decode()]
        return sum(map(min, sizes)), sum(map(max, sizes))

    def add_to(self, nfa: Nfa, number: int) -> int:
        """Add the form to ``nfa`` as rule ``number``; return its start."""
        first = len(nfa.edges)
        start = nfa.add(number, self.pattern, ignore_case=self.ignore_case)
        if self.only_words:
            for edges in nfa.edges[first:]:
                edges[:] = [(mask - _BROKEN, target) for mask, target in edges if mask - _BROKEN]
        return start


def form_of(rule: Redaction) -> Form:
    """Return what a rule looks for."""
    if isinstance(rule, KindRule):
        return Form(pattern_of(rule.kind), rule.kind == "iban", True, CHECKS.get(rule.kind, NO_CHECK), True)
    return Form(rule.pattern, rule.ignore_case, rule.whole_word)


@dataclass(frozen=True, slots=True)
class RedactionTable:
    """See `ralbuild.contract.transducer_table.Front`.

    Attributes:
        next: packed entries, a row a state.
        rows: (rule id, what is written instead).
        starts: first state and first of ``rows``, per mode.
        longest: bytes that a candidate may have.
    """

    classes: tuple[int, ...]
    next: npt.NDArray[np.uint32]
    final: tuple[int, ...]
    accepts: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, bytes], ...]
    starts: tuple[tuple[int, int] | None, ...]
    longest: int


def build_redactions(modes: tuple[Mode, ...], budget: Budget) -> RedactionTable:
    """Build one automaton for all modes; what modes look for in common is there once.

    Raises:
        CompileError: when the table outgrows the budget or its own numbers; names the heaviest rules.
    """
    sets = tuple(dict.fromkeys(mode.redactions for mode in modes if mode.redactions))
    numbers, forms = _number_forms(sets)
    names = {
        number: budget.name(rule)
        for rules, own in zip(sets, numbers, strict=True)
        for rule, number in zip(rules, own, strict=True)
    }
    builder = _Builder(forms, [names[number] for number in range(len(forms))], budget)
    rows: list[tuple[int, bytes]] = []
    states: dict[tuple[int, ...], int] = {}
    made: dict[tuple[Redaction, ...], tuple[int, int]] = {}
    for rules, own in zip(sets, numbers, strict=True):
        if own not in states:
            states[own] = builder.add(own)
        made[rules] = states[own], len(rows)
        here = [(0, b"")] * len(forms)
        for rule, number in zip(rules, own, strict=True):
            here[number] = rule.id, rule.replacement or b""
        rows += here
    return RedactionTable(
        tuple(builder.dfa.cls),
        builder.table(),
        tuple(last for last, _ in builder.ends) or (0,),
        tuple(builder.accepts),
        tuple(rows),
        tuple(made.get(mode.redactions) for mode in modes),
        max((form.width()[1] for form in forms), default=0),
    )


def _number_forms(sets: Sequence[tuple[Redaction, ...]]) -> tuple[list[tuple[int, ...]], list[Form]]:
    """Number the forms so that in each set the numbers ascend, for the lower one wins a tie.

    Sets share numbers, and so states, wherever their orders allow it: the orders are merged, and a form gets
    a second number only where two sets disagree about what comes first, or one set has it twice.
    """
    known: dict[Form, int] = {}
    orders = [[known.setdefault(form_of(rule), len(known)) for rule in rules] for rules in sets]
    every = list(known)
    left = Counter(form for order in orders for form in order)
    heads: dict[int, list[int]] = {}
    """The sets that go on with a form."""
    for number, order in enumerate(orders):
        heads.setdefault(order[0], []).append(number)
    forms: list[Form] = []
    own: list[list[int]] = [[] for _ in sets]
    while heads:
        # What other sets have behind something else waits, unless all forms do.
        ready = [form for form, there in heads.items() if len(there) == left[form]]
        first = min(ready or heads)
        for number in heads.pop(first):
            left[first] -= 1
            own[number].append(len(forms))
            if len(own[number]) < len(orders[number]):
                heads.setdefault(orders[number][len(own[number])], []).append(number)
        forms.append(every[first])
    return [tuple(numbers) for numbers in own], forms


class _Builder:
    """A state is (node of the patterns, whether the last character was a word character).

    Attributes:
        ends: per state, the lists of what may end in it when no word character follows, and when one does.
        accepts: the lists by content.
    """

    def __init__(self, forms: list[Form], names: list[str], budget: Budget) -> None:
        self.forms, self.names, self.budget = forms, names, budget
        nfa = Nfa()
        self.first: list[tuple[int, int]] = []
        for number, form in enumerate(forms):
            start = form.add_to(nfa, number)
            self.first.append((start, nfa.without_word_start(start) if form.whole_word else start))
        self.dfa = Dfa(nfa, [form.whole_word for form in forms])
        self.ends: list[tuple[int, int]] = []
        self.accepts: dict[tuple[int, ...], int] = {(): 0}
        self._homes: list[int] = []
        self._moves: list[tuple[int, int, int]] = []
        """(state, part of the classes, entry without what may end before them)."""
        self._targets: dict[int, int] = {}
        self._queue: deque[tuple[int, int]] = deque()

    def add(self, numbers: tuple[int, ...]) -> int:
        """Append the automaton of some forms; return its first state. The state after a word follows it."""
        home = len(self.ends)
        self._homes.append(home)
        self.ends += [(0, 0), (0, 0)]
        for after in (0, 1):
            node = self.dfa.node(self.first[number][after] for number in numbers)
            if node != NO_NODE:
                self._read(home + after, node)
        while self._queue:
            self._read(*self._queue.popleft())
        return home

    def _read(self, state: int, node: int) -> None:
        targets = self._targets
        for plain, word, target in self.dfa.groups(node):
            for after_word, part in ((0, plain), (1, word)):
                if part:
                    key = target << 1 | after_word
                    entry = targets.get(key)
                    if entry is None:
                        entry = targets[key] = self._entry(target, bool(after_word))
                    self._moves.append((state, part, entry))

    def _entry(self, node: int, after_word: bool) -> int:
        """Return the entry that leads to ``node``: a new state, unless nothing can follow there."""
        state = len(self.ends)
        ended = self.dfa.ended[node]
        if ended:
            certain = [form for form in ended if not (after_word and self.forms[form].whole_word)]
            unchecked = [form for form in certain if self.forms[form].check == NO_CHECK]
            if unchecked and not self.dfa.goes_on(node):
                # What needs a boundary may come first.
                later = [form for form in ended if form not in certain]
                if not later or unchecked[0] < later[0]:
                    return DONE | self._list(certain, after_word) << REDACT_BITS
            self.ends.append((self._list(ended, after_word), self._list(certain, after_word)))
        else:
            self.ends.append((0, 0))
        self._queue.append((state, node))
        self.budget.check(self.dfa, self.names, states=state + 1, most=DONE)
        return state

    def _list(self, forms: Sequence[int], after_word: bool) -> int:
        """Return the number of a list of accepts; nothing comes after a form that has no check."""
        if not forms:
            return 0
        entries: list[int] = []
        for form in forms:
            check = self.forms[form].check
            entries.append(form << 3 | check << 1 | after_word)
            if check == NO_CHECK:
                break
        number = self.accepts.setdefault(tuple(entries), len(self.accepts))
        if number >= ACCEPT_LIMIT:
            found = f"more than {ACCEPT_LIMIT} ways for a redaction to end"
            raise self.budget.exceeded(self.dfa, self.names, found)
        return number

    def table(self) -> npt.NDArray[np.uint32]:
        """Return the packed entries of all states."""
        word = np.array(self.dfa.class_is_word)
        if not self.ends:
            return np.zeros(len(word), np.uint32)
        last, inside = np.array(self.ends, np.uint32).T
        lists: npt.NDArray[np.uint32] = np.where(word[None, :], inside[:, None], last[:, None])
        lists <<= np.uint32(REDACT_BITS)
        out = lists | np.uint32(DEAD)
        for home in self._homes:
            out[home : home + 2] = home + word
        state, part, entry = np.array(self._moves, np.uint32).reshape(-1, 3).T
        sizes = np.array([len(part) for part in self.dfa.parts])[part]
        firsts = np.cumsum([0, *(len(part) for part in self.dfa.parts)])[part]
        state, entry = np.repeat(state, sizes), np.repeat(entry, sizes)
        # Counted up from the first class of every part.
        place = np.arange(len(state)) + np.repeat(firsts - np.cumsum(sizes) + sizes, sizes)
        klass = np.array([klass for part in self.dfa.parts for klass in part], np.int64)[place]
        out[state, klass] = np.where(entry < DONE, entry | lists[state, klass], entry)
        self.budget.take(out.nbytes)
        return out
