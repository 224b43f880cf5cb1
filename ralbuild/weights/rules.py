"""The rules of verify (``data/findings.toml``): what each id means, and the reference page made of them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: stable id, readable name, severity, what is wrong, and what to do about it."""

    id: str
    name: str
    severity: Severity
    meaning: str
    hint: str


@dataclass(frozen=True, slots=True)
class RuleFamily:
    """Rules of one kind: the letter and digit that their ids begin with, a title, and an introduction."""

    id: str
    title: str
    about: str
    rules: tuple[Rule, ...]


def _families(data: dict[str, Any]) -> tuple[RuleFamily, ...]:
    return tuple(
        RuleFamily(key, item["title"], item["about"], tuple(Rule(**rule) for rule in item["rules"]))
        for key, item in data["family"].items()
    )


_DATA = tomllib.loads(resources.files("ralbuild").joinpath("data/findings.toml").read_text("utf-8"))
FAMILIES = _families(_DATA)
RULES: dict[str, Rule] = {rule.id: rule for family in FAMILIES for rule in family.rules}
"""Every rule by id."""


def find_rule(text: str) -> Rule | None:
    """Return the rule of that id or name."""
    by_name = (rule for rule in RULES.values() if rule.name == text.lower())
    return RULES.get(text.upper()) or next(by_name, None)


def reference() -> str:
    """Return docs/verify.md: how verify is used, and every rule, one section a family."""
    lines = [
        "# What verify finds",
        "",
        "Made by `ralbuild verify --reference`. An id never changes its meaning; `--ignore` takes an id or a",
        "name. Errors end with exit code 3, and no image is built; `--strict` counts warnings as errors.",
        "",
        _DATA["notes"].strip(),
    ]
    for family in FAMILIES:
        lines += ["", f"## {family.id}: {family.title}", "", family.about, ""]
        lines += ["| id | name | severity | what is wrong | what to do |", "|---|---|---|---|---|"]
        lines += [
            f"| {rule.id} | `{rule.name}` | {rule.severity} | {_cell(rule.meaning)} | {_cell(rule.hint)} |"
            for rule in family.rules
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
