"""Random rules of every sort over three real vocabularies: the executor, with its memo and without, equals
the whole-text reference.

The vocabularies are samples of real tokenizers (tests/data/vocabularies.json.gz, made by
`ci/sample_vocabularies.py`): SmolLM2's byte-level BPE, a SentencePiece model, a tiktoken-style one.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
from pathlib import Path

import pytest
from rule_reference import rewrite

from ralbuild.config.regex import parse_regex
from ralbuild.contract.transducer import Transducer, read_transducer
from ralbuild.contract.vocab import TokenBytes, read_vocab, write_vocab
from ralbuild.fold.rules import (
    HTML_ENTITIES,
    JSON_ESCAPES,
    MARKUP,
    REDACTION,
    KindRule,
    ProfileRules,
    SpanRule,
    StopRule,
    TextRule,
)
from ralbuild.fold.transducer import TransducerBuilder
from ralbuild.simulate.cases import Splitter

SEED = 20261201
RULE_SETS, TEXTS, CHUNKINGS = 50, 70, 2
WORDS = [
    "risk",
    "Risk appetite",
    "k",
    "Straße",
    "ΣΊΣΥΦΟΣ",
    "é",
    "naïve",
    "Привет",
    "风险",
    "リスク",
    "C++",
    "a&b",
    "<i>",
    "ŋ",
]
PATTERNS = ["acct-[0-9]{2,4}", "(?:id|ID) ?[0-9]{1,3}", "[à-ö]{2}", "[^ .]{1,3}!"]
MARKERS = ["<think>", "</think>", "STOP", "\n\n", "##", "é|"]
SECRETS = {
    "card": ["4111 1111 1111 1111", "4111111111111111", "378282246310005", "4111 1111 1111 1112"],
    "us_ssn": ["078-05-1120", "666-05-1120", "078 05 1120"],
    "ip": ["192.0.2.1", "2001:db8::1", "256.1.1.1", "::1"],
    "phone": ["+49 30 901820", "(212) 555-0100", "030-901820"],
    "email": ["ada@example.org", "josé.x@mail.example.co.uk", "@x"],
    "iban": ["DE89 3704 0044 0532 0130 00", "gb82west12345698765432", "DE89 3704 0044 0532 0130 01"],
    "api_key": ["AKIAIOSFODNN7EXAMPLE", "ghp_" + "aB3" * 12],
}
OTHER = [
    " ",
    ".",
    "_",
    "-",
    "1",
    "12",
    "x",
    "s",
    "\u017f",
    "\u212a",
    "ς",
    "风",
    "é",
    "e\u0301",
    "🙂",
    "👩‍🚀",
    "<",
    '"',
    "\\",
    "\x01",
    "\n",
]
BROKEN = [b"\xf0", b"\x9f\x99", b"\xe9\xa3", b"\xc3", b"\xff", b"\xed\xa0\x80"]


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, TokenBytes]:
    path = Path(__file__).parent / "data/vocabularies.json.gz"
    data = json.loads(gzip.decompress(path.read_bytes()))
    return {
        name: read_vocab(write_vocab([base64.b64decode(token) for token in tokens]), name)
        for name, tokens in data.items()
    }


class RandomRules:
    """Rules of one profile, and texts in which they meet."""

    def __init__(self, rng: random.Random, *, kinds: bool) -> None:
        self.rng = rng
        self.regexes: dict[int, str] = {}
        self.ids = itertools.count()
        self.words = rng.sample(WORDS, 3)
        escapes = rng.choice([(), (), HTML_ENTITIES, JSON_ESCAPES])
        self.spans = self.random_spans() if rng.random() < 0.4 else ()
        texts = [self.text_rule(escapes) for _ in range(rng.randint(0, 4))]
        escape_id = next(self.ids)
        texts += [TextRule(escape_id, MARKUP, text, False, False, replacement=to) for text, to in escapes]
        self.kinds = rng.sample(sorted(SECRETS), rng.randint(1, 2)) if kinds else []
        self.profile = ProfileRules(
            tuple(texts),
            rng.choice([b"", b"END"]),
            next(self.ids),
            kinds=tuple(KindRule(next(self.ids), kind, b"[K]", self.scope()) for kind in self.kinds),
            stops=tuple(
                StopRule(next(self.ids), rng.choice(MARKERS[2:]).encode(), self.scope())
                for _ in range(rng.choice([0, 0, 1, 2]))
            ),
            spans=self.spans,
        )
        data, self.size = TransducerBuilder((self.profile,)).build(next(self.ids))
        self.machine = Transducer(read_transducer(data, "test"))

    def random_spans(self) -> tuple[SpanRule, ...]:
        rng = self.rng
        treatment = rng.choice(["drop", "keep", "exempt"])
        first = SpanRule(next(self.ids), "s", b"<think>", b"</think>", treatment, rng.random() < 0.2)
        second = SpanRule(next(self.ids), "t", b"##", b"\n\n", rng.choice(["drop", "keep"]))
        return (first, second) if rng.random() < 0.4 else (first,)

    def scope(self) -> str:
        return self.rng.choice(["all", "all", "outside", "s"]) if self.spans else "all"

    def text_rule(self, escapes: tuple[tuple[bytes, bytes], ...]) -> TextRule:
        rng, number = self.rng, next(self.ids)
        level = rng.choice([REDACTION, MARKUP])
        pattern = rng.choice([*self.words, rng.choice(self.words) + rng.choice(self.words)]).encode()
        if rng.random() < 0.25 and not escapes:
            self.regexes[number] = rng.choice(PATTERNS)
            pattern = parse_regex(self.regexes[number])
        return TextRule(
            number, level, pattern, rng.random() < 0.6, rng.random() < 0.5,
            replacement=rng.choice([b"", b"[X]"]) if level == REDACTION else None,
            before=b"<b>", after=b"</b>", escaped=escapes, scope=self.scope(),
        )  # fmt: skip

    def text(self) -> bytes:
        rng, parts = self.rng, []
        for _ in range(rng.randint(1, 9)):
            pick = rng.random()
            if pick < 0.45:
                word = rng.choice(self.words)
                parts.append(rng.choice([word, word.upper(), word[: rng.randint(0, len(word))]]).encode())
            elif pick < 0.55 and (self.spans or self.profile.stops):
                parts.append(rng.choice(MARKERS).encode())
            elif pick < 0.75 and self.kinds:
                secret = rng.choice(SECRETS[rng.choice(self.kinds)])
                parts.append(rng.choice([secret, secret[: rng.randint(0, len(secret))]]).encode())
            elif pick < 0.8:
                parts.append(rng.choice(["acct-123", "ID 7", "éà", "ab!"]).encode())
            elif pick < 0.84:
                parts.append(rng.choice(BROKEN))
            else:
                parts.append(rng.choice(OTHER).encode())
        return b"".join(parts)


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece", "tiktoken"])
def test_random_rules_texts_and_tokens_agree_with_the_reference(
    name: str, vocabularies: dict[str, TokenBytes]
) -> None:
    rng = random.Random(f"{SEED}{name}")
    vocab = vocabularies[name]
    splitter = Splitter(vocab)
    cases = matched = tokens = steps = 0
    for number in range(RULE_SETS):
        rules = RandomRules(rng, kinds=number % 4 == 0)
        texts = [rules.text() for _ in range(TEXTS)]
        reference: dict[bytes, tuple[bytes, list[int]]] = {}
        for ids in (splitter.any_way(text, rng) for text in texts for _ in range(CHUNKINGS)):
            slot, plain, out = rules.machine.start(0), rules.machine.start(0), b""
            for token in ids:
                part = slot.feed(vocab[token])
                assert part == plain.walk(vocab[token])
                assert slot.pending == plain.pending
                assert len(slot.pending) <= rules.size.max_held
                out += part
            read = sum(len(vocab[token]) for token in ids)
            assert slot.registers(read) == plain.registers(read)
            assert slot.state == plain.state
            known = len(slot.events)
            again = rules.machine.resume(slot.state, slot.registers(read), slot.pending, read)
            rest = slot.finish()
            if not slot.stopped:  # what a device keeps of a text is enough to end it
                assert (again.finish(), again.events) == (rest, slot.events[known:])
            out += rest
            text = b"".join(vocab[token] for token in ids)
            if text not in reference:
                reference[text] = rewrite(rules.profile, text, rules.regexes)
            assert (out, slot.events) == reference[text], (text, rules.profile)
            cases += 1
            matched += bool(slot.events)
            tokens += len(ids)
        steps += rules.machine.memo.steps
    print(f"seed {SEED}, {name}: {cases} cases, {tokens} tokens, {steps} steps remembered")
    print(f"{matched} with a match, 0 mismatches")
    assert cases == RULE_SETS * TEXTS * CHUNKINGS
    assert 0 < steps < tokens // 2, "most tokens must meet a remembered step, or the memo is not tested"
    assert matched > cases // 3
