"""One text being rewritten by a transducer (`ralbuild.contract.transducer` says how)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ralbuild.contract.checks import holds
from ralbuild.contract.machine import Machine
from ralbuild.contract.memo import LONGEST, LONGEST_HELD, SEPARATORS, Place, PlaceKey, Step
from ralbuild.contract.transducer_table import (
    COPY,
    DEAD,
    DONE,
    DROP,
    EMIT,
    KEEP,
    MARK_BITS,
    PASS_PROGRAM,
    REDACT_BITS,
    STATE_BITS,
    STATE_MASK,
    STOP,
)
from ralbuild.contract.words import unfinished

_MARK_MASK = (1 << MARK_BITS) - 1

Part = slice | bytes
"""Something that is written: a slice of the bytes at hand, or a string of the table."""


@dataclass(slots=True)
class Slot:
    """One text being rewritten. Positions count in ``raw``; bytes before ``at`` are decided.

    A settled slot has read all that it holds, and no marker is begun. Its place says everything about
    it, and what is below is written down (`_wake`) only when something needs them.

    Attributes:
        machine: the shared table.
        mode, mark, redact, rule: the mode, and the state of each stage.
        here: where a settled slot is.
        events: rule ids that matched, in order; the reader may clear it.
        stopped: a stop string has ended the text; what follows is not read.
        raw: the bytes that are not decided.
        read: how far the rules have read; start: how far the redactions have released, a candidate begins
            here; redact_at: how far they have read.
        free: how far the markers have released; seen: have read.
        best_end, best: end and entry of ``accept_rows`` of the longest accept of the candidate.
    """

    machine: Machine
    mode: int
    mark: int
    redact: int
    rule: int
    here: Place | None
    events: list[int] = field(default_factory=list)
    stopped: bool = False
    raw: bytes = b""
    rule_class: bytearray = field(default_factory=bytearray)
    redact_class: bytearray = field(default_factory=bytearray)
    at: int = 0
    read: int = 0
    start: int = 0
    redact_at: int = 0
    free: int = 0
    seen: int = 0
    best_end: int = 0
    best: int = -1

    @property
    def pending(self) -> bytes:
        """The bytes read and not yet decided; never longer than the table's ``max_held``."""
        return self.raw if self.here is None else self.here.key.raw

    @property
    def state(self) -> int:
        """The state of the rules."""
        return self.rule if self.here is None else self.here.key.state

    def registers(self, end: int) -> tuple[int, ...]:
        """Return the row of ``front`` when ``end`` bytes were read in all: docs/kernels.md."""
        self._wake()
        base = end - len(self.raw)
        places = (base + self.free, base + self.redact_at, base + self.start)
        best_end = base + self.best_end if self.best >= 0 else 0
        return (self.mode, self.mark, self.redact, *places, self.best, best_end)

    def feed(self, data: bytes) -> bytes:
        """Read the bytes of one token and return what is now decided; nothing after a stop string."""
        if self.here is None:
            return self.walk(data)
        step = self.here.get(data)
        if step is None:
            return self._walk_and_remember(self.here, data)
        out, self.here, events = step
        if events:
            self.events += events
        return out

    def _walk_and_remember(self, before: Place, data: bytes) -> bytes:
        known = len(self.events)
        if len(data) > 1 and data[0] in SEPARATORS and before.key.held < len(before.key.raw):
            out = self.feed(data[:1])
            middle = self.here
            out += self.feed(data[1:])
            if middle is not None:
                self.machine.memo.join(before, data, middle)
            return out
        out = self.walk(data)
        if self.here is not None and len(data) <= LONGEST:
            self.machine.memo.put(before, data, Step(out, self.here, tuple(self.events[known:])))
        return out

    def walk(self, data: bytes) -> bytes:
        """Do what `feed` does, by every byte of ``data``."""
        out: list[Part] = []
        if self.stopped:
            return b""
        self._wake()
        text = self.raw = self.raw + data
        while self.seen < len(text) and not self.stopped:
            self._read_marker(out)
        if self.stopped:
            self.raw = b""
        else:
            self._advance(out, last=False)
            self._forget()
            self._rest()
        return written(text, out)

    def _rest(self) -> None:
        """Find the place of a slot that is settled."""
        end = len(self.raw)
        if end > LONGEST_HELD or not self.free == self.seen == end:
            return
        if self.mark == self.machine.modes[self.mode].mark:
            best_size = self.best_end - self.start if self.best >= 0 else 0
            key = PlaceKey(self.mode, self.redact, self.rule, self.raw, self.start, self.best, best_size)
            self.here = self.machine.memo.place(key)

    def _wake(self) -> None:
        """Write down the numbers of a settled slot."""
        if self.here is None:
            return
        self.mode, self.redact, self.rule, self.raw, held, self.best, best_size = self.here.key
        self.here = None
        self.mark = self.machine.modes[self.mode].mark
        self.read = self.start = held
        self.free = self.seen = len(self.raw)
        self.best_end = held + best_size
        self.rule_class, self.redact_class = bytearray(held), bytearray(held)
        if held < len(self.raw):
            self._classify(self.raw[held:], last=False)
        self.redact_at = len(self.redact_class)

    def finish(self) -> bytes:
        """End the text: decide what is pending and return it, with anything appended at the end."""
        rest, appended = self.close()
        return rest + appended

    def close(self) -> tuple[bytes, bytes]:
        """End the text; return what was pending, and what the rules append to any text."""
        rest: list[Part] = []
        self._wake()
        text = self.raw
        if not self.stopped:
            self.free = self.seen = len(text)
            self._settle(rest)
            self._forget()
        return written(text, rest), self.abandon()

    def abandon(self) -> bytes:
        """End the text and drop what is pending; return what the rules append to any text."""
        self._wake()
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
            del self.rule_class[:done], self.redact_class[:done]
            self.at = 0
            # Nothing that is not decided was read less far; max() only keeps a damaged table in bounds.
            self.read = max(0, self.read - done)
            self.start = max(0, self.start - done)
            self.redact_at = max(0, self.redact_at - done)
            self.free = max(0, self.free - done)
            self.seen = max(0, self.seen - done)
            self.best_end -= done

    # Stage 1: markers

    def _read_marker(self, out: list[Part]) -> None:
        machine, table = self.machine, self.machine.table
        if machine.modes[self.mode].mark < 0:
            self.free = self.seen = len(self.raw)
            return
        entry = table.mark_next[self.mark * machine.mark_classes + table.mark_class[self.raw[self.seen]]]
        self.mark, action = entry & _MARK_MASK, entry >> MARK_BITS
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
        self.at = self.read = self.start = self.redact_at = self.free = self.seen
        gap = bytes(self.seen - len(self.rule_class))
        self.rule_class += gap
        self.redact_class += gap
        row = self.machine.modes[mode]
        self.mode, self.mark, self.redact, self.rule = mode, row.mark, row.redact, row.rule
        if flags & STOP:
            self.stopped = True

    def _settle(self, out: list[Part]) -> None:
        """Decide everything that the markers have released."""
        self._advance(out, last=True)
        self._run(self.machine.table.final[2 * self.rule], out)
        self.rule = self.machine.modes[self.mode].rule

    # Stage 2: redactions

    def _classify(self, fresh: bytes, *, last: bool) -> None:
        """Take in the whole characters of ``fresh``; with ``last`` no more follow."""
        if not last:
            fresh = fresh[: len(fresh) - unfinished(fresh)]
        rule, redact = self.machine.classes(fresh)
        self.rule_class += rule
        self.redact_class += redact

    def _advance(self, out: list[Part], *, last: bool) -> None:
        """Read the whole characters that are released; with ``last`` no more follow."""
        self._classify(self.raw[len(self.rule_class) : self.free], last=last)
        if self.redact < 0:
            self.start = self.redact_at = len(self.rule_class)
        else:
            self._read_redactions(out)
            while last and self.start < self.redact_at:
                self._accept(self.machine.table.redact_final[self.redact])
                self._resolve(out)
                self._read_redactions(out)
        self._read_rules(out)

    def _read_redactions(self, out: list[Part]) -> None:
        machine, classes = self.machine, self.redact_class
        following, width = machine.table.redact_next, machine.redact_classes
        home, end = machine.modes[self.mode].redact, len(classes)
        state, at = self.redact, self.redact_at
        while at < end:
            target = entry = following[state * width + classes[at]]
            if entry >= DONE:
                target = entry & DEAD
                self.redact_at = at + (target == DONE)
                if entry > DEAD:  # something may end here
                    self._accept(entry >> REDACT_BITS)
                if target >= DONE:
                    self._resolve(out)
                    state, at = self.redact, self.redact_at
                    continue
            state = target
            at += 1
            if home <= state <= home + 1:
                self.start = at
        self.redact, self.redact_at = state, at

    def _accept(self, number: int) -> None:
        """The candidate may end here: take it for the first of the list whose check holds."""
        if self.redact_at == self.start:
            return  # no table that we make asks for this
        for entry in self.machine.accepts[number]:
            if holds(entry >> 1 & 3, self.raw[self.start : self.redact_at]):
                self.best, self.best_end = entry, self.redact_at
                return

    def _resolve(self, out: list[Part]) -> None:
        """Replace the candidate, or release its first character, and read on after that."""
        home = self.machine.modes[self.mode]
        size, word = self.machine.words.character(self.raw, self.start)
        if self.best >= 0:
            rule, string = self.machine.redactions[home.row + (self.best >> 3)]
            after_word = self.best & 1
            self._read_rules(out)
            self._run(self.machine.table.final[2 * self.rule + word], out)
            out.append(self.machine.strings[string])
            self.events.append(rule)
            self.at = self.read = self.start = self.redact_at = self.best_end
            self.redact, self.rule = home.redact + after_word, home.rule + after_word
            self.best = -1
            return
        self.redact = home.redact + word
        self.start += size
        self.redact_at = self.start

    # Stage 3: rules

    def _read_rules(self, out: list[Part]) -> None:
        machine, classes = self.machine, self.rule_class
        trans, width, state = machine.table.trans, machine.table.classes, self.rule
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
        self.rule = state

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


def written(text: bytes, parts: list[Part]) -> bytes:
    """Return the bytes that ``parts`` write of ``text``."""
    return b"".join([text[part] if isinstance(part, slice) else part for part in parts])
