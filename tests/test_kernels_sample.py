"""The sampler kernel: exact against its NumPy twin, and the twin against outside values.

Random numbers against the published vectors of Random123; probabilities against the softmax; the
nucleus against transformers; bans against a search for the phrase in the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import kernel_reference
import numpy as np
import pytest
from kernel_interpreter import Interpreter, interpreter

from ralbuild.contract.bans import BanSlot, BanTable, read_bans, write_bans

VOCAB, TOKENIZER = 1500, 1407
CONSTANTS = {"BLOCK": 1024, "CANDIDATES": 256}


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreter]:
    with interpreter() as started:
        yield started


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    numbers = np.array([[int(word, 16) for word in counter.split()]], np.uint32)
    low, high = (int(word, 16) for word in key.split())
    found = kernel_reference.philox_4x32_10(numbers, (low, high))
    assert [f"{word:08x}" for word in found[0]] == words.split()


def test_noise_follows_the_gumbel_distribution_far_into_the_tail() -> None:
    noise = kernel_reference.gumbel(kernel_reference.philox_uniform(5, 0, np.arange(1 << 20)))
    assert np.isfinite(noise).all()
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999, 0.9999):
        exact = -math.log(-math.log(quantile))
        share = (noise <= exact).mean()
        assert abs(share - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / len(noise))


def ban_automaton(phrases: list[bytes]) -> BanTable:
    """A hand-made Aho-Corasick automaton over lower-case letters, digits and the rest as one class."""
    alphabet = sorted({byte for phrase in phrases for byte in phrase})
    cls = [alphabet.index(byte) + 1 if byte in alphabet else 0 for byte in range(256)]
    prefixes = [b"", *sorted({phrase[:n] for phrase in phrases for n in range(1, len(phrase))})]
    number = {prefix: index + 1 for index, prefix in enumerate(prefixes)}

    def move(prefix: bytes, byte: int | None) -> int:
        text = prefix + bytes([byte]) if byte is not None else b""
        if any(text.endswith(phrase) for phrase in phrases):
            return 0
        return next(number[text[n:]] for n in range(len(text) + 1) if text[n:] in number)

    rows = [[0] * (len(alphabet) + 1)]
    rows += [[move(prefix, None), *(move(prefix, byte) for byte in alphabet)] for prefix in prefixes]
    return read_bans(write_bans(cls=cls, rows=rows, starts=[1]), "test")


def tokens(rng: np.random.Generator) -> list[bytes]:
    letters = list(b"abc ")
    short = [bytes([letter]) for letter in letters]
    return short + [
        bytes(rng.choice(letters, int(rng.integers(0, 5))).tolist()) for _ in range(TOKENIZER - len(short))
    ]


def device_arrays(table: BanTable, words: list[bytes], rows: np.ndarray) -> dict[str, Any]:
    slots = len(rows)
    return {
        "logits": rows,
        "vocab_size": rows.shape[1],
        "tokenizer_size": TOKENIZER,
        "temperature": np.ones(slots, np.float32),
        "top_p": np.ones(slots, np.float32),
        "seed": np.arange(slots, dtype=np.int64) * -(1 << 40) + 17,
        "step": np.arange(slots, dtype=np.int32),
        "eos_id": 3,
        "token": np.zeros(slots, np.int32),
        "token_offsets": np.cumsum([0] + [len(word) for word in words]).astype(np.int32),
        "token_bytes": np.frombuffer(b"".join(words), np.uint8),
        "ban_class": np.frombuffer(table.cls, np.uint8),
        "ban_next": np.frombuffer(table.trans, np.uint32).view(np.int32),
        "ban_classes": table.classes,
        "ban_state": np.full(slots, table.starts[0], np.int32),
        "ban_events": np.zeros(slots, np.int32),
        "fst_state": np.zeros(slots, np.int32),
    }


def expected(args: dict[str, Any], slot: int, allows: Any, candidates: int = 256) -> tuple[int, int]:
    return kernel_reference.sample(
        args["logits"][slot],
        tokenizer_size=args["tokenizer_size"],
        temperature=float(args["temperature"][slot]),
        top_p=float(args["top_p"][slot]),
        seed=int(args["seed"][slot]),
        step=int(args["step"][slot]),
        eos_id=args["eos_id"],
        allows=allows,
        candidates=candidates,
    )


def test_every_draw_agrees_with_the_numpy_twin_and_no_banned_phrase_appears(kernels: Interpreter) -> None:
    """Six requests of different settings, five steps; the text is searched for the phrases."""
    rng = np.random.default_rng(11)
    phrases, words = [b"ab", b"ca c", b"bbb"], tokens(rng)
    args = device_arrays(ban_automaton(phrases), words, np.zeros((6, VOCAB), np.float32))
    args["temperature"] = np.array([0, 1, 0.5, 3, 1, 0.8], np.float32)
    args["top_p"] = np.array([1, 1, 1, 1, 0.5, 0.05], np.float32)
    bans = [BanSlot(ban_automaton(phrases), 0) for _ in range(6)]
    texts, refused = [b""] * 6, [0] * 6
    for _ in range(5):
        args["logits"] = (rng.standard_normal((6, VOCAB)) * 4).astype(np.float32)
        draws = [expected(args, slot, lambda t, s=slot: bans[s].allows(words[t])) for slot in range(6)]
        args |= kernels.launch("sample", 6, args, CONSTANTS)
        assert args["token"].tolist() == [token for token, _ in draws]
        for slot, (token, more) in enumerate(draws):
            bans[slot].advance(words[token])
            texts[slot] += words[token]
            refused[slot] += more
        assert args["ban_state"].tolist() == [ban.state for ban in bans]
    assert args["ban_events"].tolist() == refused
    assert sum(refused) > 0
    assert args["step"].tolist() == [5 + slot for slot in range(6)]
    assert not any(phrase in text for phrase in phrases for text in texts)


def test_greedy_takes_the_first_largest_token_that_the_tokenizer_knows(
    kernels: Interpreter,
) -> None:
    rows = np.zeros((4, VOCAB), np.float32)
    rows[0, [7, 900, 1400]] = 5
    rows[1, TOKENIZER:] = 9
    rows[1, 33] = 1
    rows[2, :50] = np.nan
    rows[2, 60] = 2
    rows[3] = -np.inf
    rows[3, 1406] = -1e30
    words = [b"x"] * TOKENIZER
    args = device_arrays(ban_automaton([b"q"]), words, rows) | {"temperature": np.zeros(4, np.float32)}
    out = kernels.launch("sample", 4, args, CONSTANTS)
    assert out["token"].tolist() == [7, 33, 60, 1406]


def test_when_all_candidates_are_banned_the_text_ends_and_the_refusals_are_counted(
    kernels: Interpreter,
) -> None:
    """Slot 0 has 8 tokens in all, slot 1 more than the limit, slot 2 a nucleus of one banned token."""
    words = [b"x"] * TOKENIZER
    words[50] = b"y"
    rows = np.full((3, VOCAB), -np.inf, np.float32)
    rows[0, 100:108] = 1
    rows[1, 100:1000] = 1
    rows[2, 100:102] = 30
    rows[2, 50] = 0
    args = device_arrays(ban_automaton([b"x"]), words, rows)
    args["top_p"] = np.array([1, 1, 0.5], np.float32)
    out = kernels.launch("sample", 3, args, CONSTANTS | {"CANDIDATES": 9})
    assert out["token"].tolist() == [3, 3, 50]
    assert out["ban_events"].tolist() == [8, 9, 2]
    assert out["ban_state"].tolist() == [1, 1, 1]


def test_an_idle_or_ended_slot_stays_idle(kernels: Interpreter) -> None:
    args = device_arrays(ban_automaton([b"x"]), [b"y"] * TOKENIZER, np.zeros((2, VOCAB), np.float32))
    args["token"], args["fst_state"] = np.array([-1, 5], np.int32), np.array([0, -1], np.int32)
    out = kernels.launch("sample", 2, args, CONSTANTS)
    assert out["token"].tolist() == [-1, -1]
    assert out["step"].tolist() == args["step"].tolist()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    wanted = probabilities * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize(("temperature", "banned"), [(1.0, ()), (0.6, ()), (1.0, (0, 3))])
def test_draws_follow_the_softmax_of_what_is_not_banned(temperature: float, banned: tuple[int, ...]) -> None:
    """6,000 draws over 12 tokens: chi-square with at most 11 degrees of freedom below 31.3 (p = 0.001)."""
    logits = np.linspace(-2, 2, 12, dtype=np.float32)
    weights = np.exp(logits.astype(np.float64) / temperature)
    weights[list(banned)] = 0
    counts = np.zeros(12)
    for step in range(6000):
        token, _ = kernel_reference.sample(
            logits,
            tokenizer_size=12,
            temperature=temperature,
            top_p=1.0,
            seed=123,
            step=step,
            eos_id=0,
            allows=lambda token: token not in banned,
        )
        counts[token] += 1
    open_ = weights > 0
    assert counts[~open_].sum() == 0
    assert chi_square(counts[open_], weights[open_] / weights.sum()) < 31.3


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999])
def test_the_nucleus_is_that_of_transformers(top_p: float) -> None:
    import torch
    from transformers import TopPLogitsWarper

    logits = (np.random.default_rng(4).standard_normal(800) * 3).astype(np.float32)
    kept = torch.isfinite(TopPLogitsWarper(top_p)(None, torch.from_numpy(logits)[None])[0]).numpy()
    weights = np.rint(np.exp(logits - logits.max()) * 2.0**24).astype(np.int32)
    least = kernel_reference.nucleus(weights, np.float32(top_p))
    assert (weights >= least).tolist() == kept.tolist()
