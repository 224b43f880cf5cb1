"""A finding: one thing that is wrong with a model folder, under an id that never changes meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ralbuild.errors import Problem, WeightsError
from ralbuild.weights.rules import Rule, Severity, rules_by_id

RANK: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
MOST_OF_ONE_KIND = 20
"""Findings kept for one rule and file; a count stands for the rest."""

Outcome = Literal["error", "warning", "info", "clean"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: id, name, severity and the hint that always applies.
        message: one sentence without a full stop.
        file, tensor: where, as names in the folder; may be empty.
        found, needed: both sides of a comparison; may be empty.
        hint: what to do about it; the rule's own unless a better one is known.
    """

    rule: Rule
    message: str
    file: str = ""
    tensor: str = ""
    found: str = ""
    needed: str = ""
    hint: str = ""

    @property
    def severity(self) -> Severity:
        """``error``, ``warning`` or ``info``."""
        return self.rule.severity

    @property
    def place(self) -> str:
        """The file and the tensor in it."""
        return ": ".join(part for part in (self.file, self.tensor) if part)

    def words(self) -> dict[str, str]:
        """Return the arguments of `Findings.add` that give the finding again."""
        return {
            "rule_id": self.rule.id,
            "message": self.message,
            "file": self.file,
            "tensor": self.tensor,
            "found": self.found,
            "needed": self.needed,
            "hint": self.hint,
        }

    def problem(self) -> Problem:
        """Return the finding as the command line reports errors."""
        return Problem(f"{self.message} [{self.rule.id} {self.rule.name}]", self.place, self.hint)


class FoundError(WeightsError):
    """The folder must not become an image; ``findings`` holds all of one run, worst first."""

    def __init__(self, findings: tuple[Finding, ...], *, strict: bool = False) -> None:
        kinds = ("error", "warning") if strict else ("error",)
        errors = [finding.problem() for finding in findings if finding.severity in kinds]
        super().__init__(errors[0].message)
        self.problems = tuple(errors)
        self.findings = findings


class Findings:
    """Collects what the checks of one run find; those of the rules in ``ignored`` do not count.

    Attributes:
        holder: returns the file that holds a tensor, or should; asked when a finding names only the tensor.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self._ignored = ignored
        self._all: list[Finding] = []
        self._counts: dict[tuple[str, str], int] = {}
        self.holder: Callable[[str], str] = lambda tensor: ""  # noqa: ARG005  # nothing is known of files yet

    def add(
        self,
        rule_id: str,
        message: str,
        *,
        file: str = "",
        tensor: str = "",
        found: object = "",
        needed: object = "",
        hint: str = "",
    ) -> None:
        """Record a finding under ``rule_id``; beyond `MOST_OF_ONE_KIND` a file's are only counted."""
        rule = rules_by_id()[rule_id]
        key = (rule_id, file)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] <= MOST_OF_ONE_KIND:
            finding = Finding(
                rule,
                printable(message),
                printable(file or (self.holder(tensor) if tensor else "")),
                printable(tensor),
                printable(str(found)),
                printable(str(needed)),
                hint or rule.hint,
            )
            self._all.append(finding)

    @property
    def whole(self) -> bool:
        """True while no finding is only counted."""
        return all(count <= MOST_OF_ONE_KIND for count in self._counts.values())

    def take(self, other: Findings) -> None:
        """Add what another collection found, of files that this one has no findings in of the same rule."""
        self._all += other._all
        for key, count in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + count

    @property
    def failed(self) -> bool:
        """True once an error was found that counts."""
        return any(finding.severity == "error" and self._is_counted(finding) for finding in self._all)

    def _is_counted(self, finding: Finding) -> bool:
        return finding.rule.id not in self._ignored

    def empty(self) -> Findings:
        """Return a collection without findings that ignores the same rules."""
        return Findings(self._ignored)

    def has(self, *rule_ids: str) -> bool:
        """Tell whether one of the rules was broken."""
        return any(rule_id in rule_ids for rule_id, _ in self._counts)

    def sorted(self, *, counted: bool = True) -> tuple[Finding, ...]:
        """Return the findings that count, or those that do not; worst first, then by id, file and tensor."""
        more = [
            Finding(rules_by_id()[rule_id], f"and {count - MOST_OF_ONE_KIND} more of this kind", file)
            for (rule_id, file), count in self._counts.items()
            if count > MOST_OF_ONE_KIND
        ]
        return ordered(item for item in (*self._all, *more) if self._is_counted(item) == counted)


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return ``findings`` worst first; equal ones keep their order."""
    return tuple(
        sorted(findings, key=lambda item: (RANK[item.severity], item.rule.id, item.file, _last(item)))
    )


def _last(finding: Finding) -> tuple[bool, str]:
    return (finding.message.startswith("and "), finding.tensor)


def printable(text: str) -> str:
    """Return ``text`` without control characters: names come from the file, and go to a terminal."""
    clean = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return clean.encode("utf-8", "backslashreplace").decode()
