"""The table file of a transducer: what is in it and how it is written.

`ralbuild.contract.transducer` says what the arrays mean, `ralbuild.contract.transducer_read` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.contract.arrays import Array, make_array, write_arrays

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
