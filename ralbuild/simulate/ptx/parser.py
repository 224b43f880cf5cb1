"""PTX tokens to a `Module`. Whatever is not understood is refused with its line, never skipped."""

from __future__ import annotations

import re

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.ptx.model import BITS, Function, Module, Parameter, Variable
from ralbuild.simulate.ptx.statements import StatementParser
from ralbuild.simulate.ptx.stream import MAX_VARIABLE_BYTES, Stream, parse_integer
from ralbuild.simulate.ptx.tokens import tokenize

_LINKAGE = (".visible", ".extern", ".weak", ".common")
_SPACES = (".shared", ".global", ".const")
_VERSION = re.compile(r"(\d+)\.(\d+)")


def parse_module(text: str) -> Module:
    """Parse a PTX module.

    Raises:
        PtxError: for the first construct that is wrong or not known, with its line.
    """
    return _ModuleParser(Stream(tokenize(text), text.splitlines())).parse()


class _ModuleParser:
    """The module level: version, target, variables, entries."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.version: tuple[int, int] | None = None
        self.target = ""
        self.variables: list[Variable] = []
        self.entries: list[Function] = []
        self.functions: list[Function] = []

    def parse(self) -> Module:
        stream = self.stream
        while not stream.done:
            word = stream.take().text
            if word in _LINKAGE:
                continue
            if word in _SPACES:
                self.variables.append(parse_variable(stream, word[1:]))
            elif word == ".entry":
                self.entries.append(self._entry())
            elif word == ".func":
                self._device_function()
            elif not self._directive(word):
                raise stream.error_before(f"unknown module directive {word!r}")
        if self.version is None or not self.target:
            raise PtxError("needs .version and .target", 1)
        return Module(
            self.version, self.target, tuple(self.variables), tuple(self.entries), tuple(self.functions)
        )

    def _directive(self, word: str) -> bool:
        stream = self.stream
        if word == ".version":
            found = _VERSION.fullmatch(stream.take().text)
            if not found:
                raise stream.error_before("needs a version such as 8.2")
            self.version = (int(found[1]), int(found[2]))
        elif word == ".target":
            self.target = stream.take_word()
            while stream.accept(","):
                stream.take_word()
        elif word == ".address_size":
            if stream.take().text != "64":
                raise stream.error_before("needs 64-bit addresses")
        elif word == ".file":
            stream.skip_line()
        elif word == ".section":
            stream.skip_section()
        else:
            return False
        return True

    def _entry(self) -> Function:
        stream = self.stream
        line = stream.line
        name = stream.take_word()
        parameters: tuple[Parameter, ...] = ()
        if stream.accept("("):
            parameters = self._parameters()
        function = Function(name, line, parameters)
        if any(other.name == name for other in self.entries):
            raise PtxError(f"entry {name!r} is there twice", line)
        while not stream.accept("{"):
            self._tuning(function)
        StatementParser(stream, function, parse_variable).body()
        return function

    def _device_function(self) -> None:
        """Read ``.func (results) name (parameters)`` and its body; a declaration alone is left out."""
        stream = self.stream
        line = stream.line
        results = self._formals() if stream.accept("(") else ()
        name = stream.take_word()
        given = self._formals() if stream.accept("(") else ()
        while stream.peek() in (".noreturn", ".unique"):
            stream.take()
        if stream.accept(";"):
            return
        stream.expect("{")
        if any(other.name == name for other in self.functions):
            raise PtxError(f"function {name!r} is there twice", line)
        function = Function(name, line, formals=(results, given))
        StatementParser(stream, function, parse_variable).body()
        self.functions.append(function)

    def _formals(self) -> tuple[Variable, ...]:
        found: list[Variable] = []
        while not self.stream.accept(")"):
            if found:
                self.stream.expect(",")
            name, word, align, count = self._declared_parameter()
            size = BITS[word] // 8 * count
            found.append(Variable(name, "param", align, size, bytes(size)))
        return tuple(found)

    def _tuning(self, function: Function) -> None:
        """Read a performance-tuning directive; ``.reqntid`` is a requirement, the others are hints."""
        stream = self.stream
        word = stream.take().text
        if word in (".reqntid", ".maxntid"):
            sizes = [stream.take_integer(1, 1024)]
            while stream.accept(","):
                sizes.append(stream.take_integer(1, 1024))
            if len(sizes) > 3:
                raise stream.error_before("needs at most three dimensions")
            x, y, z = (*sizes, 1, 1)[:3]
            function.block = (x, y, z)
        elif word in (".minnctapersm", ".maxnreg"):
            stream.take_integer(0, 1 << 16)
        else:
            raise stream.error_before(f"unknown entry directive {word!r}")

    def _parameters(self) -> tuple[Parameter, ...]:
        stream = self.stream
        found: list[Parameter] = []
        offset = 0
        while not stream.accept(")"):
            if found:
                stream.expect(",")
            parameter = self._parameter(offset)
            if any(parameter.name == other.name for other in found):
                raise stream.error_before(f"parameter {parameter.name!r} is there twice")
            found.append(parameter)
            offset = parameter.offset + parameter.size
        return tuple(found)

    def _parameter(self, offset: int) -> Parameter:
        name, word, align, count = self._declared_parameter()
        return Parameter(name, word, -(-offset // align) * align, BITS[word] // 8 * count)

    def _declared_parameter(self) -> tuple[str, str, int, int]:
        """Read ``.param .u64 .ptr .global .align 1 name``; an alignment after ``.ptr`` is the pointee's.

        Returns:
            Name, type, alignment in bytes, and number of elements.
        """
        stream = self.stream
        stream.expect(".param")
        align = 0
        if stream.accept(".align"):
            align = stream.take_power_of_two(128)
        word = stream.take_word().removeprefix(".")
        if word not in BITS or word == "pred":
            raise stream.error_before(f"unknown parameter type {word!r}")
        if stream.accept(".ptr"):
            if stream.peek() in (".global", ".shared", ".const", ".local"):
                stream.take()
            if stream.accept(".align"):
                stream.take_power_of_two(1 << 20)
        name = stream.take_word()
        count = 1
        if stream.accept("["):
            count = stream.take_integer(1, 4096)
            stream.expect("]")
        return name, word, align or BITS[word] // 8, count


def parse_variable(stream: Stream, space: str) -> Variable:
    """Read a variable declaration after its state space, up to and with the semicolon."""
    align = 0
    if stream.accept(".align"):
        align = stream.take_power_of_two(1 << 16)
    word = stream.take_word().removeprefix(".")
    if word not in BITS or word == "pred":
        raise stream.error_before(f"unknown variable type {word!r}")
    name = stream.take_word()
    width = BITS[word] // 8
    count: int | None = 1
    if stream.accept("["):
        count = None if stream.peek() == "]" else stream.take_integer(0, MAX_VARIABLE_BYTES // width)
        stream.expect("]")
    data = b""
    if stream.accept("="):
        data = _initial(stream, width)
    stream.expect(";")
    if count is None and data:
        count = len(data) // width
    if count is None and space != "shared":
        raise stream.error_before(f"{name!r} needs a size")
    size = None if count is None else count * width
    if size is not None and len(data) > size:
        raise stream.error_before(f"{name!r} has more values than elements")
    return Variable(name, space, align or width, size, data.ljust(size or 0, b"\0"))


def _initial(stream: Stream, width: int) -> bytes:
    """Read ``{1, 2, 3}`` or one number."""
    out = bytearray()
    braces = stream.accept("{")
    while True:
        negative = stream.accept("-")
        token = stream.take()
        if token.kind != "number" or not re.fullmatch(r"(0[xXbB])?[0-9a-fA-F]+U?", token.text):
            raise stream.error_before("needs whole numbers as initial values")
        value = parse_integer(token.text)
        value = -value if negative else value
        out += (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        if not braces or not stream.accept(","):
            break
    if braces:
        stream.expect("}")
    return bytes(out)
