"""One kernel bound to arrays: launch it as often as needed."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ralbuild.simulate.counters import Counters, count
from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.lanes import Array
from ralbuild.simulate.machine import Launch, Machine
from ralbuild.simulate.memory import GlobalMemory
from ralbuild.simulate.ptx.link import write_out_calls
from ralbuild.simulate.ptx.model import BITS, Function, Module, Parameter
from ralbuild.simulate.races import Race, RaceDetector
from ralbuild.simulate.services import Observer

Argument: TypeAlias = "Array | int | float"
WAVE_LANES = 4096
"""Lanes that run side by side, at most: more cost memory and gain nothing."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a session runs.

    Attributes:
        shared: bytes of dynamic shared memory.
        races: watch for races (slower).
        wave: blocks that run side by side; 0 chooses.
        poison: garbage that registers and shared memory hold at first.
        step_limit: basic blocks after which a wave is given up.
    """

    shared: int = 0
    races: bool = False
    wave: int = 0
    poison: int = 0xDEAD_BEEF_DEAD_BEEF
    step_limit: int = 20_000_000


class Session:
    """A kernel, its arguments and its grid. Arrays are bound in place: a launch changes them."""

    def __init__(
        self,
        module: Module,
        entry: str,
        grid: tuple[int, int, int],
        arguments: Mapping[str, Argument],
        options: Options | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Bind a kernel.

        Args:
            entry: function name.
            grid: blocks in x, y, z.
            arguments: in launch order, without Triton's hidden pointers, which are null.

        Raises:
            PtxError: when the PTX has no such entry, or something that is not known.
        """
        function = module.entry(entry)
        if function is None:
            raise PtxError(f"there is no entry {entry!r}", 1)
        function = write_out_calls(module, function)
        options = options or Options()
        self.memory = GlobalMemory()
        values = [
            self.memory.bind(value, name) if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        ]
        block = parameter_block(function, values)
        threads = int(np.prod(function.block or (32, 1, 1)))
        self.blocks = grid[0] * grid[1] * grid[2]
        self.warps = self.blocks * threads // 32
        self.detector = RaceDetector(threads, self.blocks) if options.races else None
        watching = [*observers, *([self.detector] if self.detector else [])]
        wave = options.wave or max(1, WAVE_LANES // threads)
        launch = Launch(grid, block, options.shared, options.poison, options.step_limit)
        self.printed = launch.printed
        self.function = function
        sizes = {min(wave, self.blocks)} | ({self.blocks % wave} if self.blocks > wave else set())
        self._machines = {
            size: Machine(module, function, self.memory, launch, size, watching) for size in sizes if size
        }
        self._wave = wave

    def launch(self, order: Sequence[int] | None = None) -> None:
        """Run the whole grid once.

        Args:
            order: first blocks of the waves, in the order to run them; None for ascending.

        Raises:
            FaultError: when a thread does what it must not.
        """
        if self.detector is not None:
            self.detector.forget()
        starts = range(0, self.blocks, self._wave) if order is None else order
        with np.errstate(all="ignore"):
            for first in starts:
                self._machines[min(self._wave, self.blocks - first)].run(first)

    @property
    def races(self) -> tuple[Race, ...]:
        """Races found so far."""
        return self.detector.races if self.detector else ()

    @property
    def counters(self) -> Counters:
        """What ran so far."""
        return count([bound for machine in self._machines.values() for bound in machine.bound])


def parameter_block(function: Function, values: Sequence[int | float]) -> bytes:
    """Return the parameter block; trailing parameters that are not given are zero.

    Raises:
        PtxError: for too many values, or one that does not fit.
    """
    if len(values) > len(function.parameters):
        message = f"{len(values)} arguments for {len(function.parameters)} parameters"
        raise PtxError(message, function.line)
    block = bytearray(function.parameter_bytes)
    for value, parameter in zip(values, function.parameters, strict=False):
        block[parameter.offset : parameter.offset + parameter.size] = _encode(value, parameter, function)
    return bytes(block)


def _encode(value: int | float, parameter: Parameter, function: Function) -> bytes:
    if parameter.size != BITS[parameter.type] // 8:
        raise PtxError(f"parameter {parameter.name!r} is passed by value as an array", function.line)
    if isinstance(value, float):
        form = {4: "<f", 8: "<d"}.get(parameter.size)
        if form is None:
            raise PtxError(f"parameter {parameter.name!r} takes no floating-point number", function.line)
        return struct.pack(form, value)
    bits = 8 * parameter.size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise PtxError(f"{value} does not fit parameter {parameter.name!r}", function.line)
    return (value & ((1 << bits) - 1)).to_bytes(parameter.size, "little")
