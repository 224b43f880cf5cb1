"""`fold`: config and vocabulary to tables, profiles, routes and self-tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ralbuild.config.load import LoadedConfig
from ralbuild.contract.bundle import InputLimit, SelfTest
from ralbuild.contract.transducer import Transducer, TransducerTable, read_transducer
from ralbuild.contract.vocab import write_vocab
from ralbuild.errors import CompileError
from ralbuild.fold.bans import build_bans
from ralbuild.fold.bounds import check_buffers
from ralbuild.fold.input_rules import input_limits
from ralbuild.fold.kinds import KIND_SAMPLES
from ralbuild.fold.routes import Overlaps, RoutePatterns
from ralbuild.fold.rules import ProfileRules, RuleSet, collect_rules
from ralbuild.fold.sampling import resolve_biases
from ralbuild.fold.transducer import TransducerBuilder, TransducerSize

SELF_TEST_RULES = 4
"""Rules per profile that the launcher's self-test text exercises."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What folding gives.

    Attributes:
        rule_set: rules, profiles and routes.
        transducer, bans, vocab, route_table: serialised tables.
        overlaps: routing rules that match the same names.
        size: of the transducer.
        input_limits: from the token filters.
        self_tests: token sequences and the bytes that the oracle makes of them.
    """

    rule_set: RuleSet
    transducer: bytes
    bans: bytes
    vocab: bytes
    route_table: bytes
    overlaps: Overlaps
    size: TransducerSize
    input_limits: tuple[InputLimit, ...]
    self_tests: tuple[SelfTest, ...]


def fold(loaded: LoadedConfig, tokens: Sequence[bytes], *, strips: bool = False) -> Folded:
    """Compile every declarative rule of a config.

    Args:
        loaded: the checked config.
        tokens: the bytes of each token id; special tokens have none.
        strips: the tokenizer takes one space away from the beginning of a text.

    Raises:
        CompileError: when the tables outgrow their budget or a step its buffers.
    """
    with _no_collections():
        return _fold(loaded, tokens, strips)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python from looking for garbage: all that folding makes is in use until it ends."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fold(loaded: LoadedConfig, tokens: Sequence[bytes], strips: bool) -> Folded:
    rule_set = collect_rules(loaded)
    rule_set = replace(rule_set, profiles=resolve_biases(rule_set.profiles, loaded, tokens))
    _check_spelling(rule_set, tokens)
    data, size = TransducerBuilder(rule_set.rules_of, rule_set.rules).build(len(rule_set.rules))
    table = read_transducer(data, "transducer")
    check_buffers(table, rule_set.rules_of, rule_set.rules, tokens)
    bans = build_bans([rules.limits for rules in rule_set.rules_of])
    patterns = route_patterns(loaded, rule_set)
    return Folded(
        rule_set,
        data,
        bans,
        write_vocab(tokens, strips=strips),
        patterns.table(),
        patterns.overlaps(),
        size,
        input_limits(loaded),
        _self_tests(rule_set, table, tokens, strips=strips),
    )


def route_patterns(loaded: LoadedConfig, rule_set: RuleSet) -> RoutePatterns:
    """Return the patterns of the routing rules, in the order in which they are tried."""
    places = [f"{loaded.path.name}:{route.place}" for route in rule_set.routes]
    return RoutePatterns([route.match for route in rule_set.routes], places)


def _check_spelling(rule_set: RuleSet, tokens: Sequence[bytes]) -> None:
    """Refuse an allowed text that no tokens spell: the model could begin it and never end it.

    A byte that is a token of its own can always be written; tokenizers of today have all 256.
    """
    alone = {token for token in tokens if len(token) == 1}
    whole = set(tokens)
    for rules in rule_set.rules_of:
        for text in rules.limits.texts:
            if text not in whole and any(text[at : at + 1] not in alone for at in range(len(text))):
                message = f"the tokenizer has no token for a byte of {text.decode()!r}"
                raise CompileError(message, place=f"action {rules.limits.name!r}: allow")


def _self_tests(
    rule_set: RuleSet, table: TransducerTable, tokens: Sequence[bytes], *, strips: bool
) -> tuple[SelfTest, ...]:
    """Make one text per profile that its first rules match, and let the oracle say what comes out."""
    machine = Transducer(table)
    spell = _Speller(tokens)
    tests = []
    for index, rules in enumerate(rule_set.rules_of):
        ids = spell.ids(_sample_text(rules))
        text = b"".join(tokens[token] for token in ids)
        out, _ = machine.rewrite(index, text.removeprefix(b" ") if strips else text)
        tests.append(SelfTest(index, ids, out.hex()))
    return tuple(tests)


def _sample_text(rules: ProfileRules) -> bytes:
    """Return text in which whole words, parts of words and a cut-off match all occur."""
    literals = [rule.pattern for rule in rules.texts if isinstance(rule.pattern, bytes)][:SELF_TEST_RULES]
    parts = [b"A " + text + b", x" + text + b"y & " + text.upper() + b"." for text in literals]
    parts += [KIND_SAMPLES[rule.kind] for rule in rules.kinds]
    parts += [span.open + b" inside " + span.close for span in rules.spans]
    parts += [rule.text for rule in rules.stops[:1]]
    tail = literals[0][:-1] if literals else b""
    return b"Self-test: \xc3\xa9 \xe9\xa2\xa8 <i> " + b" ".join(parts) + b" " + tail


class _Speller:
    """Spells bytes as token ids, longest token first: any segmentation serves the self-test."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.ids_of: dict[bytes, int] = {}
        for number, token in enumerate(tokens):
            if token:
                self.ids_of.setdefault(token, number)
        self.longest = min(64, max(map(len, self.ids_of), default=1))

    def ids(self, text: bytes) -> tuple[int, ...]:
        """Return ids whose bytes spell ``text``; bytes that no token covers are left out."""
        out: list[int] = []
        at = 0
        while at < len(text):
            for length in range(min(self.longest, len(text) - at), 0, -1):
                number = self.ids_of.get(text[at : at + length])
                if number is not None:
                    out.append(number)
                    break
            else:
                length = 1
            at += length
        return tuple(out)
