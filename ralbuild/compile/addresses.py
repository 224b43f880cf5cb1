"""Addresses in a Triton kernel as sums: what a pointer expression adds up to, as far as the text says.

``output_ptr + offset + 1`` with ``offset = pid * BLOCK + tl.arange(0, BLOCK)`` is the base
``output_ptr``, the terms ``program_id(0)*BLOCK`` and ``arange(0, BLOCK)``, and the shift 1. A name that
is assigned more than once, or by a loop, stands for itself: nothing is guessed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

MAX_DEPTH = 40
"""How far names are followed; deeper ones stand for themselves."""
MAX_STEPS = 5_000
"""Parts of one sum that are looked at: names that double each other would make it endless."""
MAX_CONJUNCTS = 64
"""Parts of one mask that are looked at."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum: ``terms`` as (text, factor), sorted, and the whole number ``shift``."""

    terms: tuple[tuple[str, int], ...]
    shift: int

    @property
    def is_vector(self) -> bool:
        """Tell whether it differs between the lanes of a program."""
        return any("arange(" in text for text, _ in self.terms)

    @property
    def by_program(self) -> bool:
        """Tell whether it differs between programs."""
        return any("program_id(" in text for text, _ in self.terms)

    @property
    def tiled(self) -> str | None:
        """The text of B in ``program_id * B + arange(0, B)``, or None when it is no such tiling."""
        spans = {text[len("arange(0, ") : -1] for text, _ in self.terms if text.startswith("arange(0, ")}
        for text, factor in self.terms:
            left, star, right = text.partition("*")
            sides = {left, right} if star else {left, str(factor)}
            if any(side.startswith("program_id(") for side in sides) and sides & spans:
                return (sides & spans).pop()
        return None


def call_name(node: ast.AST) -> str:
    """Return the last part of a call's name, such as ``load`` for ``tl.load(...)``; else nothing."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """Return the argument of a call by its position or name."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position < len(call.args) else None


class Scope:
    """The names of one function and what each was assigned."""

    def __init__(self, function: ast.FunctionDef, pointers: Collection[str]) -> None:
        self.pointers = pointers
        self._steps = 0
        self._values: dict[str, ast.expr | None] = {}
        parameters = {item.arg for item in function.args.args}
        for name, value in _assignments(function):
            again = name in self._values or name in parameters
            self._values[name] = None if again else value

    def value(self, node: ast.expr) -> ast.expr:
        """Follow names to the expression that they were assigned."""
        for _ in range(MAX_DEPTH):
            found = self._values.get(node.id) if isinstance(node, ast.Name) else None
            if found is None:
                break
            node = found
        return node

    def sum(self, node: ast.expr, depth: int = 0) -> Sum:
        """Return what ``node`` adds up to."""
        if not depth:
            self._steps = 0
        terms: Counter[str] = Counter()
        shift = self._add(node, 1, terms, depth)
        return Sum(tuple(sorted((text, factor) for text, factor in terms.items() if factor)), shift)

    def address(self, node: ast.expr) -> tuple[str | None, Sum]:
        """Return the pointer parameter of an address, None when unclear, and the rest of the sum."""
        whole = self.sum(node)
        bases = [text for text, factor in whole.terms if factor == 1 and text in self.pointers]
        if len(bases) != 1:
            return None, whole
        return bases[0], Sum(tuple(item for item in whole.terms if item[0] != bases[0]), whole.shift)

    def conjuncts(self, node: ast.expr | None) -> Iterator[ast.expr]:
        """Yield the parts of a mask that are joined by ``&``."""
        todo = [node] if node is not None else []
        for _ in range(MAX_CONJUNCTS):
            if not todo:
                return
            part = self.value(todo.pop())
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitAnd):
                todo += [part.right, part.left]
            else:
                yield part

    def _add(self, node: ast.expr, factor: int, terms: Counter[str], depth: int) -> int:
        """Add ``factor * node`` to ``terms``; return the constant part."""
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            terms[ast.unparse(node)] += factor
            return 0
        node = self.value(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return factor * int(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._add(node.operand, -factor, terms, depth + 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            sign = 1 if isinstance(node.op, ast.Add) else -1
            left = self._add(node.left, factor, terms, depth + 1)
            return left + self._add(node.right, sign * factor, terms, depth + 1)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._add_product(node, factor, terms, depth)
        terms[self._text(node, depth)] += factor
        return 0

    def _add_product(self, node: ast.BinOp, factor: int, terms: Counter[str], depth: int) -> int:
        sides = [self.sum(side, depth + 1) for side in (node.left, node.right)]
        for one, other in (sides, sides[::-1]):
            if not one.terms:
                for text, count in other.terms:
                    terms[text] += factor * one.shift * count
                return factor * one.shift * other.shift
        terms["*".join(sorted(_shown(side) for side in sides))] += factor
        return 0

    def _text(self, node: ast.expr, depth: int) -> str:
        name = call_name(node)
        if isinstance(node, ast.Call) and name == "program_id":
            axis = argument(node, 0, "axis")
            return f"program_id({ast.unparse(axis) if axis else ''})"
        if isinstance(node, ast.Call) and name == "arange" and len(node.args) == 2:
            return f"arange({', '.join(_shown(self.sum(item, depth + 1)) for item in node.args)})"
        if isinstance(node, ast.Subscript):
            return f"{_shown(self.sum(node.value, depth + 1))}[{ast.unparse(node.slice)}]"
        return ast.unparse(node)


def _shown(value: Sum) -> str:
    parts = [text if factor == 1 else f"{factor}*{text}" for text, factor in value.terms]
    if value.shift or not parts:
        parts.append(str(value.shift))
    return " + ".join(parts)


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield every name that the function sets, with its value where one expression gives it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            single = node.targets[0] if len(node.targets) == 1 else None
            if isinstance(single, ast.Name):
                yield single.id, node.value
                continue
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
            continue
        elif not isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from ((item.id, None) for item in ast.walk(target) if isinstance(item, ast.Name))
