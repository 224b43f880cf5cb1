"""How much one step can write: checked for the vocabulary, so that no output buffer ever overflows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ralbuild.config.regex import width
from ralbuild.contract.buffers import OUTPUT_BYTES, RING_BYTES
from ralbuild.contract.bundle import Rule
from ralbuild.contract.transducer import COPY, EMIT, STATE_BITS, TransducerTable
from ralbuild.errors import CompileError
from ralbuild.fold.patterns import Nfa
from ralbuild.fold.redactions import form_of
from ralbuild.fold.rules import REDACTION, ProfileRules, Redaction, TextRule


def check_buffers(
    table: TransducerTable,
    profiles: Sequence[ProfileRules],
    rules: Sequence[Rule],
    tokens: Sequence[bytes],
) -> None:
    """Check that one token, and all that it can decide, fits the ring and the output buffer.

    In a step at most the token's bytes and what was held are decided. Each of them belongs to one match
    at most, so the worst rule's growth bounds them; for the token's own bytes the table and the bytes that a
    redaction can have say more.

    Raises:
        CompileError: naming the rule that writes most for each byte.
    """
    longest = max((len(token) for token in tokens), default=0)
    if table.max_held + longest > RING_BYTES:
        raise CompileError(
            f"rules hold back up to {table.max_held} bytes and the longest token has {longest}; "
            f"together at most {RING_BYTES} bytes fit the ring buffer",
            place="fold",
            hint="shorten the longest rule",
        )
    growth, number = max((_growth(profiles)), default=(1.0, 0))
    append = max((len(profile.append) for profile in profiles), default=0)
    worst = _most_written(table, tokens, max(1.0, growth), _replaced_by_byte(profiles))
    needed = int(np.ceil(worst + max(1.0, growth) * table.max_held)) + append
    if needed > OUTPUT_BYTES:
        rule = rules[number] if rules else None
        what = f"{rule.kind} {rule.text[:40]!r}" if rule else "the longest token"
        raise CompileError(
            f"one step may have to write {needed} bytes, at most {OUTPUT_BYTES} fit the output buffer; "
            f"{what} writes {growth:.0f} bytes for each byte that it matches",
            place=rule.place if rule else "tokenizer.json",
            hint="write less, or match more than a few characters",
        )


def _growth(profiles: Sequence[ProfileRules]) -> list[tuple[float, int]]:
    """Return, per rule, the most bytes written for a byte of its shortest match, and its id."""
    out = []
    for profile in profiles:
        out += [(_written(rule), rule.id) for rule in profile.texts if rule.level != REDACTION]
        out += [(_replaced(rule), rule.id) for rule in _redactions(profile)]
    return out


def _redactions(profile: ProfileRules) -> list[Redaction]:
    return [*profile.kinds, *(rule for rule in profile.texts if rule.level == REDACTION)]


def _replaced(rule: Redaction) -> float:
    return len(rule.replacement or b"") / max(1, form_of(rule).width()[0])


def _replaced_by_byte(profiles: Sequence[ProfileRules]) -> npt.NDArray[np.float64]:
    """Return the most bytes that a redaction writes for each byte that may be in its match."""
    out = np.ones(256)
    for rule in dict.fromkeys(rule for profile in profiles for rule in _redactions(profile)):
        growth = _replaced(rule)
        if growth > 1:
            nfa = Nfa()
            form_of(rule).add_to(nfa, 0)
            members = sorted({symbol & 255 for edges in nfa.edges for mask, _ in edges for symbol in mask})
            out[members] = np.maximum(out[members], growth)
    return out


def _written(rule: TextRule) -> float:
    if isinstance(rule.pattern, bytes):
        # Another case of a letter may be shorter: never more than three bytes become one.
        letters = len(rule.pattern.decode("utf-8", "replace"))
        shortest = max(1, letters if rule.ignore_case else len(rule.pattern))
    else:
        shortest = width(rule.pattern)[0]
    if rule.replacement is not None:
        return len(rule.replacement) / shortest
    inside = max((len(written) for _, written in rule.escaped), default=1) if rule.rewrites_inside else 1
    return (len(rule.before) + len(rule.after)) / shortest + inside


def _most_written(
    table: TransducerTable, tokens: Sequence[bytes], growth: float, replaced: npt.NDArray[np.float64]
) -> float:
    """Return a bound on what the bytes of one token make the rules and redactions write."""
    lengths = np.diff(np.frombuffer(table.str_off, np.uint32).astype(np.int64))
    ops = np.frombuffer(table.prog_ops, np.uint32)
    kinds, args = ops & 3, (ops >> 2).astype(np.int64)
    lengths = np.append(lengths, 0)  # so that there is one
    written = np.where(
        kinds == COPY, args, np.where(kinds == EMIT, lengths[np.where(kinds == EMIT, args, 0)], 0)
    )
    offsets = np.frombuffer(table.prog_off, np.uint32)
    sums = np.concatenate([[0], np.cumsum(written)])[offsets]
    programs = np.frombuffer(table.trans, np.uint32).reshape(table.states, table.classes) >> STATE_BITS
    by_class = np.diff(sums)[programs].max(axis=0)
    by_symbol = by_class[np.frombuffer(table.cls, np.uint8)]
    by_byte = np.maximum(replaced, np.maximum(by_symbol[:256], by_symbol[256:]))
    pool = np.frombuffer(b"".join(tokens), np.uint8)
    ends = np.cumsum([len(token) for token in tokens], dtype=np.int64)
    totals = np.concatenate([[0.0], np.cumsum(by_byte[pool])])
    first = np.concatenate([[0], ends[:-1]]).astype(np.int64) if len(ends) else ends
    per_token = totals[ends] - totals[first]
    return float(np.minimum(per_token, growth * (ends - first)).max(initial=0.0))
