"""The rules of all routes as one machine over text, and the plain executor that defines it.

A text goes through three stages, each of which holds back only what it cannot decide:

1. Markers (stop strings, openings and closings of spans): an automaton over bytes. An action releases
   bytes to the next stage; when a marker is complete, all that was released is decided as at the end
   of a text, and the next mode begins.
2. Kinds (card numbers and the like): one candidate at a time, from the first place where one can begin.
   What a candidate's form accepts counts when its check (Luhn, mod 97) holds, the longest wins. When
   it can go no further, it is replaced, or its first character is released and the rest is read again.
3. Rules: for a state ``q`` and a symbol ``s`` the entry ``trans[q * C + cls[s]]`` holds the next state
   in its low `STATE_BITS` bits and a program number above them. A program is a short list of
   operations on what is read but not yet decided ("pending"):

       COPY n   move n pending bytes to the output
       EMIT k   write string k of the pool
       DROP n   forget n pending bytes
       EVENT r  count one match of rule r

   ``final[q]`` is the program that decides what is pending when the text, or its part, ends.

Kinds and rules read whole characters: the last bytes of one that is not complete wait. This executor is
the oracle: the CPU target runs it, and the GPU kernel must agree with it byte for byte. `Slot.walk` is
the definition; `Slot.feed` does the same and remembers what tokens do (`ralbuild.contract.memo`). Method
of stage 3: Mihov and Schulz 2007, subsequential transducers; docs/rules.md gives the meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ralbuild.contract.memo import LONGEST, Memo, Part, Place, Step, first_slice, written
from ralbuild.contract.transducer_table import (
    COPY,
    DEAD,
    DROP,
    EMIT,
    EVENT,
    FRONT_BITS,
    KEEP,
    LUHN,
    MOD_97,
    NONE,
    PASS_PROGRAM,
    PROGRAM_LIMIT,
    STATE_BITS,
    STATE_MASK,
    STOP,
    Front,
    TransducerTable,
    read_transducer,
    write_transducer,
)
from ralbuild.contract.words import WordTable, unfinished

__all__ = [
    "COPY", "DROP", "EMIT", "EVENT", "PASS_PROGRAM", "PROGRAM_LIMIT", "STATE_BITS", "STATE_MASK", "Front",
    "Slot", "Transducer", "TransducerTable", "holds", "read_transducer", "write_transducer",
]  # fmt: skip

_FRONT_MASK = (1 << FRONT_BITS) - 1


@dataclass(frozen=True, slots=True)
class _Mode:
    """One row of ``modes``; -1 for what the mode does not have."""

    mark: int
    kind: int
    rule: int
    end: int


class Transducer:
    """A table made ready to run: programs unpacked once, shared by all slots."""

    def __init__(self, table: TransducerTable) -> None:
        self.table = table
        pool = bytes(table.pool)
        self.strings = [pool[a:b] for a, b in zip(table.str_off, table.str_off[1:], strict=False)]
        self.programs: list[tuple[tuple[int, int, bytes], ...]] = []
        for a, b in zip(table.prog_off, table.prog_off[1:], strict=False):
            words = [(word & 3, word >> 2) for word in table.prog_ops[a:b]]
            self.programs.append(tuple((k, n, self.strings[n] if k == EMIT else b"") for k, n in words))
        self.words = WordTable(table.word_pages, table.word_bits)
        plain = [-1 if value == NONE else value for value in table.modes]
        self.modes = [_Mode(*plain[row : row + 4]) for row in range(0, len(plain), 4)]
        rows = table.kind_rows
        self.kinds = list(zip(rows[0::3], rows[1::3], rows[2::3], strict=True))
        self.accepts = [
            tuple(table.accept_rows[a:b])
            for a, b in zip(table.accept_off, table.accept_off[1:], strict=False)
        ]
        self.mark_classes, self.kind_classes = table.mark_classes, table.kind_classes
        self._low = (bytes(table.cls[:256]), bytes(table.kind_class[:256]))
        self._high = (bytes(table.cls[256:]), bytes(table.kind_class[256:]))
        self._spelled: dict[str, tuple[bytes, bytes]] = {}
        self.memo = Memo()

    def start(self, profile: int) -> Slot:
        """Return a fresh slot for ``profile``."""
        mode = self.table.starts[profile]
        row = self.modes[mode]
        here = self.memo.place((mode, row.kind, row.rule, 0))
        return Slot(self, mode, row.mark, row.kind, row.rule, here)

    def rewrite(self, profile: int, data: bytes) -> tuple[bytes, list[int]]:
        """Rewrite a whole text; return the output and the rule ids that matched, in order."""
        slot = self.start(profile)
        out = slot.feed(data) + slot.finish()
        return out, slot.events

    def classes(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the class of every byte of whole characters, for the rules and for the kinds."""
        if data.isascii():
            return data.translate(self._low[0]), data.translate(self._low[1])
        spelled = [self._spell(char) for char in data.decode("utf-8", "surrogateescape")]
        return b"".join([rule for rule, _ in spelled]), b"".join([kind for _, kind in spelled])

    def _spell(self, char: str) -> tuple[bytes, bytes]:
        found = self._spelled.get(char)
        if found is None:
            data = char.encode("utf-8", "surrogateescape")
            sides = self._high if len(data) > 1 and self.words.is_word(ord(char)) else self._low
            found = data.translate(sides[0]), data.translate(sides[1])
            if len(self._spelled) < 1 << 16:
                self._spelled[char] = found
        return found


