"""The body of a function: declarations, labels, branch tables and instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import (
    BITS,
    Address,
    FloatBits,
    Function,
    Guard,
    Immediate,
    Instruction,
    Not,
    Operand,
    Pair,
    Register,
    Scalar,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ralbuild.simulate.ptx.stream import Stream, parse_integer

_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid)\.[xyz]|laneid|warpid|nwarpid|smid|lanemask_(?:eq|lt|le|gt|ge))"
)
_INTEGER = re.compile(r"0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?")
_MAX_REGISTERS = 1 << 20

VariableParser = Callable[[Stream, str], Variable]


class StatementParser:
    """Reads one body into a `Function`. Registers are made when they are first used."""

    def __init__(self, stream: Stream, function: Function, variable: VariableParser) -> None:
        self.stream = stream
        self.function = function
        self.variable = variable
        self.scopes: list[_Scope] = [_Scope()]

    def body(self) -> None:
        """Read up to the brace that closes the function."""
        stream = self.stream
        while True:
            if stream.accept("}"):
                self.scopes.pop()
                if not self.scopes:
                    break
            elif stream.accept("{"):
                self.scopes.append(_Scope())
            elif not stream.accept(";"):
                self._statement()
        self._check_labels()

    def _check_labels(self) -> None:
        function = self.function
        for table in function.tables.values():
            for label in table:
                if label not in function.labels:
                    raise PtxError(f"a branch table names the unknown label {label!r}", function.line)

    def _statement(self) -> None:
        stream = self.stream
        word = stream.peek()
        if word == ".reg":
            stream.take()
            self._declare()
        elif word in (".shared", ".local", ".param"):
            stream.take()
            self._variable(word[1:])
        elif word == ".pragma":
            while stream.take().text != ";":
                pass
        elif word == ".loc":
            stream.take()
            stream.skip_line()
        elif stream.peek(1) == ":":
            self._label()
        else:
            self._instruction()

    def _label(self) -> None:
        stream, function = self.stream, self.function
        name = stream.take_word()
        stream.expect(":")
        if name in function.labels or name in function.tables:
            raise stream.error_before(f"label {name!r} is there twice")
        if stream.accept(".branchtargets"):
            targets = [stream.take_word()]
            while stream.accept(","):
                targets.append(stream.take_word())
            stream.expect(";")
            function.tables[name] = tuple(targets)
        else:
            function.labels[name] = len(function.code)

    def _variable(self, space: str) -> None:
        """Read a variable; each call has its own ``param0``, so inner ones get a number."""
        found = self.variable(self.stream, space)
        known = self.function.variables
        if len(self.scopes) > 1 or any(found.name == other.name for other in known):
            self.scopes[-1].variables[found.name] = f"{found.name}#{len(known)}"
            found = replace(found, name=f"{found.name}#{len(known)}")
        known.append(found)

    def _declare(self) -> None:
        """Read ``.reg .b32 %r<12>, %x;``."""
        stream = self.stream
        word = stream.take_word().removeprefix(".")
        if word not in BITS:
            raise stream.error_before(f"unknown register type {word!r}")
        width = 1 if word == "pred" else max(BITS[word], 16)
        while True:
            name = stream.take_word()
            if stream.accept("<"):
                self.scopes[-1].families[name] = (stream.take_integer(0, _MAX_REGISTERS), width)
                stream.expect(">")
            else:
                self.scopes[-1].widths[name] = width
            if stream.accept(";"):
                return
            stream.expect(",")

    def _instruction(self) -> None:
        stream, function = self.stream, self.function
        line = stream.line
        guard = None
        if stream.accept("@"):
            negated = stream.accept("!")
            guard = Guard(self._predicate(), negated)
        opcode, *modifiers = stream.take_word().split(".")
        if not opcode or opcode[0] in "%$":
            raise stream.error_before("needs an instruction")
        operands: list[Operand] = self._call() if opcode == "call" else []
        while not stream.accept(";"):
            if operands:
                stream.expect(",")
            operands.append(self._operand())
        text = stream.source(line)
        function.code.append(
            Instruction(len(function.code), line, opcode, tuple(modifiers), guard, tuple(operands), text)
        )

    def _call(self) -> list[Operand]:
        """Read ``(results), name, (arguments)``; either list may be absent."""
        stream = self.stream
        results = self._arguments()
        if results.items:
            stream.expect(",")
        name = self._scalar()
        given = self._arguments() if stream.peek() == "," and stream.peek(1) == "(" else Vector(())
        return [results, name, given]

    def _arguments(self) -> Vector:
        stream = self.stream
        stream.accept(",")
        items: list[Scalar] = []
        if stream.accept("("):
            while not stream.accept(")"):
                if items:
                    stream.expect(",")
                items.append(self._scalar())
        return Vector(tuple(items))

    def _predicate(self) -> Register:
        register = self._register(self.stream.take_word())
        if register is None or register.width != 1:
            raise self.stream.error_before("needs a predicate register")
        return register

    def _register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            found = scope.find(name, self.function.registers)
            if found is not None:
                return found
        return None

    def _operand(self) -> Operand:
        stream = self.stream
        if stream.accept("{"):
            items = [self._scalar()]
            while stream.accept(","):
                items.append(self._scalar())
            stream.expect("}")
            return Vector(tuple(items))
        if stream.accept("["):
            return self._address()
        if stream.accept("!"):
            return Not(self._predicate())
        first = self._scalar()
        if stream.accept("|"):
            second = self._scalar()
            if not isinstance(first, Register | Sink) or not isinstance(second, Register | Sink):
                raise stream.error_before("needs two registers")
            return Pair(first, second)
        return first

    def _address(self) -> Address:
        stream = self.stream
        base = self._scalar()
        if not isinstance(base, Register | Symbol | Immediate):
            raise stream.error_before("needs a register, variable or number as an address")
        offset = 0
        while stream.peek() in ("+", "-"):
            sign = -1 if stream.take().text == "-" else 1
            sign = -sign if stream.accept("-") else sign
            number = stream.take()
            if not _INTEGER.fullmatch(number.text):
                raise stream.error_before("needs a whole number as an offset")
            offset += sign * parse_integer(number.text)
        stream.expect("]")
        return Address(base, offset)

    def _scalar(self) -> Scalar:
        stream = self.stream
        if stream.accept("-"):
            return self._number(stream.take().text, negative=True)
        token = stream.take()
        if token.kind == "number":
            return self._number(token.text, negative=False)
        if token.kind != "word":
            raise stream.error_before(f"unexpected {token.text!r}")
        register = self._register(token.text)
        if register is not None:
            return register
        if token.text == "_":
            return Sink()
        if token.text.startswith("%"):
            if _SPECIAL.fullmatch(token.text):
                return Special(token.text[1:])
            raise stream.error_before(f"unknown register {token.text}")
        for scope in reversed(self.scopes):
            if token.text in scope.variables:
                return Symbol(scope.variables[token.text])
        return Symbol(token.text)

    def _number(self, text: str, *, negative: bool) -> Immediate | FloatBits:
        if text[:2] in ("0f", "0F", "0d", "0D") and not negative:
            width = 32 if text[1] in "fF" else 64
            return FloatBits(int(text[2:], 16), width)
        if not _INTEGER.fullmatch(text):
            raise self.stream.error_before(f"unknown number {'-' * negative}{text}")
        value = parse_integer(text)
        if value >> 64:
            raise self.stream.error_before(f"{text} does not fit 64 bits")
        return Immediate(-value if negative else value)


class _Scope:
    """Names declared between two braces."""

    def __init__(self) -> None:
        self.families: dict[str, tuple[int, int]] = {}
        self.widths: dict[str, int] = {}
        self.made: dict[str, Register] = {}
        self.variables: dict[str, str] = {}

    def find(self, name: str, registers: list[Register]) -> Register | None:
        """Return the register of this name, adding it to ``registers`` at first use."""
        if name in self.made:
            return self.made[name]
        width = self.widths.get(name)
        if width is None:
            stem = name.rstrip("0123456789")
            number = name[len(stem) :]
            count, width = self.families.get(stem, (0, 0))
            if not number or len(number) > 7 or int(number) >= count or str(int(number)) != number:
                return None
        register = Register(len(registers), name, width)
        registers.append(register)
        self.made[name] = register
        return register
