"""The rules of all routes as one byte-level transducer, and the plain executor that defines it.

The table is deterministic. For a state ``q`` and a byte ``b`` the entry ``trans[q * C + cls[b]]``
holds the next state in its low `STATE_BITS` bits and a program number above them. A program is a
short list of operations on the bytes that are read but not yet decided ("pending"):

    COPY n   move n pending bytes to the output
    EMIT k   write string k of the pool
    DROP n   forget n pending bytes
    EVENT r  count one match of rule r

When the text ends, ``final[q]`` is the program that decides what is pending. A route is a start
state. This executor is the oracle: the CPU target runs it, and the GPU kernel must agree with it
byte for byte. Method: Mihov and Schulz 2007, subsequential transducers for leftmost-longest
rewriting; docs/rules.md gives the semantics.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ralbuild.contract.arrays import Array, make_array, read_arrays, write_arrays
from ralbuild.contract.codec import FormatError

FORMAT = "ralbuild.transducer/1"
STATE_BITS = 18
STATE_MASK = (1 << STATE_BITS) - 1
PROGRAM_LIMIT = 1 << (32 - STATE_BITS)
COPY, EMIT, DROP, EVENT = range(4)
PASS_PROGRAM = 0
"""Program 0 is always ``COPY 1``: text that no rule can touch."""


@dataclass(frozen=True, slots=True)
class TransducerTable:
    """A compiled set of rules.

    Attributes:
        classes: C, the number of byte classes.
        cls: byte to class, 256 entries.
        trans: S * C packed entries, row per state.
        final: program to run when the text ends, per state.
        prog_off: P + 1 offsets into ``prog_ops``; one packed word ``argument << 2 | kind`` per operation.
        prog_ops: the packed operations of all programs.
        str_off: K + 1 offsets into ``pool``.
        pool: the bytes of all strings that EMIT writes.
        starts: start state per profile.
        max_held: the longest pending text, in bytes, that any state can hold back.
        rules: number of rule ids that EVENT may name.
    """

    classes: int
    cls: memoryview
    trans: memoryview
    final: memoryview
    prog_off: memoryview
    prog_ops: memoryview
    str_off: memoryview
    pool: memoryview
    starts: memoryview
    max_held: int
    rules: int

    @property
    def states(self) -> int:
        """S, the number of states."""
        return len(self.final)


def write_transducer(
    *,
    cls: list[int],
    rows: list[list[int]],
    final: list[int],
    programs: list[list[tuple[int, int]]],
    strings: list[bytes],
    starts: list[int],
    max_held: int,
    rules: int,
) -> bytes:
    """Serialise a transducer; ``rows`` hold packed entries, ``programs`` hold (kind, argument) pairs."""
    classes = max(cls) + 1
    prog_off: list[int] = [0]
    ops: list[int] = []
    for program in programs:
        ops.extend(arg << 2 | kind for kind, arg in program)
        prog_off.append(len(ops))
    str_off = [0]
    for text in strings:
        str_off.append(str_off[-1] + len(text))
    pool = b"".join(strings)
    arrays = {
        "cls": make_array("U8", cls),
        "trans": make_array("U32", [entry for row in rows for entry in row], (len(rows), classes)),
        "final": make_array("U32", final),
        "prog_off": make_array("U32", prog_off),
        "prog_ops": make_array("U32", ops),
        "str_off": make_array("U32", str_off),
        "pool": Array("U8", (len(pool),), pool),
        "starts": make_array("U32", starts),
    }
    metadata = {"format": FORMAT, "max_held": str(max_held), "rules": str(rules)}
    return write_arrays(arrays, metadata)


def read_transducer(data: bytes, where: str) -> TransducerTable:
    """Parse and check a table: every state, program, string and rule number is in range.

    Raises:
        FormatError: naming the array that is wrong.
    """
    file = read_arrays(data, where)
    file.expect_format(FORMAT, where)
    final = file.take("final", "U32")
    trans = file.take("trans", "U32")
    states = len(final)
    classes = len(trans) // states if states else 0
    table = TransducerTable(
        classes=classes,
        cls=file.take("cls", "U8", 256),
        trans=trans,
        final=final,
        prog_off=file.take("prog_off", "U32"),
        prog_ops=file.take("prog_ops", "U32"),
        str_off=file.take("str_off", "U32"),
        pool=file.take("pool", "U8"),
        starts=file.take("starts", "U32"),
        max_held=file.number("max_held"),
        rules=file.number("rules"),
    )
    _check_ranges(table, where)
    return table


def _check_ranges(table: TransducerTable, where: str) -> None:
    programs = len(table.prog_off) - 1
    strings = len(table.str_off) - 1
    if not table.states or len(table.trans) != table.states * table.classes or not len(table.starts):
        raise FormatError(where, "the table has no states or a ragged transition array")
    if max(table.cls) >= table.classes:
        raise FormatError(where, "a byte class is out of range")
    largest = max(table.trans)
    if largest >> STATE_BITS >= programs or max(table.final) >= programs:
        raise FormatError(where, "a program number is out of range")
    if max(entry & STATE_MASK for entry in table.trans) >= table.states or max(table.starts) >= table.states:
        raise FormatError(where, "a state number is out of range")
    for word in table.prog_ops:
        kind, arg = word & 3, word >> 2
        if (kind == EMIT and arg >= strings) or (kind == EVENT and arg >= table.rules):
            raise FormatError(where, "an operation names a string or rule that is not there")
    if list(table.prog_off) != sorted(table.prog_off) or table.prog_off[-1] != len(table.prog_ops):
        raise FormatError(where, "the program offsets are not ascending")
    if list(table.str_off) != sorted(table.str_off) or table.str_off[-1] != len(table.pool):
        raise FormatError(where, "the string offsets are not ascending")


class Transducer:
    """A table made ready to run: programs unpacked once, shared by all slots."""

    def __init__(self, table: TransducerTable) -> None:
        self.table = table
        pool = bytes(table.pool)
        strings = [pool[a:b] for a, b in zip(table.str_off, table.str_off[1:], strict=False)]
        self.programs: list[tuple[tuple[int, int, bytes], ...]] = []
        for a, b in zip(table.prog_off, table.prog_off[1:], strict=False):
            words = [(word & 3, word >> 2) for word in table.prog_ops[a:b]]
            self.programs.append(tuple((k, n, strings[n] if k == EMIT else b"") for k, n in words))
        self.cls = bytes(table.cls)
        self.trans = table.trans
        self.final = table.final
        self.classes = table.classes

    def start(self, profile: int) -> Slot:
        """Return a fresh slot in the start state of ``profile``."""
        return Slot(self, self.table.starts[profile])

    def rewrite(self, profile: int, data: bytes) -> tuple[bytes, list[int]]:
        """Rewrite a whole text; return the output and the rule ids that matched, in order."""
        slot = self.start(profile)
        out = slot.feed(data) + slot.finish()
        return out, slot.events


@dataclass(slots=True)
class Slot:
    """One text being rewritten.

    Attributes:
        machine: the shared table.
        state: current state.
        pending: bytes read and not yet decided; never longer than the table's ``max_held``.
        events: rule ids that matched, in order; the reader may clear it.
    """

    machine: Transducer
    state: int
    pending: bytearray = field(default_factory=bytearray)
    events: list[int] = field(default_factory=list)

    def feed(self, data: bytes) -> bytes:
        """Read the bytes of one token and return what is now decided."""
        machine = self.machine
        trans, cls, classes = machine.trans, machine.cls, machine.classes
        state, pending = self.state, self.pending
        out = bytearray()
        for byte in data:
            entry = trans[state * classes + cls[byte]]
            state = entry & STATE_MASK
            program = entry >> STATE_BITS
            pending.append(byte)
            if program == PASS_PROGRAM:
                out.append(pending[0])
                del pending[0]
            else:
                self._run(program, out)
        self.state = state
        return bytes(out)

    def finish(self) -> bytes:
        """End the text: decide what is pending and return it, with anything appended at the end."""
        out = bytearray()
        self._run(self.machine.final[self.state], out)
        return bytes(out)

    def _run(self, program: int, out: bytearray) -> None:
        pending = self.pending
        for kind, arg, text in self.machine.programs[program]:
            if kind == COPY:
                out += pending[:arg]
                del pending[:arg]
            elif kind == EMIT:
                out += text
            elif kind == DROP:
                del pending[:arg]
            else:
                self.events.append(arg)
