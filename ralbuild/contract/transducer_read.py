"""The table file of a transducer, read and checked: a damaged or hostile one never runs.

Every number that the executors follow is in range, and redactions read whole characters: their candidates
begin, end and are given up between two. Where one did so within a character, the executors would not
agree on what the rest of it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from ralbuild.contract.arrays import read_arrays
from ralbuild.contract.codec import FormatError
from ralbuild.contract.transducer_table import (
    DEAD,
    DONE,
    EMIT,
    EVENT,
    FORMAT,
    MARK_BITS,
    MOD_97,
    NONE,
    REDACT_BITS,
    STATE_BITS,
    STATE_MASK,
    TransducerTable,
)
from ralbuild.contract.words import PAGE_BYTES, PAGES


def read_transducer(data: bytes, where: str) -> TransducerTable:
    """Parse and check a table: every state, program, string and rule number is in range.

    Raises:
        FormatError: naming the array that is wrong, or saying that a candidate cuts a character.
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
    _check_characters(table, where)
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
    if any(max(values, default=-1) >= limit for values, limit in bounds):
        raise FormatError(where, "a marker, redaction or mode names something that is not there")


def _states(entries: memoryview, classes: int) -> int:
    return len(entries) // classes if len(entries) % classes == 0 else 0


def _check_characters(table: TransducerTable, where: str) -> None:
    """Refuse redactions that cut a character; `_check_front` holds already.

    What is followed is the number of bytes that a character may still lack in a state: none are needed for
    a state that only ASCII leads to, and most are such. Broken bytes are characters of their own, so a state
    may always stand between two as well. Work: the rows' entries for bytes above ASCII, once, and those of
    states within a character at most three times.
    """
    rows = range(0, len(table.modes), 5)
    homes = {table.modes[row + 1] + after for row in rows if table.modes[row + 1] != NONE for after in (0, 1)}
    if not homes:
        return
    width, following = table.redact_classes, table.redact_next
    inner, leads = _classes_above_ascii(table)
    if any(following[home * width + klass] & DEAD not in homes for home in homes for klass in inner):
        raise FormatError(where, "a redaction may begin inside a character")
    lacks: dict[int, int] = {}
    """By state: bit k says that k + 1 bytes of a character may be missing."""
    for klass, missing in leads.items():
        for state, entry in enumerate(following[klass::width]):
            target = entry & DEAD
            if target != DEAD and not (target in homes and state in homes):
                _step_into(target, missing, homes, lacks, where)
    todo = list(lacks)
    while todo:
        state = todo.pop()
        for klass in inner:
            entry = following[state * width + klass]
            target = entry & DEAD
            if target != DONE and entry >> REDACT_BITS:  # it would end before this byte
                raise FormatError(where, "a redaction may end inside a character")
            if target != DEAD and _step_into(target, lacks[state] >> 1, homes, lacks, where):
                todo.append(target)


def _step_into(target: int, missing: int, homes: set[int], lacks: dict[int, int], where: str) -> bool:
    """Note that ``missing`` bytes may be missing in ``target``; return whether that is news."""
    if missing and (target == DONE or target in homes):
        raise FormatError(where, "a redaction may end inside a character")
    before = lacks.get(target, 0)
    if before | missing == before:
        return False
    lacks[target] = before | missing
    return True


def _classes_above_ascii(table: TransducerTable) -> tuple[list[int], dict[int, int]]:
    """Return the classes of bytes inside a character, and those of first bytes: bit k, k + 1 bytes follow."""
    inner: set[int] = set()
    leads: dict[int, int] = {}
    for symbol, klass in enumerate(table.redact_class):
        byte = symbol & 255
        if 0x80 <= byte < 0xC0:
            inner.add(klass)
        elif 0xC2 <= byte < 0xF5:
            follow = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
            leads[klass] = leads.get(klass, 0) | 1 << follow - 1
    return sorted(inner), leads
