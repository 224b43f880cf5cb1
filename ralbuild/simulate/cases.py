"""What is pushed through the kernels: token sequences near the rules' own texts, and rows to draw from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from ralbuild.contract.bundle import Rule
from ralbuild.contract.vocab import TokenBytes
from ralbuild.fold.kinds import KIND_SAMPLES
from ralbuild.simulate.buffers import Tables
from ralbuild.simulate.compare import Case
from ralbuild.simulate.compare_draws import DrawCase

LONGEST_TEXT = 12
"""Pieces that a random text is made of, at most."""
COLUMNS = 2048
"""Logits of a row to draw from; the kernel's work grows with them, its paths do not."""
_PASS = 256


class Splitter:
    """Splits bytes into tokens in any way that the vocabulary allows."""

    def __init__(self, vocab: TokenBytes, longest: int = 24) -> None:
        self._ids: dict[bytes, int] = {}
        for token in range(len(vocab)):
            data = vocab[token]
            if 0 < len(data) <= longest:
                self._ids.setdefault(data, token)
        self._longest = longest

    def greedy(self, text: bytes) -> tuple[int, ...]:
        """Take the longest token every time; a byte that no token has is left out."""
        return self._split(text, None)

    def any_way(self, text: bytes, rng: random.Random) -> tuple[int, ...]:
        """Take any token that fits, so that every seam between tokens is met."""
        return self._split(text, rng)

    def _split(self, text: bytes, rng: random.Random | None) -> tuple[int, ...]:
        out = []
        at = 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            fits = [size for size in lengths if text[at : at + size] in self._ids]
            if not fits:
                at += 1
                continue
            size = rng.choice(fits) if rng else fits[0]
            out.append(self._ids[text[at : at + size]])
            at += size
        return tuple(out)


def text_case(tables: Tables, text: bytes, profile: int) -> Case:
    """Return a case for one text, ended."""
    return Case(profile, (*Splitter(tables.vocab).greedy(text), tables.eos_ids[0]))


def random_cases(tables: Tables, rules: Sequence[Rule], count: int, seed: int) -> list[Case]:
    """Return texts of whole, cut, doubled and re-cased rule literals between words and any tokens.

    Every profile gets its turn. One text in eight has no end; ids that are no text are among the tokens.
    """
    rng = random.Random(seed)  # noqa: S311
    splitter = Splitter(tables.vocab)
    literals = sorted({text for rule in rules for text in _texts(rule)}) or [b"text"]
    profiles = len(tables.transducer.starts)
    cases = []
    for number in range(count):
        tokens: list[int] = []
        for _ in range(rng.randint(1, LONGEST_TEXT)):
            if rng.random() < 0.2:
                token = rng.randrange(len(tables.vocab))
                tokens.append(token if token not in tables.eos_ids else 0)
            else:
                tokens += splitter.any_way(_piece(literals, rng), rng)
        if rng.random() < 0.05:
            tokens.append(len(tables.vocab) + rng.randrange(3))
        if rng.random() < 0.875:
            tokens.append(rng.choice(tables.eos_ids))
        cases.append(Case(number % profiles, tuple(tokens)))
    return cases


def _texts(rule: Rule) -> list[bytes]:
    """Return what a rule may match: its text, an example of its kind, or both ends of its span."""
    if rule.kind == "redact" and rule.text in KIND_SAMPLES:
        return [KIND_SAMPLES[rule.text]]
    if rule.kind == "span":
        return [end.encode() for end in rule.text.split(" .. ") if end]
    return [rule.text.encode()] if rule.text else []


def _piece(literals: list[bytes], rng: random.Random) -> bytes:
    text = rng.choice(literals)
    kind = rng.randrange(7)
    if kind == 0:
        return text[: rng.randint(1, len(text))]
    if kind == 1:
        return text[rng.randrange(len(text)) :] + text
    if kind == 2:
        return bytes(byte ^ 32 if chr(byte).isalpha() and byte < 128 else byte for byte in text)
    if kind == 3:
        return rng.choice(
            [b" ", b"<", b"&", b".", b"_", b"\n", "é".encode(), "风险".encode(), "🙂".encode(), b"\xff"]
        )
    if kind == 4:
        return text + rng.choice([b"s", b" ", b"_"]) + rng.choice(literals)
    return text if kind == 5 else b" " + text + b" "


def random_draws(tables: Tables, count: int, seed: int) -> list[DrawCase]:
    """Return rows to draw from: greedy and sampled, narrow and wide, flat, with NaN and infinities, idle."""
    rng = np.random.default_rng(seed)
    columns = min(COLUMNS, len(tables.vocab) + 37)
    states = len(tables.bans.trans) // tables.bans.classes
    out = []
    for number in range(count):
        logits = (rng.standard_normal(columns) * rng.choice([0.1, 1.0, 4.0])).astype(np.float32)
        spoiled = rng.integers(0, columns, 4)
        if number % 5 == 1:
            logits[spoiled] = [np.nan, -np.inf, 30.0, 30.0]
        logits[len(tables.vocab) :] = 50.0  # columns that are no token
        if number % 3 == 2:  # one token at an edge of the kernel's passes decides
            edge = int(rng.integers(0, -(-min(columns, len(tables.vocab)) // _PASS))) * _PASS
            logits[max(0, edge - number % 2)] = 9.0
        if number % 17 == 3:
            logits[:] = rng.choice([0.0, -np.inf])
        out.append(
            DrawCase(
                logits,
                temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
                top_p=float(rng.choice([1.0, 1.0, 0.9, 0.3])),
                seed=int(rng.integers(-(2**63), 2**63)),
                step=int(rng.integers(0, 4096)),
                ban_state=int(rng.integers(1, states)),
                done=int(number % 13 == 5),
                top_k=int(rng.choice([0, 0, 1, 40])),
                min_p=float(rng.choice([0.0, 0.0, 0.1])),
                ban_strict=int(number % 7 == 4),
            )
        )
    return out


def user_buffers(buffers: Mapping[str, object], seed: int) -> None:
    """Fill what a user's kernel reads with small numbers, so that its terms do occur."""
    rng = np.random.default_rng(seed)
    for name, array in buffers.items():
        if isinstance(array, np.ndarray) and name in ("output", "ring", "token", "terms"):
            array[...] = rng.integers(0, 24, array.shape)
