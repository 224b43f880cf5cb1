"""`fold`: config and vocabulary to tables, profiles, routes and self-tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.config.load import LoadedConfig
from ralbuild.contract.bundle import InputLimit, SelfTest
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.contract.vocab import write_vocab
from ralbuild.fold.bans import build_bans
from ralbuild.fold.bounds import check_buffers
from ralbuild.fold.kinds import KIND_SAMPLES
from ralbuild.fold.rules import ProfileRules, RuleSet, collect_rules
from ralbuild.fold.transducer import TransducerBuilder, TransducerSize

SELF_TEST_RULES = 4
"""Rules per profile that the launcher's self-test text exercises."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What folding gives.

    Attributes:
        rule_set: rules, profiles and routes.
        transducer, bans, vocab: serialised tables.
        size: of the transducer.
        input_limits: from the token filters.
        self_tests: token sequences and the bytes that the oracle makes of them.
    """

    rule_set: RuleSet
    transducer: bytes
    bans: bytes
    vocab: bytes
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
    rule_set = collect_rules(loaded)
    data, size = TransducerBuilder(rule_set.rules_of).build(len(rule_set.rules))
    check_buffers(read_transducer(data, "transducer"), rule_set.rules_of, rule_set.rules, tokens)
    bans = build_bans(tuple(rules.bans for rules in rule_set.rules_of))
    limits = tuple(
        InputLimit(name, settings.max_length)
        for _, name, settings in loaded.filters
        if settings.max_length is not None
    )
    return Folded(
        rule_set,
        data,
        bans,
        write_vocab(tokens, strips=strips),
        size,
        limits,
        _self_tests(rule_set, data, tokens, strips=strips),
    )


def _self_tests(
    rule_set: RuleSet, data: bytes, tokens: Sequence[bytes], *, strips: bool
) -> tuple[SelfTest, ...]:
    """Make one text per profile that its first rules match, and let the oracle say what comes out."""
    machine = Transducer(read_transducer(data, "transducer"))
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
