"""The rules of all routes as one machine over text, and the plain executor that defines it.

A text goes through three stages, each of which holds back only what it cannot decide:

1. Markers (stop strings, openings and closings of spans): an automaton over bytes. An action releases
   bytes to the next stage; when a marker is complete, all that was released is decided as at the end
   of a text, and the next mode begins.
2. Redactions (literals, patterns, named kinds): one candidate at a time, from the first place where one
   can begin. The longest that a form accepts and whose check (Luhn, mod 97) holds wins. When the candidate
   can go no further, it is replaced, or its first character is released and the rest is read again.
3. Rules (markup, escapes, replacements): for a state ``q`` and a symbol ``s`` the entry
   ``trans[q * C + cls[s]]`` holds the next state in its low `STATE_BITS` bits and a program number above
   them. A program is a short list of operations on what is read but not yet decided ("pending"):

       COPY n   move n pending bytes to the output
       EMIT k   write string k of the pool
       DROP n   forget n pending bytes
       EVENT r  count one match of rule r

   ``final`` names the programs that decide what is pending where the text, or its part, ends.

Redactions and rules read whole characters: the last bytes of one that is not complete wait, and a table
whose candidates may begin or end inside one is refused (`ralbuild.contract.transducer_read`). An entry
of ``redact_next`` leads to the next state, or says that the candidate ends before its symbol (`DEAD`) or
with it (`DONE`); its list of accepts says what may end there. The first two states of a set of
redactions, and of rules, are those between matches: behind a character of no word, and of a word.

This executor is the oracle: the CPU target runs it, and the GPU kernel must agree with it byte for byte.
`Slot.walk` is the definition; `Slot.feed` does the same and remembers what tokens do
(`ralbuild.contract.memo`). Method of stage 3: Mihov and Schulz 2007, subsequential transducers;
docs/rules.md gives the meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

from ralbuild.contract.machine import Machine
from ralbuild.contract.memo import PlaceKey
from ralbuild.contract.slot import Slot
from ralbuild.contract.transducer_read import read_transducer
from ralbuild.contract.transducer_table import (
    COPY,
    DROP,
    EMIT,
    EVENT,
    PASS_PROGRAM,
    PROGRAM_LIMIT,
    STATE_BITS,
    STATE_MASK,
    Front,
    TransducerTable,
    write_transducer,
)

__all__ = [
    "COPY", "DROP", "EMIT", "EVENT", "PASS_PROGRAM", "PROGRAM_LIMIT", "STATE_BITS", "STATE_MASK", "Front",
    "Slot", "Transducer", "TransducerTable", "read_transducer", "write_transducer",
]  # fmt: skip


class Transducer(Machine):
    """A table made ready to run: texts start here."""

    def start(self, profile: int) -> Slot:
        """Return a fresh slot for ``profile``."""
        mode = self.table.starts[profile]
        row = self.modes[mode]
        here = self.memo.place(PlaceKey(mode, row.redact, row.rule, b"", 0, -1, 0))
        return Slot(self, mode, row.mark, row.redact, row.rule, here)

    def resume(self, state: int, front: Sequence[int], raw: bytes, end: int) -> Slot:
        """Return the slot that a device's registers describe: what `Slot.registers` gives, read backwards.

        Args:
            state: ``fst_state``, of a text that has not ended.
            front: the row of that name.
            raw: the undecided bytes, of the ``end`` bytes that were read in all.
        """
        base = end - len(raw)
        mode, mark, redact, free, redact_at, start, best, best_end = front
        slot = Slot(self, mode & 0xFFFF, mark, redact, state, None, raw=raw)
        slot.free, slot.seen = free - base, len(raw)
        slot.read = slot.start = start - base
        slot.redact_at = redact_at - base
        slot.best, slot.best_end = best, best_end - base if best >= 0 else 0
        classes = self.classes(raw[slot.start : slot.redact_at])
        slot.rule_class, slot.redact_class = (bytearray(slot.start) + side for side in classes)
        return slot

    def rewrite(self, profile: int, data: bytes) -> tuple[bytes, list[int]]:
        """Rewrite a whole text; return the output and the rule ids that matched, in order."""
        slot = self.start(profile)
        out = slot.feed(data) + slot.finish()
        return out, slot.events
