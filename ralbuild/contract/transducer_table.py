"""The table file of a transducer: what is in it, how it is written, and how it is checked when read.

`ralbuild.contract.transducer` says what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ralbuild.contract.arrays import Array, make_array, read_arrays, write_arrays
from ralbuild.contract.codec import FormatError
from ralbuild.contract.words import PAGE_BYTES, PAGES

FORMAT = "ralbuild.transducer/3"
STATE_BITS = 17
STATE_MASK = (1 << STATE_BITS) - 1
PROGRAM_LIMIT = 1 << (32 - STATE_BITS)
COPY, EMIT, DROP, EVENT = range(4)
PASS_PROGRAM = 0
"""Program 0 is always ``COPY 1``: text that no rule can touch."""

MARK_BITS = 16
"""Low bits of an entry of ``mark_next``: the next state. The rest is the number of an action."""
REDACT_BITS = 18
"""Low bits of an entry of ``redact_next``: the next state, `DEAD` or `DONE`. The rest: a list of accepts."""
DEAD = (1 << REDACT_BITS) - 1
"""The candidate cannot go on with this symbol; it may have ended before it."""
DONE = DEAD - 1
"""The candidate ends with this symbol, whatever follows."""
ACCEPT_LIMIT = 1 << (32 - REDACT_BITS)
NONE = (1 << 32) - 1
"""In ``modes``: this mode has no markers, no redactions, or nothing to write at the end."""
KEEP, STOP = 1, 2
"""Flags of a marker: its own bytes are written; the text ends with it."""
NO_CHECK, LUHN, MOD_97 = range(3)
"""What must hold of a redaction's characters besides its form."""


