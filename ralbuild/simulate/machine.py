"""Runs one kernel: many threads as lanes, groups of lanes that follow the same path, barriers.

The threads of several blocks (a wave) run side by side, one NumPy lane each, so that an instruction that
many blocks reach together costs one call. Blocks stay apart: shared memory, barriers and warps are
their own, and any order of blocks is one that a GPU may choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ralbuild.simulate.binder import Binder, guard_mask, refuse
from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.flow import Block, Flow, analyze
from ralbuild.simulate.lanes import WARP, Array, Lanes, Step
from ralbuild.simulate.memory import SHARED_BASE, BlockMemory, GlobalMemory
from ralbuild.simulate.ptx.model import Function, Immediate, Instruction, Module, Variable
from ralbuild.simulate.semantics import find_row
from ralbuild.simulate.semantics.warp import member_mask
from ralbuild.simulate.services import Observer, Services
from ralbuild.simulate.threads import Waiting, special_registers

MAX_SHARED = 227 << 10
FAIR_STEPS = 1024
"""Every so many blocks the group that is farthest ahead runs, so that a spin loop starves nobody."""


@dataclass(slots=True)
class Bound:
    """A basic block made ready to run.

    Attributes:
        full, part: its instructions, for all lanes and under a mask.
        members: lanes that its warp-wide instruction names; None for all.
        condition: predicate of the branch at its end, with whether it is negated.
        index: register of an indirect branch.
        taken, following: states that come next; -1 for the end of the thread.
        partial: it begins with a barrier of a part of the block.
        groups, warps, lanes: how often it ran: as a group, in warps, in threads.
    """

    block: Block
    full: list[Callable[[], object]]
    part: list[Callable[[Lanes], object]]
    members: Array | None
    condition: tuple[Array, bool] | None
    index: Array | None
    taken: tuple[int, ...]
    following: int
    partial: bool = False
    groups: int = 0
    warps: int = 0
    lanes: int = 0


@dataclass(slots=True)
class Launch:
    """What a kernel is launched with.

    Attributes:
        grid: blocks in x, y, z.
        block: the parameter block, as the entry declares it.
        shared: bytes of dynamic shared memory.
        poison: garbage that registers and shared memory hold at first.
        step_limit: basic blocks after which a wave is given up.
        printed: takes what threads print.
    """

    grid: tuple[int, int, int]
    block: bytes
    shared: int = 0
    poison: int = 0xDEAD_BEEF_DEAD_BEEF
    step_limit: int = 20_000_000
    printed: list[str] = field(default_factory=list)


class Machine:
    """One kernel bound to memory, for waves of a fixed number of blocks."""

    def __init__(
        self,
        module: Module,
        function: Function,
        memory: GlobalMemory,
        launch: Launch,
        wave: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        """Bind every instruction.

        Raises:
            PtxError: for an instruction, form or operand that is not known.
        """
        if function.block is None:
            raise PtxError(f"{function.name!r} needs .reqntid or .maxntid", function.line)
        x, y, z = function.block
        self.threads = x * y * z
        if self.threads % WARP:
            raise PtxError(f"blocks of {self.threads} threads: not a multiple of {WARP}", function.line)
        self.function, self.launch, self.wave = function, launch, wave
        self.lanes = wave * self.threads
        symbols, shared_size, local_size = _place(module, function, memory, launch.shared)
        block_of = np.arange(self.lanes) // self.threads
        shared = BlockMemory("shared memory", SHARED_BASE, shared_size, block_of)
        local = BlockMemory("local memory", 0, local_size, np.arange(self.lanes))
        self.services = Services(
            self.lanes, self.threads, memory, shared, local, list(observers), printed=launch.printed
        )
        self.specials = special_registers(function.block, launch.grid, wave)
        self.binder = Binder(self.lanes, {}, self.specials, symbols, self.services, launch.poison)
        self.flow: Flow = analyze(function)
        self.bound = [self._bind(block) for block in self.flow.blocks]
        self.services.set_parameters(launch.block)
        self.live: Array = np.ones(self.lanes, bool)
        self.waiting = Waiting(self.services, self.live)

    def _bind(self, block: Block) -> Bound:
        steps = [self._step(item) for item in block.code]
        members = None
        if block.sync == "warp":
            members = member_mask(self.binder, block.code[0])
        partial = block.sync == "block" and self._is_partial(block.code[0])
        condition = index = None
        leave = block.leave
        if leave is not None:
            find_row(leave)
            if leave.guard is not None:
                condition = (self.binder.register(leave.guard.register), leave.guard.negated)
            if leave.opcode == "brx":
                index = self._source(leave)
        edges = self.flow.edges
        taken = tuple(edges[block.number, to] for to in block.taken) or (-1,)
        following = edges.get((block.number, block.following), -1)
        return Bound(
            block,
            [step.full for step in steps],
            [step.part for step in steps],
            members,
            condition,
            index,
            taken,
            following,
            partial,
        )

    def _source(self, leave: Instruction) -> Array:
        try:
            return self.binder.source(leave.operands[0], "u32")
        except ValueError as error:
            raise refuse(leave, error) from None

    def _is_partial(self, instruction: Instruction) -> bool:
        """Check a barrier; tell whether it is one of a part of the block."""
        number, *count = instruction.operands
        if not isinstance(number, Immediate) or not 0 <= number.value < 16:
            raise PtxError("a barrier whose number is no constant", instruction.line, instruction.text)
        if not count:
            return False
        threads = count[0].value if isinstance(count[0], Immediate) else 0
        if threads % WARP or not 0 < threads <= self.threads:
            raise PtxError(
                "a barrier of a number of threads that cannot be", instruction.line, instruction.text
            )
        return threads < self.threads or "arrive" in instruction.modifiers

    def _step(self, instruction: Instruction) -> Step:
        found, modifiers = find_row(instruction)
        try:
            step = found.bind(self.binder, instruction, modifiers)
        except ValueError as error:
            raise refuse(instruction, error) from None
        if instruction.guard is None:
            return step
        predicate, negated = self.binder.register(instruction.guard.register), instruction.guard.negated
        run = step.part
        if negated:
            return Step(lambda: run(Lanes(~predicate)), lambda lanes: run(Lanes(lanes.mask & ~predicate)))
        return Step(lambda: run(Lanes(predicate.copy())), lambda lanes: run(Lanes(lanes.mask & predicate)))

    # Running

    def run(self, first_block: int) -> None:
        """Run the blocks ``first_block`` to ``first_block + wave``, to their ends.

        Raises:
            FaultError: when a thread does what it must not.
        """
        self._reset(first_block)
        entry = self.flow.entry
        ready = {entry: Lanes(np.ones(self.lanes, bool))}
        steps = 0
        while True:
            if not ready and not self.waiting.release(ready):
                self.waiting.expect_nobody()
                return
            state = max(ready) if steps % FAIR_STEPS == 0 else min(ready)
            lanes: Lanes | None = ready.pop(state)
            while lanes is not None:
                bound = self.bound[self.flow.states[state]]
                steps += 1
                if steps > self.launch.step_limit:
                    raise self._gave_up(bound, steps)
                if bound.block.sync:
                    lanes = self.waiting.arrive(bound, state, lanes, ready)
                    if lanes is None:
                        break
                state, lanes = self._execute(bound, lanes, ready)
                if ready and lanes is not None:
                    _join(ready, state, lanes)
                    break

    def _gave_up(self, bound: Bound, steps: int) -> Exception:
        item = bound.block.leave or bound.block.code[0]
        lane = int(self.live.argmax())
        return self.services.fault("step limit", f"no end after {steps} basic blocks", item, lane)

    def _execute(self, bound: Bound, lanes: Lanes, ready: dict[int, Lanes]) -> tuple[int, Lanes | None]:
        """Run a block; return the state that the lanes go on with, when they stay together."""
        bound.groups += 1
        bound.warps += lanes.warps
        bound.lanes += lanes.count
        if lanes.full:
            for operation in bound.full:
                operation()
        else:
            for step in bound.part:
                step(lanes)
        leave = bound.block.leave
        if leave is None:
            return bound.following, lanes
        if bound.index is not None:
            return self._indirect(bound, lanes, ready)
        if bound.condition is None:
            return self._go(bound.taken[0], lanes)
        predicate, negated = bound.condition
        taken = lanes.mask & guard_mask(predicate, negated)
        count = int(np.count_nonzero(taken))
        if count == lanes.count:
            return self._go(bound.taken[0], lanes)
        if count == 0:
            return bound.following, lanes
        state, rest = self._go(bound.taken[0], Lanes(taken))
        if rest is not None:
            _join(ready, state, rest)
        _join(ready, bound.following, Lanes(lanes.mask & ~taken))
        return -1, None

    def _go(self, state: int, lanes: Lanes) -> tuple[int, Lanes | None]:
        """Go to a state; lanes whose thread ends are gone."""
        if state >= 0:
            return state, lanes
        self.live &= ~lanes.mask
        return -1, None

    def _indirect(self, bound: Bound, lanes: Lanes, ready: dict[int, Lanes]) -> tuple[int, Lanes | None]:
        index = bound.index
        assert index is not None
        chosen = index[lanes.mask]
        most = int(chosen.max())
        if most >= len(bound.taken):
            leave = bound.block.leave
            assert leave is not None
            lane = int((lanes.mask & (index >= len(bound.taken))).argmax())
            raise self.services.fault("branch index", f"{most} of {len(bound.taken)} labels", leave, lane)
        values = np.unique(chosen)
        if len(values) == 1:
            return bound.taken[int(values[0])], lanes
        for value in values.tolist():
            _join(ready, bound.taken[value], Lanes(lanes.mask & (index == value)))
        return -1, None

    def _reset(self, first_block: int) -> None:
        poison = self.launch.poison
        for array in self.binder.registers.values():
            width = 1 if array.dtype == np.bool_ else array.dtype.itemsize * 8
            array[:] = poison & ((1 << width) - 1)
        for space in (self.services.shared, self.services.local):
            space.buffer.bytes[:] = poison & 0xFF
        self.services.copies.reset()
        for observer in self.services.observers:
            observer.emptied(self.services.shared.buffer)
        self.services.first_block = first_block
        self.live[:] = True
        self.waiting = Waiting(self.services, self.live)
        gx, gy, _ = self.launch.grid
        block = first_block + np.arange(self.lanes) // self.threads
        for name, value in (("x", block % gx), ("y", block // gx % gy), ("z", block // (gx * gy))):
            self.specials[f"ctaid.{name}"][:] = value


def _join(ready: dict[int, Lanes], state: int, lanes: Lanes) -> None:
    other = ready.get(state)
    ready[state] = lanes if other is None else lanes | other


@dataclass(slots=True)
class _Layout:
    """Places variables one after another."""

    size: int = 0
    at: dict[str, int] = field(default_factory=dict)

    def add(self, variable: Variable) -> None:
        self.size = -(-self.size // variable.align) * variable.align
        self.at[variable.name] = self.size
        self.size += variable.size or 0


def _place(
    module: Module, function: Function, memory: GlobalMemory, dynamic: int
) -> tuple[dict[str, int], int, int]:
    """Give every variable and parameter an address; return them, and the shared and local sizes."""
    shared, local = _Layout(), _Layout()
    symbols: dict[str, int] = {"param block": function.parameter_bytes}
    later: list[Variable] = []
    for variable in (*module.variables, *function.variables):
        if variable.space in ("global", "const"):
            symbols[variable.name] = memory.bind(np.frombuffer(variable.data, np.uint8).copy(), variable.name)
        elif variable.size is None:
            later.append(variable)
        else:
            (shared if variable.space == "shared" else local).add(variable)  # parameters of calls are local
    if later or dynamic:
        shared.size = -(-shared.size // 16) * 16
    for variable in later:  # all of them begin where the launch's bytes begin
        shared.at[variable.name] = shared.size
    total = shared.size + dynamic
    if total > MAX_SHARED or local.size > 1 << 19:
        raise PtxError(f"{total} bytes of shared and {local.size} of local memory", function.line)
    symbols |= {name: SHARED_BASE + at for name, at in shared.at.items()} | local.at
    symbols |= {f"param {item.name}": item.offset for item in function.parameters}
    return symbols, total, local.size
