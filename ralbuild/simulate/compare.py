"""Runs the built-in kernels' PTX over token sequences and compares with the plain executors, bit by bit.

The whole of every buffer that a kernel may change is compared after every launch, so a byte written in
the wrong slot, or a byte too many, is a difference too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ralbuild.contract.bundle import Kernel
from ralbuild.contract.transducer import Slot, Transducer
from ralbuild.simulate.buffers import Tables, arguments, slot_buffers, table_buffers
from ralbuild.simulate.counters import Counters
from ralbuild.simulate.faults import Fault, FaultError
from ralbuild.simulate.lanes import Array
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.races import Race
from ralbuild.simulate.services import Observer
from ralbuild.simulate.session import Argument, Options, Session

SLOTS = 64
"""Cases that run side by side."""
_STATE = ("fst_state", "front", "read_pos", "pending_pos", "output_len", "output", "ring", "rule_events")


@dataclass(frozen=True, slots=True)
class Case:
    """A text to rewrite: the profile whose rules apply, and its tokens; an id of ``eos_ids`` ends it."""

    profile: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that is not as the executor says.

    Attributes:
        case: number of the case.
        step: number of the token in it.
        state: state of the transducer or ban automaton before the step.
        buffer: what differs.
        wanted, found: as text.
        rules: ids of the rules that matched in this step.
    """

    case: int
    slot: int
    step: int
    token: int
    state: int
    buffer: str
    wanted: str
    found: str
    rules: tuple[int, ...] = ()

    def __str__(self) -> str:
        rules = f", rules {', '.join(map(str, self.rules))}" if self.rules else ""
        where = f"case {self.case} (slot {self.slot}), token {self.step} (id {self.token})"
        return f"{where}, state {self.state}{rules}: {self.buffer} needs {self.wanted}, found {self.found}"


@dataclass(slots=True)
class Comparison:
    """What came of one kernel on one architecture.

    Attributes:
        ties: draws that differ only because two scores are too near to tell apart.
        printed: what a user's kernel printed.
        blocks, warps: of a launch.
    """

    cases: int = 0
    launches: int = 0
    tokens: int = 0
    ties: int = 0
    difference: Difference | None = None
    fault: Fault | None = None
    races: tuple[Race, ...] = ()
    counters: Counters | None = None
    printed: tuple[str, ...] = ()
    blocks: int = 0
    warps: int = 0

    def finish(self, session: Session) -> None:
        """Take what a session knows at its end."""
        self.races, self.counters = session.races, session.counters
        self.printed = tuple(session.printed)
        self.blocks, self.warps = session.blocks, session.warps

    @property
    def ok(self) -> bool:
        """True when nothing is wrong."""
        return self.difference is None and self.fault is None and not self.races


def compare_transduce(
    module: Module,
    kernel: Kernel,
    tables: Tables,
    cases: Sequence[Case],
    options: Options | None = None,
    slots: int = SLOTS,
    observers: Sequence[Observer] = (),
) -> Comparison:
    """Push every case through the `transduce` kernel, ``slots`` at a time."""
    run = _TransduceRun(module, kernel, tables, options or Options(), slots, observers)
    result = Comparison()
    for first in range(0, len(cases), slots):
        if not guarded(result, partial(run.batch, cases[first : first + slots], first, result)):
            break
    result.finish(run.session)
    return result


def guarded(result: Comparison, work: Callable[[], None]) -> bool:
    """Do a batch; tell whether to go on."""
    try:
        work()
    except FaultError as error:
        result.fault = error.fault
    return result.fault is None and result.difference is None