@dataclass(slots=True)
class Slot:
    """One text being rewritten. Positions count in ``raw``; bytes before ``at`` are decided.

    A settled slot has read all that it holds, and neither a marker nor a kind is begun: all positions
    are the end of ``raw`` and wait to be written down (`_wake`) until something needs them.

    Attributes:
        machine: the shared table.
        mode, mark, kind, state: the mode, and the state of each stage.
        here: where a settled slot is: the positions are not written down, as above.
        events: rule ids that matched, in order; the reader may clear it.
        stopped: a stop string has ended the text; what follows is not read.
        raw: the bytes that are not decided.
        read: how far the rules have read; start: how far the kinds have released, a candidate begins here.
        kind_at: how far the kinds have read; free: how far the markers have released; seen: have read.
        best_end, best: end and row of the longest accept of the candidate.
    """

    machine: Transducer
    mode: int
    mark: int
    kind: int
    state: int
    here: Place | None
    events: list[int] = field(default_factory=list)
    stopped: bool = False
    raw: bytes = b""
    rule_class: bytearray = field(default_factory=bytearray)
    kind_class: bytearray = field(default_factory=bytearray)
    at: int = 0
    read: int = 0
    start: int = 0
    kind_at: int = 0
    free: int = 0
    seen: int = 0
    best_end: int = 0
    best: int = -1

    @property
    def pending(self) -> bytes:
        """The bytes read and not yet decided; never longer than the table's ``max_held``."""
        return self.raw

    def registers(self, end: int) -> tuple[int, ...]:
        """Return the row of ``front`` when ``end`` bytes were read in all: docs/kernels.md."""
        self._wake()
        base = end - len(self.raw)
        places = (base + self.free, base + self.kind_at, base + self.start)
        best_end = base + self.best_end if self.best >= 0 else 0
        return (self.mode, self.mark, self.kind, *places, self.best, best_end)

    def feed(self, data: bytes) -> bytes:
        """Read the bytes of one token and return what is now decided; nothing after a stop string."""
        if self.here is None:
            return self.walk(data)
        step = self.here.get(data)
        if step is None:
            return self._walk_and_remember(self.here, data)
        first, more, self.here, self.mode, self.kind, self.state, keep, events = step
        text = self.raw + data
        self.raw = text[-keep:] if keep else b""
        if events:
            self.events += events
        return text[first] + written(text, more) if more else text[first]

    def walk(self, data: bytes) -> bytes:
        """Do what `feed` does, by every byte of ``data``."""
        parts, text = self._walk(data)
        return written(text, parts)

    def _walk_and_remember(self, before: Place, data: bytes) -> bytes:
        known = len(self.events)
        parts, text = self._walk(data)
        if self.here is not None and len(data) <= LONGEST:
            first, more = first_slice(parts)
            numbers = self.mode, self.kind, self.state, len(self.raw)
            step = Step(first, more, self.here, *numbers, tuple(self.events[known:]))
            self.machine.memo.put(before, data, step)
        return written(text, parts)

    def _walk(self, data: bytes) -> tuple[list[Part], bytes]:
        """Read ``data``; return what is decided, and the bytes that its slices are of."""
        out: list[Part] = []
        if self.stopped:
            return out, b""
        self._wake()
        text = self.raw = self.raw + data
        while self.seen < len(text) and not self.stopped:
            if self.machine.modes[self.mode].mark < 0:
                self.free = self.seen = len(text)
            else:
                self._read_marker(out)
        if self.stopped:
            self.raw = b""
        else:
            self._advance(out, last=False)
            self._forget()
            home, end = self.machine.modes[self.mode], len(self.raw)
            places = self.read, self.start, self.kind_at, self.free, self.seen
            if self.mark == home.mark and self.best < 0 and places == (end,) * 5:
                self.here = self.machine.memo.place((self.mode, self.kind, self.state, end))
        return out, text

    def _wake(self) -> None:
        """Write down the positions of a settled slot."""
        if self.here is not None:
            self.here = None
            self.read = self.start = self.kind_at = self.free = self.seen = len(self.raw)
            self.rule_class, self.kind_class = bytearray(len(self.raw)), bytearray(len(self.raw))
            self.mark = self.machine.modes[self.mode].mark

    def finish(self) -> bytes:
        """End the text: decide what is pending and return it, with anything appended at the end."""
        rest, appended = self.close()
        return rest + appended

    def close(self) -> tuple[bytes, bytes]:
        """End the text; return what was pending, and what the rules append to any text."""
        rest: list[Part] = []
        text = self.raw
        if not self.stopped:
            self._wake()
            self.free = self.seen = len(text)
            self._settle(rest)
            self._forget()
        return written(text, rest), self.abandon()

    def abandon(self) -> bytes:
        """End the text and drop what is pending; return what the rules append to any text."""
        appended: list[Part] = []
        end = self.machine.modes[self.mode].end
        if end >= 0:
            self._run(end, appended)
        return written(self.raw, appended)

    def _forget(self) -> None:
        """Let go of what is decided."""
        done = self.at
        if done:
            self.raw = self.raw[done:]
            del self.rule_class[:done], self.kind_class[:done]
            self.at = 0
            # Nothing that is not decided was read less far; max() only keeps a damaged table in bounds.
            self.read = max(0, self.read - done)
            self.start = max(0, self.start - done)
            self.kind_at = max(0, self.kind_at - done)
            self.free = max(0, self.free - done)
            self.seen = max(0, self.seen - done)
            self.best_end -= done

    # Stage 1: markers

    def _read_marker(self, out: list[Part]) -> None:
        machine, table = self.machine, self.machine.table
        entry = table.mark_next[self.mark * machine.mark_classes + table.mark_class[self.raw[self.seen]]]
        self.mark, action = entry & _FRONT_MASK, entry >> FRONT_BITS
        self.seen += 1
        self.free = min(self.free + table.mark_actions[2 * action], self.seen)
        marker = table.mark_actions[2 * action + 1]
        if marker:
            self._pass_marker(marker - 1, out)

    def _pass_marker(self, number: int, out: list[Part]) -> None:
        """Decide what came before the marker, and begin the mode that follows it."""
        rule, flags, mode = self.machine.table.marker_rows[3 * number : 3 * number + 3]
        self._settle(out)
        if flags & KEEP:
            out.append(slice(self.free, self.seen))
        self.events.append(rule)
        self.at = self.read = self.start = self.kind_at = self.free = self.seen
        gap = bytes(self.seen - len(self.rule_class))
        self.rule_class += gap
        self.kind_class += gap
        row = self.machine.modes[mode]
        self.mode, self.mark, self.kind, self.state = mode, row.mark, row.kind, row.rule
        if flags & STOP:
            self.stopped = True

    def _settle(self, out: list[Part]) -> None:
        """Decide everything that the markers have released."""
        self._advance(out, last=True)
        self._run(self.machine.table.final[self.state], out)
        self.state = self.machine.modes[self.mode].rule

    # Stage 2: kinds

    def _advance(self, out: list[Part], *, last: bool) -> None:
        """Read the whole characters that are released; with ``last`` no more follow."""
        known = len(self.rule_class)
        fresh = self.raw[known : self.free]
        if not last:
            fresh = fresh[: len(fresh) - unfinished(fresh)]
        rule, kind = self.machine.classes(fresh)
        self.rule_class += rule
        self.kind_class += kind
        if self.kind < 0:
            self.start = self.kind_at = len(self.rule_class)
        else:
            self._read_kinds(out)
            while last and self.start < self.kind_at:
                self._accept(self.machine.table.kind_final[self.kind])
                self._resolve(out)
                self._read_kinds(out)
        self._read_rules(out)

    def _read_kinds(self, out: list[Part]) -> None:
        machine, table, classes = self.machine, self.machine.table, self.kind_class
        home = machine.modes[self.mode].kind
        while self.kind_at < len(classes):
            entry = table.kind_next[self.kind * machine.kind_classes + classes[self.kind_at]]
            if entry >> FRONT_BITS:
                self._accept(entry >> FRONT_BITS)
            target = entry & _FRONT_MASK
            if target == DEAD:
                self._resolve(out)
                continue
            self.kind = target
            self.kind_at += 1
            if target in (home, home + 1):
                self.start = self.kind_at

    def _accept(self, number: int) -> None:
        """The candidate may end here: take it for the first of its kinds whose check holds."""
        if self.kind_at == self.start:
            return  # no table that we make asks for this
        for row in self.machine.accepts[number]:
            if holds(self.machine.kinds[row][1], self.raw[self.start : self.kind_at]):
                self.best, self.best_end = row, self.kind_at
                return

    def _resolve(self, out: list[Part]) -> None:
        """Replace the candidate, or release its first character, and read on after that."""
        home = self.machine.modes[self.mode]
        self.kind = home.kind
        if self.best >= 0:
            rule, _, string = self.machine.kinds[self.best]
            self._read_rules(out)
            self._run(self.machine.table.final[self.state], out)
            out.append(self.machine.strings[string])
            self.events.append(rule)
            self.at = self.read = self.start = self.kind_at = self.best_end
            self.state = home.rule
            self.best = -1
            return
        size, word = self.machine.words.character(self.raw, self.start)
        self.kind += word
        self.start += size
        self.kind_at = self.start

    # Stage 3: rules

    def _read_rules(self, out: list[Part]) -> None:
        machine, classes = self.machine, self.rule_class
        trans, width, state = machine.table.trans, machine.table.classes, self.state
        passed = self.at
        for place in range(self.read, self.start):
            entry = trans[state * width + classes[place]]
            state = entry & STATE_MASK
            program = entry >> STATE_BITS
            if program == PASS_PROGRAM:
                passed += 1
                continue
            if passed > self.at:
                self._copy(passed, out)
            self._run(program, out)
            passed = self.at
        if passed > self.at:
            self._copy(passed, out)
        self.read = self.start
        self.state = state

    def _run(self, program: int, out: list[Part]) -> None:
        for kind, arg, text in self.machine.programs[program]:
            if kind == COPY:
                self._copy(self.at + arg, out)
            elif kind == EMIT:
                out.append(text)
            elif kind == DROP:
                self.at += arg
            else:
                self.events.append(arg)

    def _copy(self, end: int, out: list[Part]) -> None:
        """Write the pending bytes up to ``end``; what was copied just before grows."""
        last = out[-1] if out else None
        if isinstance(last, slice) and last.stop == self.at:
            out[-1] = slice(last.start, end)
        else:
            out.append(slice(self.at, end))
        self.at = end


def holds(check: int, text: bytes) -> bool:
    """Tell whether a kind's checksum holds: Luhn (ISO/IEC 7812-1) or mod 97 (ISO 13616)."""
    if check == LUHN:
        digits = [byte - 48 for byte in reversed(text) if 48 <= byte <= 57]
        return (sum(digits[::2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])) % 10 == 0
    if check == MOD_97:
        turned = (text[4:] + text[:4]).decode("ascii", "replace")
        number = "".join(str(int(char, 36)) for char in turned if char.isascii() and char.isalnum())
        return bool(number) and int(number) % 97 == 1
    return True
