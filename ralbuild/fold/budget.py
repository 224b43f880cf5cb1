"""What the tables of one build may take together, and the error that names the rules that take most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ralbuild.contract.bundle import Rule
from ralbuild.errors import CompileError
from ralbuild.fold.rules import KindRule, TextRule
from ralbuild.fold.subsets import Dfa

TABLE_BUDGET = 32 << 20
"""Bytes of the transition arrays of redactions and rules; an A100's second-level cache holds them."""


class Budget:
    """Counts bytes of finished tables.

    Attributes:
        rules: all rules by their ids, for messages.
        taken: bytes so far.
    """

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self.rules = rules
        self.taken = 0

    def name(self, rule: TextRule | KindRule) -> str:
        """Return what a rule matches and, where that is known, its place in the config."""
        if rule.id >= len(self.rules):
            return repr(rule.shown[:40])
        found = self.rules[rule.id]
        return f"{found.text[:40]!r} ({found.place})"

    def take(self, size: int) -> None:
        """Count a finished table."""
        self.taken += size

    def check(self, dfa: Dfa, names: Sequence[str], *, states: int, most: int) -> None:
        """Check a table that grows; ``names`` are its rules, by their numbers in ``dfa``.

        Raises:
            CompileError: when it has too many states for its number of classes, or more than ``most``.
        """
        size = self.taken + 4 * states * dfa.classes
        if states > most or size > TABLE_BUDGET:
            raise self.exceeded(
                dfa, names, f"{states} states of {most}, {size >> 20} MiB of {TABLE_BUDGET >> 20}"
            )

    def exceeded(self, dfa: Dfa, names: Sequence[str], found: str) -> CompileError:
        """Return the error that says what was ``found``."""
        heavy = [names[number] for number, _ in Counter(dfa.nfa.rule).most_common(3)]
        return CompileError(
            f"the rules need too large a table: {found}",
            place="fold",
            hint=f"shorten or drop rules; the heaviest are {', '.join(heavy)}",
        )