@dataclass(frozen=True, slots=True)
class Front:
    """The two stages that read the text before the rules do; empty for tables that have none.

    Attributes:
        mark_class: byte to class, 256 entries; mark_next: next state and action, by state and class.
        mark_actions: (bytes released to the next stage, number of the marker that is complete or -1).
        markers: (rule id, flags, mode that begins after it).
        redact_class: symbol to class, 512 entries; redact_next: next state and list of accepts, by state
            and class. Of a list the candidate takes the first whose check holds.
        redact_final: list of accepts when the text ends, per state. List 0 is empty.
        accepts: lists of ``form << 3 | check << 1 | whether a word character came last``, best first.
        redactions: (rule id, string written instead) by form, for one set of redactions after the other.
        modes: (first state of markers, of redactions, of rules; program at the end of the text; first of
            ``redactions``). The state behind the first one is where redactions and rules go on after a word
            character.
    """

    modes: Sequence[tuple[int, int, int, int, int]]
    mark_class: Sequence[int] = (0,) * 256
    mark_next: Sequence[int] = (0,)
    mark_actions: Sequence[tuple[int, int]] = ((1, -1),)
    markers: Sequence[tuple[int, int, int]] = ()
    redact_class: Sequence[int] = (0,) * 512
    redact_next: bytes | Sequence[int] = (0,)
    redact_final: Sequence[int] = (0,)
    accepts: Sequence[Sequence[int]] = ((),)
    redactions: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class TransducerTable:
    """A compiled set of rules.

    Attributes:
        classes: C, the number of symbol classes of the rules.
        cls: symbol to class, 512 entries.
        trans: S * C packed entries, row per state.
        final: two programs a state: what decides the rest when the text ends, or a marker or a redaction
            that begins with no word character follows; and when one that begins with one follows.
        prog_off: P + 1 offsets into ``prog_ops``; one packed word ``argument << 2 | kind`` per operation.
        prog_ops: the packed operations of all programs.
        str_off: K + 1 offsets into ``pool``.
        pool: the bytes of all strings that are written.
        starts: first mode per profile.
        word_pages, word_bits: which characters are word characters (`ralbuild.contract.words`).
        modes: 5 words a mode; mark_*, marker_rows (3 words a row), redact_*, accept_*, redact_rows (2 words):
            as `Front` says; ``mark_actions`` has two words an action, the marker's number plus 1.
        max_held: the longest undecided text in bytes.
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
    word_pages: memoryview
    word_bits: memoryview
    modes: memoryview
    mark_class: memoryview
    mark_next: memoryview
    mark_actions: memoryview
    marker_rows: memoryview
    redact_class: memoryview
    redact_next: memoryview
    redact_final: memoryview
    accept_off: memoryview
    accept_rows: memoryview
    redact_rows: memoryview
    max_held: int
    rules: int

    @property
    def states(self) -> int:
        """S, the number of states of the rules."""
        return len(self.final) // 2

    @property
    def mark_classes(self) -> int:
        """Byte classes of the markers."""
        return max(self.mark_class) + 1

    @property
    def redact_classes(self) -> int:
        """Symbol classes of the redactions."""
        return max(self.redact_class) + 1


def write_transducer(
    *,
    cls: Sequence[int],
    trans: bytes | Sequence[int],
    final: Sequence[tuple[int, int]],
    programs: Sequence[Sequence[tuple[int, int]]],
    strings: Sequence[bytes],
    starts: Sequence[int],
    front: Front,
    words: tuple[bytes, bytes],
    max_held: int,
    rules: int,
) -> bytes:
    """Serialise a transducer; what may be bytes holds packed entries, little-endian."""
    classes = max(cls) + 1
    prog_off, ops = _joined([[arg << 2 | kind for kind, arg in program] for program in programs])
    str_off, _ = _joined(strings)
    accept_off, accept_rows = _joined(front.accepts)
    pool = b"".join(strings)
    redact_next = _packed(front.redact_next)
    arrays = {
        "cls": make_array("U8", cls),
        "trans": Array("U32", (len(final), classes), _packed(trans)),
        "final": make_array("U32", _flat(final)),
        "prog_off": make_array("U32", prog_off),
        "prog_ops": make_array("U32", ops),
        "str_off": make_array("U32", str_off),
        "pool": Array("U8", (len(pool),), pool),
        "starts": make_array("U32", starts),
        "word_pages": Array("U8", (len(words[0]),), words[0]),
        "word_bits": Array("U8", (len(words[1]),), words[1]),
        "modes": make_array("U32", _flat(front.modes)),
        "mark_class": make_array("U8", front.mark_class),
        "mark_next": make_array("U32", front.mark_next),
        "mark_actions": make_array("U32", _flat((free, marker + 1) for free, marker in front.mark_actions)),
        "marker_rows": make_array("U32", _flat(front.markers)),
        "redact_class": make_array("U8", front.redact_class),
        "redact_next": Array("U32", (len(redact_next) // 4,), redact_next),
        "redact_final": make_array("U32", front.redact_final),
        "accept_off": make_array("U32", accept_off),
        "accept_rows": make_array("U32", accept_rows),
        "redact_rows": make_array("U32", _flat(front.redactions)),
    }
    return write_arrays(arrays, {"format": FORMAT, "max_held": str(max_held), "rules": str(rules)})


def _packed(entries: bytes | Sequence[int]) -> bytes:
    return entries if isinstance(entries, bytes) else make_array("U32", entries).data


def _flat(rows: object) -> list[int]:
    return [value for row in rows for value in row]  # type: ignore[attr-defined]


def _joined(parts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return offsets and contents of variable-length rows in one array."""
    offsets = [0]
    out: list[int] = []
    for part in parts:
        out.extend(part)
        offsets.append(len(out))
    return offsets, out


def read_transducer(data: bytes, where: str) -> TransducerTable:
    """Parse and check a table: every state, program, string and rule number is in range.

    Raises:
        FormatError: naming the array that is wrong.
    """
    file = read_arrays(data, where)
    file.expect_format(FORMAT, where)
    final, trans = file.take("final", "U32"), file.take("trans", "U32")
    words = [
        "prog_off",
        "prog_ops",
        "str_off",
        "starts",
        "modes",
        "mark_next",
        "mark_actions",
        "marker_rows",
        "redact_next",
    ]
    words += ["redact_final", "accept_off", "accept_rows", "redact_rows"]
    table = TransducerTable(
        classes=2 * len(trans) // len(final) if len(final) else 0,
        cls=file.take("cls", "U8", 512),
        trans=trans,
        final=final,
        pool=file.take("pool", "U8"),
        word_pages=file.take("word_pages", "U8", PAGES),
        word_bits=file.take("word_bits", "U8"),
        mark_class=file.take("mark_class", "U8", 256),
        redact_class=file.take("redact_class", "U8", 512),
        max_held=file.number("max_held"),
        rules=file.number("rules"),
        **{name: file.take(name, "U32") for name in words},
    )
    _check_rules(table, where)
    _check_front(table, where)
    return table


