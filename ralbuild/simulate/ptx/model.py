"""What a PTX module is made of: values that the parser gives and the machine binds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

BITS = {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)}
BITS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "pred": 1}
"""Fundamental types (PTX ISA, "Types") and their widths in bits."""


@dataclass(frozen=True, slots=True)
class Register:
    """A register: its place in the function's register file, and its width in bits (1: predicate)."""

    index: int
    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """A whole number."""

    value: int


@dataclass(frozen=True, slots=True)
class FloatBits:
    """A floating-point literal as IEEE bits; ``width`` is 32 or 64."""

    bits: int
    width: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, parameter, label or function."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, without its percent sign: ``tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand ``_``: a result that is dropped."""


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate."""

    register: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: two results."""

    first: Register | Sink
    second: Register | Sink


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, c, d}``; of a call, ``(a, b)``."""

    items: tuple[Scalar, ...]


Scalar: TypeAlias = "Register | Immediate | FloatBits | Symbol | Special | Sink"
Operand: TypeAlias = "Scalar | Not | Pair | Address | Vector"


@dataclass(frozen=True, slots=True)
class Guard:
    """``@p`` or ``@!p``."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        index: place in the function's code.
        line: in the PTX text.
        opcode, modifiers: ``ld`` and ``("global", "b32")`` for ``ld.global.b32``.
        text: as written, for messages.
    """

    index: int
    line: int
    opcode: str
    modifiers: tuple[str, ...]
    guard: Guard | None
    operands: tuple[Operand, ...]
    text: str

    @property
    def name(self) -> str:
        """The opcode with its modifiers."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel parameter's place in the parameter block, in bytes."""

    name: str
    type: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the shared, local, global or const space, or a parameter of a call (``param``).

    Attributes:
        size: in bytes; None for an ``extern .shared`` array, whose size the launch gives.
        data: initial bytes; zeros when the text gives none.
    """

    name: str
    space: str
    align: int
    size: int | None
    data: bytes


@dataclass(slots=True)
class Function:
    """An entry or a device function, and its code.

    Attributes:
        parameters: of an entry: the parameter block.
        formals: of a device function: the variables that hold its results, and its parameters.
        block: threads of a block in x, y, z, if the text requires them.
        labels: label to the index of the instruction after it.
        tables: branch target lists of ``brx.idx``.
    """

    name: str
    line: int
    parameters: tuple[Parameter, ...] = ()
    formals: tuple[tuple[Variable, ...], tuple[Variable, ...]] = ((), ())
    block: tuple[int, int, int] | None = None
    registers: list[Register] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter block."""
        last = self.parameters[-1] if self.parameters else None
        return last.offset + last.size if last else 0


@dataclass(frozen=True, slots=True)
class Module:
    """A PTX text: ISA version, target and what it defines."""

    version: tuple[int, int]
    target: str
    variables: tuple[Variable, ...]
    entries: tuple[Function, ...]
    functions: tuple[Function, ...] = ()

    def entry(self, name: str) -> Function | None:
        """Return the entry of this name."""
        return next((item for item in self.entries if item.name == name), None)
