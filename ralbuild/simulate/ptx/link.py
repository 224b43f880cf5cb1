"""Calls of device functions, written out where they stand.

A call has a copy of the function's code: its registers, labels and local variables are new, its formal
parameters are the caller's ``.param`` variables, and its ``ret`` goes to the instruction after the call.
Parameters of calls lie in the thread's local memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import (
    Address,
    Function,
    Guard,
    Instruction,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Scalar,
    Sink,
    Symbol,
    Variable,
    Vector,
)

RUNTIME = frozenset({"vprintf", "__assertfail"})
"""Functions that the device runtime has, and the semantics table."""
MAX_COPIES = 1024


def write_out_calls(module: Module, entry: Function) -> Function:
    """Return an entry without calls but those of the device runtime.

    Raises:
        PtxError: for a call that is indirect, recursive, of an unknown function, or of other parameters.
    """
    if not any(item.opcode == "call" for item in entry.code):
        return entry
    out = Function(entry.name, entry.line, entry.parameters, block=entry.block)
    linker = _Linker({item.name: item for item in module.functions}, out)
    linker.copy(entry, {}, [])
    return out


@dataclass(slots=True)
class _Names:
    """What names of one copy stand for."""

    prefix: str
    first_register: int
    symbols: dict[str, str] = field(default_factory=dict)
    back: str = ""


class _Linker:
    def __init__(self, functions: Mapping[str, Function], out: Function) -> None:
        self.functions = functions
        self.out = out
        self.copies = 0

    def copy(self, function: Function, formals: Mapping[str, str], path: list[str]) -> None:
        """Append a copy of a function; ``formals`` are its parameters' names and the caller's."""
        out = self.out
        prefix = f"{self.copies}#" if path else ""
        self.copies += 1
        names = _Names(prefix, len(out.registers), dict(formals), f"{prefix}return" if path else "")
        out.registers += [
            replace(item, index=names.first_register + item.index) for item in function.registers
        ]
        self._variables(function, names)
        for label, targets in function.tables.items():
            out.tables[prefix + label] = tuple(prefix + target for target in targets)
        places: dict[int, list[str]] = {}
        for label, at in function.labels.items():
            places.setdefault(at, []).append(prefix + label)
        for at in range(len(function.code) + 1):
            out.labels |= dict.fromkeys(places.get(at, ()), len(out.code))
            if at < len(function.code):
                self._instruction(function, function.code[at], names, [*path, function.name])
        if names.back:
            out.labels[names.back] = len(out.code)

    def _variables(self, function: Function, names: _Names) -> None:
        """Every copy has its own local variables and parameters of calls; shared ones are there once."""
        known = {item.name for item in self.out.variables}
        for item in function.variables:
            own = f"{function.name}#{item.name}" if item.space == "shared" else names.prefix + item.name
            names.symbols[item.name] = own
            if own not in known:
                self.out.variables.append(replace(item, name=own))

    def _instruction(self, function: Function, item: Instruction, names: _Names, path: list[str]) -> None:
        operands = tuple(_operand(operand, names, function) for operand in item.operands)
        guard = Guard(_register(item.guard.register, names), item.guard.negated) if item.guard else None
        if item.opcode == "call":
            self._call(replace(item, operands=operands, guard=guard), path)
        elif item.opcode == "ret" and names.back:
            self._emit(replace(item, opcode="bra", modifiers=(), operands=(Symbol(names.back),), guard=guard))
        else:
            modifiers = item.modifiers
            if modifiers[:1] == ("param",) and self._is_variable(operands):
                modifiers = ("local", *modifiers[1:])
            self._emit(replace(item, operands=operands, guard=guard, modifiers=modifiers))

    def _is_variable(self, operands: tuple[Operand, ...]) -> bool:
        """Tell a parameter of a call from one of the kernel."""
        mine = {item.name for item in self.out.parameters}
        return any(
            isinstance(item, Address) and isinstance(item.base, Symbol) and item.base.name not in mine
            for item in operands
        )

    def _call(self, item: Instruction, path: list[str]) -> None:
        results, callee, given = item.operands[:3]
        if not isinstance(callee, Symbol) or len(item.operands) > 3:
            raise PtxError("an indirect call", item.line, item.text)
        if callee.name in RUNTIME:
            self._emit(item)
            return
        function = self.functions.get(callee.name)
        if function is None:
            raise PtxError(f"a call of {callee.name!r}, which is not there", item.line, item.text)
        if callee.name in path:
            raise PtxError(f"{callee.name!r} calls itself", item.line, item.text)
        if self.copies > MAX_COPIES:
            raise PtxError(
                f"more than {MAX_COPIES} calls, those of called functions counted", item.line, item.text
            )
        formals = self._bind(item, function.formals[0], results)
        formals |= self._bind(item, function.formals[1], given)
        if item.guard is not None:
            past = Guard(item.guard.register, not item.guard.negated)
            back = Symbol(f"{self.copies}#return")
            self._emit(replace(item, opcode="bra", modifiers=(), operands=(back,), guard=past))
        self.copy(function, formals, path)

    def _bind(self, item: Instruction, formals: tuple[Variable, ...], given: Operand) -> dict[str, str]:
        """Return the caller's variable for each formal parameter; both must be of one size."""
        assert isinstance(given, Vector)
        sizes = {variable.name: variable.size for variable in self.out.variables}
        actual = [operand.name for operand in given.items if isinstance(operand, Symbol)]
        if len(actual) != len(given.items) or [sizes.get(name) for name in actual] != [
            formal.size for formal in formals
        ]:
            raise PtxError("a call with other parameters than the function has", item.line, item.text)
        return {formal.name: name for formal, name in zip(formals, actual, strict=True)}

    def _emit(self, item: Instruction) -> None:
        self.out.code.append(replace(item, index=len(self.out.code)))


def _register(register: Register, names: _Names) -> Register:
    return replace(register, index=names.first_register + register.index)


def _operand(operand: Operand, names: _Names, function: Function) -> Operand:
    match operand:
        case Not(register):
            return Not(_register(register, names))
        case Pair(first, second):
            return Pair(
                *(item if isinstance(item, Sink) else _register(item, names) for item in (first, second))
            )
        case Address(base, offset):
            moved = _scalar(base, names, function)
            assert not isinstance(base, Sink)
            return Address(moved, offset)  # type: ignore[arg-type]
        case Vector(items):
            return Vector(tuple(_scalar(item, names, function) for item in items))
    return _scalar(operand, names, function)


def _scalar(item: Scalar, names: _Names, function: Function) -> Scalar:
    if isinstance(item, Register):
        return _register(item, names)
    if isinstance(item, Symbol):
        if item.name in function.labels or item.name in function.tables:
            return Symbol(names.prefix + item.name)
        return Symbol(names.symbols.get(item.name, item.name))
    return item