class _TransduceRun:
    """The kernel and the executor side by side, one row of the buffers a case."""

    def __init__(
        self,
        module: Module,
        kernel: Kernel,
        tables: Tables,
        options: Options,
        slots: int,
        observers: Sequence[Observer],
    ) -> None:
        self.tables = tables
        self.machine = Transducer(tables.transducer)
        self.fixed = table_buffers(tables)
        self.state = slot_buffers(tables, slots, 1)
        self.slots = slots
        bound = arguments(kernel, self.fixed | self.state)
        self.before = {name: _copy(value) for name, value in self.fixed.items()}
        self.session = Session(module, kernel.entry, (slots, 1, 1), bound, options, observers)

    def array(self, name: str) -> Array:
        """Return a buffer that changes."""
        value = self.state[name]
        assert isinstance(value, np.ndarray)
        return value

    def batch(self, cases: Sequence[Case], first: int, result: Comparison) -> None:
        """Run up to ``slots`` cases to their ends."""
        twin = _Twin(self, cases)
        longest = max(len(case.tokens) for case in cases)
        for step in range(longest + 1):  # one launch more: ended and idle slots must stay as they are
            token = self.array("token")
            token[:] = -1
            for slot, case in enumerate(cases):
                if step < len(case.tokens):
                    token[slot] = case.tokens[step]
            states = self.array("fst_state").copy()
            self.session.launch()
            result.launches += 1
            result.tokens += int(np.count_nonzero(token >= 0))
            events = twin.step(token)
            for name in _STATE:
                found, wanted = self.array(name), twin.wanted[name]
                if not np.array_equal(found, wanted):
                    result.difference = self._describe(name, first, step, token, states, events, wanted)
                    return
        result.cases += len(cases)
        for name, value in self.before.items():
            if not np.array_equal(value, self.fixed[name]):
                result.difference = Difference(
                    first, 0, 0, -1, 0, name, "a table that nothing writes", "a change"
                )

    def _describe(
        self,
        name: str,
        first: int,
        step: int,
        token: Array,
        states: Array,
        events: list[list[int]],
        wanted: Array,
    ) -> Difference:
        found = self.array(name)
        if name == "rule_events":
            rule = int(np.flatnonzero(found != wanted)[0])
            return Difference(first, 0, step, -1, 0, name, str(wanted[rule]), str(found[rule]), (rule,))
        rows = np.flatnonzero((found != wanted).reshape(self.slots, -1).any(axis=1))
        slot = int(rows[0])
        return Difference(
            first + slot,
            slot,
            step,
            int(token[slot]),
            int(states[slot]),
            name,
            _show(wanted[slot], found[slot]),
            _show(found[slot], wanted[slot]),
            tuple(events[slot]) if slot < len(events) else (),
        )


def _copy(value: Argument) -> Argument:
    return value.copy() if isinstance(value, np.ndarray) else value


def _show(row: Array, other: Array) -> str:
    """Return a number, or the bytes from shortly before the first difference."""
    if row.ndim == 0:
        return str(int(row))
    at = max(0, int(np.flatnonzero(row != other)[0]) - 8)
    return f"{bytes(row[at : at + 24])!r} from byte {at}"


@dataclass(slots=True)
class _Twin:
    """The executor's view of the same buffers."""

    run: _TransduceRun
    cases: Sequence[Case]
    texts: list[Slot | None] = field(init=False)
    begun: list[bool] = field(init=False)
    wanted: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        run = self.run
        state, events = run.array("fst_state"), run.array("rule_events")
        state[:] = -1
        texts = [run.machine.start(case.profile) for case in self.cases]
        self.texts = list(texts)
        self.begun = [False] * len(self.cases)
        for slot, text in enumerate(texts):
            state[slot] = text.state
            run.array("front")[slot] = text.registers(0)
            run.array("front")[slot, 0] |= run.tables.vocab.strips << 16
        for name in ("read_pos", "pending_pos"):
            run.array(name)[:] = 0
        for name in ("ring", "output"):  # what is there before must not matter, and must stay
            garbage = run.array(name)
            garbage[...] = np.arange(garbage.size, dtype=np.uint64).reshape(garbage.shape) % 251 + 1
        events[:] = 0
        self.wanted = {name: run.array(name).copy() for name in _STATE}

    def step(self, tokens: Array) -> list[list[int]]:
        """Advance every text by its token; return the rules that matched, by slot."""
        self.wanted["output_len"][:] = 0
        return [self._advance(slot, int(tokens[slot])) for slot in range(len(self.texts))]

    def _advance(self, slot: int, token: int) -> list[int]:
        text, wanted, tables = self.texts[slot], self.wanted, self.run.tables
        if text is None or not 0 <= token < len(tables.vocab):
            return []
        ended = token in tables.eos_ids
        data = b"" if ended else tables.vocab.at(token, first=not self.begun[slot])
        self.begun[slot] |= not ended and bool(tables.vocab[token])
        out = text.finish() if ended else text.feed(data)
        if text.stopped and not ended:
            out, ended = out + text.finish(), True
        events, text.events = text.events, []
        ring, read = wanted["ring"], int(wanted["read_pos"][slot])
        for k, byte in enumerate(data):
            ring[slot, (read + k) % ring.shape[1]] = byte
        kept = out[: wanted["output"].shape[1]]
        wanted["output"][slot, : len(kept)] = np.frombuffer(kept, np.uint8)
        wanted["output_len"][slot] = len(out)
        wanted["read_pos"][slot] = read + len(data)
        wanted["pending_pos"][slot] = read + len(data) - len(text.pending)
        wanted["fst_state"][slot] = -1 if ended else text.state
        if not ended:
            fresh = (not self.begun[slot] and tables.vocab.strips) << 16
            wanted["front"][slot] = text.registers(read + len(data))
            wanted["front"][slot, 0] |= fresh
        for rule in events:
            wanted["rule_events"][rule] += 1
        if ended:
            self.texts[slot] = None
        return events
