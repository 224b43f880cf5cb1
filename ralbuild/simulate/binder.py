"""Operands to arrays: what the semantics table reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.lanes import DTYPES, Array, Mask
from ralbuild.simulate.ptx.model import (
    BITS,
    Address,
    FloatBits,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from ralbuild.simulate.services import Services

REGISTER_DTYPES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@dataclass(slots=True)
class Binder:
    """The register file of one machine, and access to the rest of it.

    Attributes:
        lanes: threads, a multiple of 32.
        registers: by register index.
        specials: special registers by name, uint32.
        symbols: addresses of variables, each in its own space.
        services: memory, warps and events.
    """

    lanes: int
    registers: dict[int, Array]
    specials: Mapping[str, Array]
    symbols: Mapping[str, int]
    services: Services
    poison: int
    _constants: dict[tuple[int, str], Array] = field(default_factory=dict)

    def register(self, register: Register) -> Array:
        """Return the array of a register, filled with garbage at first."""
        found = self.registers.get(register.index)
        if found is None:
            dtype = REGISTER_DTYPES[register.width]
            value = self.poison & ((1 << register.width) - 1)
            found = np.full(self.lanes, value, dtype)
            self.registers[register.index] = found
        return found

    def constant(self, bits: int, kind: str) -> Array:
        """Return ``bits`` in every lane, as ``kind``."""
        key = (bits & ((1 << BITS[kind]) - 1), kind)
        if key not in self._constants:
            raw = np.full(self.lanes, key[0], _raw(kind))
            array = raw.view(DTYPES[kind])
            array.flags.writeable = False
            self._constants[key] = array
        return self._constants[key]

    def source(self, operand: Operand, kind: str, *, low: bool = False) -> Array:
        """Return what an operand reads as type ``kind``.

        Args:
            low: a wider register is read by its low bytes, as ``st`` and ``cvt`` do.
        """
        match operand:
            case Register() | Not():
                return self._read_register(operand, kind, low)
            case Immediate(value):
                self._check_immediate(value, kind)
                return self.constant(value, kind) if kind != "pred" else self._predicate(bool(value))
            case FloatBits(bits, width):
                if width != BITS[kind]:
                    raise ValueError(f"a {width}-bit literal read as .{kind}")
                return self.constant(bits, kind)
            case Special(name):
                if BITS[kind] < 32:
                    raise ValueError(f"%{name} read as .{kind}")
                words = self.specials[name]
                return words.view(DTYPES[kind]) if BITS[kind] == 32 else words.astype(DTYPES[kind])
            case Symbol(name):
                if name not in self.symbols:
                    raise ValueError(f"unknown name {name!r}")
                return self.constant(self.symbols[name], kind)
        raise ValueError(f"an operand that .{kind} cannot read")

    @staticmethod
    def _check_immediate(value: int, kind: str) -> None:
        """A whole-number constant has 64 bits and is cut to the operand's width (PTX ISA 4.5.1 and 4.5.5)."""
        if kind in ("f16", "bf16", "f32", "f64") or not -(1 << 63) <= value < 1 << 64:
            raise ValueError(f"{value} is no constant of .{kind}")

    def _predicate(self, value: bool) -> Array:
        return np.full(self.lanes, value)

    def _read_register(self, operand: Register | Not, kind: str, low: bool) -> Array:
        if isinstance(operand, Not):
            raise ValueError("a negated predicate here")
        array = self.register(operand)
        width = BITS[kind]
        if (operand.width == 1) != (kind == "pred"):
            raise ValueError(f"register {operand.name} read as .{kind}")
        if operand.width == width:
            return array if kind == "pred" else array.view(DTYPES[kind])
        if operand.width > width and low:
            lowest: Array = array.view(DTYPES[kind])[:: operand.width // width]
            return lowest
        raise ValueError(f"register {operand.name} has {operand.width} bits, .{kind} needs {width}")

    def target(self, operand: Operand, kind: str, *, wide: bool = False) -> Array:
        """Return the array that a result of type ``kind`` goes to.

        Args:
            wide: a wider register takes the value extended by its sign or by zeros (``ld``, ``cvt``).
        """
        if isinstance(operand, Sink):
            return np.empty(self.lanes, DTYPES[kind])
        if not isinstance(operand, Register):
            raise ValueError("the result needs a register")
        width = BITS[kind]
        if operand.width == width or (wide and operand.width > width and kind != "pred"):
            array = self.register(operand)
            if operand.width == width:
                return array if kind == "pred" else array.view(DTYPES[kind])
            return array.view(DTYPES[f"{'s' if kind[0] == 's' else 'u'}{operand.width}"])
        raise ValueError(f"register {operand.name} has {operand.width} bits, .{kind} needs {width}")

    def address(self, operand: Operand) -> tuple[Array, int]:
        """Return the base of an address, uint64 a lane, and the constant added to it."""
        if not isinstance(operand, Address):
            raise ValueError("needs an address")
        base = operand.base
        if isinstance(base, Register) and base.width == 32:
            return self.register(base), operand.offset
        if isinstance(base, Immediate):
            return self.constant(base.value, "u64"), operand.offset
        return self.source(base, "u64"), operand.offset

    @staticmethod
    def items(operand: Operand) -> tuple[Operand, ...]:
        """Return the members of a vector, or the operand alone."""
        return operand.items if isinstance(operand, Vector) else (operand,)


def _raw(kind: str) -> Any:
    return DTYPES[f"u{BITS[kind]}"]


def refuse(instruction: Instruction, error: ValueError) -> PtxError:
    """Return the error for an operand that does not fit, at its instruction."""
    return PtxError(str(error), instruction.line, instruction.text)


def guard_mask(predicate: Array, negated: bool) -> Mask:
    """Return the lanes that a guard lets through."""
    return ~predicate if negated else predicate