def _check_rules(table: TransducerTable, where: str) -> None:
    programs, strings = len(table.prog_off) - 1, len(table.str_off) - 1
    whole = len(table.final) % 2 == 0 and len(table.trans) == table.states * table.classes
    if not whole or not table.states or not len(table.starts):
        raise FormatError(where, "the table has no states or a ragged transition array")
    if max(table.cls) >= table.classes:
        raise FormatError(where, "a symbol class is out of range")
    entries = set(table.trans)
    if max(entries) >> STATE_BITS >= programs or max(table.final) >= programs:
        raise FormatError(where, "a program number is out of range")
    if max(entry & STATE_MASK for entry in entries) >= table.states:
        raise FormatError(where, "a state number is out of range")
    for word in table.prog_ops:
        kind, arg = word & 3, word >> 2
        if (kind == EMIT and arg >= strings) or (kind == EVENT and arg >= table.rules):
            raise FormatError(where, "an operation names a string or rule that is not there")
    for name, offsets, size in (
        ("program", table.prog_off, len(table.prog_ops)),
        ("string", table.str_off, len(table.pool)),
        ("accept", table.accept_off, len(table.accept_rows)),
    ):
        if not len(offsets) or offsets[-1] != size or list(offsets) != sorted(offsets):
            raise FormatError(where, f"the {name} offsets are not ascending")
    if (max(table.word_pages) + 1) * PAGE_BYTES > len(table.word_bits):
        raise FormatError(where, "the table of word characters is cut off")


def _check_front(table: TransducerTable, where: str) -> None:
    """Check the stages before the rules; an array of the wrong shape fails the same as a wrong number."""
    marks = _states(table.mark_next, table.mark_classes)
    redacts = _states(table.redact_next, table.redact_classes)
    modes, markers = len(table.modes) // 5, len(table.marker_rows) // 3
    lists, rows = len(table.accept_off) - 1, len(table.redact_rows) // 2
    strings, programs = len(table.str_off) - 1, len(table.prog_off) - 1
    low = (1 << MARK_BITS) - 1
    entries = set(table.redact_next)
    redacting = [row for row in range(0, 5 * modes, 5) if table.modes[row + 1] != NONE]
    forms = 1 + max((entry >> 3 for entry in table.accept_rows), default=-1)
    bounds: list[tuple[Iterable[int], int]] = [
        (table.starts, modes),
        ([entry & low for entry in table.mark_next], marks),
        ([entry >> MARK_BITS for entry in table.mark_next], len(table.mark_actions) // 2),
        (table.mark_actions[1::2], markers + 1),
        (table.marker_rows[0::3], table.rules),
        (table.marker_rows[2::3], modes),
        ({entry & DEAD for entry in entries} - {DEAD, DONE}, min(redacts, DONE)),
        ({entry >> REDACT_BITS for entry in entries}, lists),
        (table.redact_final, lists),
        ([entry >> 1 & 3 for entry in table.accept_rows], MOD_97 + 1),
        (table.redact_rows[0::2], table.rules),
        (table.redact_rows[1::2], strings),
        ([state for state in table.modes[0::5] if state != NONE], marks),
        ([table.modes[row + 1] + 1 for row in redacting], redacts),
        ([table.modes[row + 2] + 1 for row in redacting], table.states),
        ([table.modes[row + 4] + forms for row in redacting], rows + 1),
        (table.modes[2::5], table.states),
        ([program for program in table.modes[3::5] if program != NONE], programs),
    ]
    whole = (len(table.modes) % 5, len(table.marker_rows) % 3, len(table.redact_rows) % 2)
    if any(whole) or len(table.redact_final) != redacts or not modes:
        raise FormatError(where, "a table of markers, redactions or modes is ragged")
    if any(value >= limit for values, limit in bounds for value in values):
        raise FormatError(where, "a marker, redaction or mode names something that is not there")


def _states(entries: memoryview, classes: int) -> int:
    return len(entries) // classes if len(entries) % classes == 0 else 0
