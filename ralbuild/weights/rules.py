"""The rules of verify (``data/findings.toml``): what each id means, and the reference page made of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(resources.files("ralbuild").joinpath("data/findings.toml").read_text("utf-8"))


@cache
def rule_families() -> tuple[RuleFamily, ...]:
    """Return every family in the order of the reference page; read when first asked for."""
    return tuple(
        RuleFamily(key, item["title"], item["about"], tuple(Rule(**rule) for rule in item["rules"]))
        for key, item in _data()["family"].items()
    )


@cache
def rules_by_id() -> Mapping[str, Rule]:
    """Return every rule by id."""
    return {rule.id: rule for family in rule_families() for rule in family.rules}


def find_rule(text: str) -> Rule | None:
    """Return the rule of that id or name."""
    by_name = (rule for rule in rules_by_id().values() if rule.name == text.lower())
    return rules_by_id().get(text.upper()) or next(by_name, None)


def reference() -> str:
    """Return docs/verify.md: how verify is used, and every rule, one section a family."""
    lines = [
        "# What verify finds",
        "",
        "Made by `ralbuild verify --reference`. An id never changes its meaning; `--ignore` takes an id or a",
        "name. Errors end with exit code 3, and no image is built; `--strict` counts warnings as errors.",
        "",
        _data()["notes"].strip(),
    ]
    for family in rule_families():
        lines += ["", f"## {family.id}: {family.title}", "", family.about, ""]
        lines += ["| id | name | severity | what is wrong | what to do |", "|---|---|---|---|---|"]
        lines += [
            f"| {rule.id} | `{rule.name}` | {rule.severity} | {_cell(rule.meaning)} | {_cell(rule.hint)} |"
            for rule in family.rules
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
