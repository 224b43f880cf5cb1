"""The semantics table. A row's pattern is the syntax line of the PTX ISA; what no row matches is refused.

    @row("add{.ftz}{.sat}.f32", "Floating Point Instructions: add")

A name in braces may be absent; a name that is a class (given to `row`, or of `CLASSES`) stands for one of
its members, and what was written reaches the binder under that name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import Instruction

if TYPE_CHECKING:
    from ralbuild.simulate.binder import Binder
    from ralbuild.simulate.lanes import Step

CLASSES = {
    "rnd": "rn rz rm rp",
    "space": "global shared local const param shared::cta",
    "scope": "cta cluster gpu sys",
    "bool": "and or xor",
}
"""Modifier classes that many rows share."""

Mods: TypeAlias = "dict[str, str]"
Bind: TypeAlias = "Callable[[Binder, Instruction, Mods], Step]"


@dataclass(frozen=True, slots=True)
class Row:
    """One form: its syntax, the ISA section that says what it does, and how it is bound."""

    pattern: str
    section: str
    matcher: re.Pattern[str]
    operands: frozenset[int]
    bind: Bind


_ROWS: dict[str, list[Row]] = {}
_PART = re.compile(r"\{\.([\w:]+)\}|\.([\w:]+)")


def row(pattern: str, section: str, operands: str, **classes: str) -> Callable[[Bind], Bind]:
    """Add rows to the table.

    Args:
        pattern: opcode and modifiers; several patterns of the same meaning are separated by blanks.
        section: title of the section of the PTX ISA.
        operands: how many operands the form takes, such as ``3`` or ``2 3``.
        classes: modifier classes of these rows: members separated by blanks.
    """

    def add(bind: Bind) -> Bind:
        for one in pattern.split():
            opcode = one.split(".")[0].split("{")[0]
            matcher = _matcher(one[len(opcode) :], CLASSES | classes)
            counts = frozenset(int(count) for count in operands.split())
            _ROWS.setdefault(opcode, []).append(Row(one, section, matcher, counts, bind))
        return bind

    return add


def _matcher(modifiers: str, classes: dict[str, str]) -> re.Pattern[str]:
    parts = []
    for found in _PART.finditer(modifiers):
        optional, required = found.groups()
        name = optional or required
        members = "|".join(re.escape(item) for item in classes.get(name, name).split())
        parts.append(f"(?:\\.(?P<{name.replace(':', '_')}>{members})){'?' if optional else ''}")
    return re.compile("".join(parts))


def rows() -> list[Row]:
    """Return the whole table, by opcode."""
    return [item for opcode in sorted(_ROWS) for item in _ROWS[opcode]]


def find_row(instruction: Instruction) -> tuple[Row, Mods]:
    """Return the row of an instruction and its modifiers by class.

    Raises:
        PtxError: when no row matches.
    """
    known = _ROWS.get(instruction.opcode)
    if known is None:
        raise PtxError(f"unknown instruction {instruction.opcode!r}", instruction.line, instruction.text)
    written = "".join(f".{item}" for item in instruction.modifiers)
    for item in known:
        found = item.matcher.fullmatch(written)
        if found and len(instruction.operands) in item.operands:
            return item, {name: value or "" for name, value in found.groupdict().items()}
    raise PtxError(
        f"unknown form {instruction.name!r} with {len(instruction.operands)} operands",
        instruction.line,
        instruction.text,
    )
