"""The kernels around sampling: exact against their NumPy twin, and the twin against outside values.

Random numbers against the published vectors of Random123; probabilities against the softmax; cuts and
penalties against transformers; bans against a search for the phrase in the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import kernel_reference
import numpy as np
import pytest
from kernel_interpreter import Interpreter, interpreter

from ralbuild.contract.bans import BanSlot, BanTable, read_bans, write_bans
from ralbuild.fold.bans import Limits, build_bans

VOCAB, TOKENIZER = 1500, 1407
CONSTANTS = {"BLOCK": 1024, "WIDE": 2048, "CANDIDATES": 16}
EOS = 3


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
        "top_k": np.zeros(slots, np.int32),
        "top_p": np.ones(slots, np.float32),
        "min_p": np.zeros(slots, np.float32),
        "seed": np.arange(slots, dtype=np.int64) * -(1 << 40) + 17,
        "step": np.arange(slots, dtype=np.int32),
        "eos_id": EOS,
        "eos_ids": np.array([EOS], np.int32),
        "eos_count": 1,
        "token": np.zeros(slots, np.int32),
        "token_offsets": np.cumsum([0] + [len(word) for word in words]).astype(np.int32),
        "token_bytes": np.frombuffer(b"".join(words), np.uint8),
        "ban_class": np.frombuffer(table.cls, np.uint8),
        "ban_next": np.frombuffer(table.trans, np.uint32).view(np.int32),
        "ban_classes": table.classes,
        "ban_accepts": np.frombuffer(table.accepts, np.uint8),
        "ban_strict": np.zeros(slots, np.int32),
        "ban_state": np.full(slots, table.starts[0], np.int32),
        "ban_events": np.zeros(slots, np.int32),
        "draw_event": np.full(slots, 7, np.int32),
        "done": np.zeros(slots, np.int32),
    }


def legality(table: BanTable, words: list[bytes], state: int, strict: bool) -> Callable[[int], bool]:
    """What a slot in ``state`` may draw, by the plain executor."""
    slot = BanSlot(table, 0)
    slot.state, slot.strict, slot.active = state, strict, True
    return lambda token: slot.may_end if token == EOS else slot.allows(words[token])


def expected(args: dict[str, Any], slot: int, legal: Any, candidates: int = 16) -> kernel_reference.Drawn:
    settings = {
        name: args[name][slot].item() for name in ("temperature", "top_k", "top_p", "min_p", "seed", "step")
    }
    strict = bool(args["ban_strict"][slot])
    row = kernel_reference.Row(
        args["logits"][slot], TOKENIZER, strict=strict, candidates=candidates, **settings
    )
    return kernel_reference.sample(row, legal)


def test_every_draw_agrees_with_the_numpy_twin_and_no_banned_phrase_appears(kernels: Interpreter) -> None:
    """Five requests of different settings, two steps; the text is searched for the phrases."""
    rng = np.random.default_rng(11)
    phrases, words = [b"ab", b"ca c", b"bbb"], tokens(rng)
    table = ban_automaton(phrases)
    args = device_arrays(table, words, np.zeros((5, VOCAB), np.float32))
    args["temperature"] = np.array([0, 0.5, 3, 0.8, 1], np.float32)
    args["top_k"] = np.array([0, 0, 40, 3, 50], np.int32)
    args["top_p"] = np.array([1, 1, 1, 0.05, 0.8], np.float32)
    args["min_p"] = np.array([0, 0.02, 0, 0, 0.01], np.float32)
    texts, refused = [b""] * 5, 0
    for _ in range(2):
        args["logits"] = (rng.standard_normal((5, VOCAB)) * 4).astype(np.float32)
        legal = [legality(table, words, int(state), False) for state in args["ban_state"]]
        draws = [expected(args, slot, legal[slot]) for slot in range(5)]
        states = [BanSlot(table, 0) for _ in range(5)]
        for slot, draw in enumerate(draws):
            states[slot].state = int(args["ban_state"][slot])
            states[slot].advance(words[draw.token] if draw.token != EOS else b"")
            texts[slot] += words[draw.token]
        args |= kernels.launch("sample", 5, args, CONSTANTS)
        assert args["token"].tolist() == [draw.token for draw in draws]
        assert args["ban_state"].tolist() == [slot.state for slot in states]
        assert args["ban_events"].tolist() == [draw.refused for draw in draws]
        assert args["draw_event"].tolist() == [int(draw.masked) for draw in draws]
        refused += sum(draw.refused for draw in draws)
    assert refused > 0
    assert args["step"].tolist() == [2 + slot for slot in range(5)]
    assert not any(phrase in text for phrase in phrases for text in texts)


def test_cuts_keep_the_same_tokens_wherever_their_edge_lies(kernels: Interpreter) -> None:
    """Few and many kept, ties, sums met to the unit, logits around zero, and more kept than a pass has lanes."""
    rng = np.random.default_rng(17)
    slots = 8
    rows = rng.standard_normal((slots, VOCAB)) * rng.choice([0.1, 1, 30], (slots, 1))
    rows[::3] = np.round(rows[::3] * 4) / 4
    rows[5] = 0.0
    rows[6, 40:] = -np.inf
    words = [b"x"] * TOKENIZER
    args = device_arrays(ban_automaton([b"q"]), words, rows.astype(np.float32))
    args["temperature"] = rng.choice([0.01, 0.7, 1, 8], slots).astype(np.float32)
    args["top_k"] = rng.choice([0, 1, 2, 3, 256, 257, 2000], slots).astype(np.int32)
    args["top_p"] = rng.choice([1e-9, 0.1, 0.25, 0.5, 0.95, 1], slots).astype(np.float32)
    draws = [expected(args, slot, lambda _: True) for slot in range(slots)]
    out = kernels.launch("sample", slots, args, CONSTANTS | {"WIDE": 256})
    assert out["token"].tolist() == [draw.token for draw in draws]


def test_top_k_keeps_tokens_that_weigh_nothing_when_those_before_are_banned(kernels: Interpreter) -> None:
    """Ten banned tokens far above 300 others, of which top_k 290 keeps 280: all of them can be drawn."""
    slots = 2
    rows = np.full((slots, VOCAB), -np.inf, np.float32)
    rows[:, 100:110] = 50.0
    rows[:, 400:700] = -950.0 - 1e-4 * np.arange(300)
    words = [b"y"] * TOKENIZER
    words[100:110] = [b"x"] * 10
    table = ban_automaton([b"x"])
    args = device_arrays(table, words, rows)
    args["temperature"] = np.full(slots, 0.5, np.float32)
    args["top_k"] = np.full(slots, 290, np.int32)
    out = kernels.launch("sample", slots, args, CONSTANTS | {"WIDE": 256})
    assert out["token"].min() >= 400
    assert not out["draw_event"].any(), "the cut was made anew: too few were kept"
    legal = legality(table, words, 1, False)
    assert out["token"].tolist() == [expected(args, slot, legal).token for slot in range(slots)]


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


def test_refusals_widen_the_search_and_only_when_nothing_is_legal_the_text_ends(kernels: Interpreter) -> None:
    """Slots: 8 tokens, all banned; 900 banned and one legal that is the least likely; a banned nucleus;
    the same with one legal token left inside the nucleus, behind the limit; an `allow` without a token."""
    words = [b"x"] * TOKENIZER
    words[50] = b"y"
    words[EOS] = b""
    rows = np.full((5, VOCAB), -np.inf, np.float32)
    rows[0, 100:108] = 1
    rows[1, 100:1000] = 1
    rows[1, 50] = -9
    rows[2, 100:102] = 30
    rows[2, [50, 60]] = 0
    rows[3, 100:120] = 5
    rows[3, 50] = 4.9
    rows[3, EOS] = 4
    rows[4, 100] = 1
    table = ban_automaton([b"x"])
    args = device_arrays(table, words, rows)
    args["temperature"] = np.array([1, 1, 1, 1e-3, 1], np.float32)
    args["top_p"] = np.array([1, 1, 0.5, 0.999, 1], np.float32)
    args["ban_strict"] = np.array([0, 0, 0, 0, 1], np.int32)
    legal = [legality(table, words, 1, bool(strict)) for strict in args["ban_strict"]]
    draws = [expected(args, slot, legal[slot], 9) for slot in range(5)]
    assert [draw.token for draw in draws] == [None, 50, 50, 50, None]
    out = kernels.launch("sample", 5, args, CONSTANTS | {"CANDIDATES": 9})
    assert out["token"].tolist() == [EOS, 50, 50, 50, EOS]
    assert out["ban_events"].tolist() == [draw.refused for draw in draws] == [8, 9, 2, 9, 0]
    assert out["draw_event"].tolist() == [2, 1, 1, 1, 2]
    assert out["ban_state"].tolist() == [1, 1, 1, 1, 1]


def test_an_allow_masks_before_the_cuts_and_ends_where_a_text_is_complete(kernels: Interpreter) -> None:
    """The likeliest tokens are illegal; top_k 1 must still take the likeliest legal one."""
    words = tokens(np.random.default_rng(5))
    words[EOS] = b""
    words[4] = b""  # a special token that ends nothing
    table = read_bans(build_bans([Limits(texts=(b"aab", b"aab c"))]), "test")
    states = [BanSlot(table, 0) for _ in range(3)]
    rng = np.random.default_rng(6)
    args = device_arrays(table, words, np.zeros((3, VOCAB), np.float32))
    args["ban_strict"] = np.ones(3, np.int32)
    args["top_k"] = np.array([1, 0, 5], np.int32)
    args["top_p"] = np.array([1, 0.1, 0.9], np.float32)
    texts = [b""] * 3
    running = {0, 1, 2}
    while running:
        rows = rng.standard_normal((3, VOCAB)).astype(np.float32) * 2
        rows[:, 4] = 40
        rows[0, EOS], rows[1:, EOS] = 30, -30
        args["logits"] = rows
        for slot in range(3):
            states[slot].state = int(args["ban_state"][slot])
        draws = [expected(args, slot, legality(table, words, states[slot].state, True)) for slot in range(3)]
        args |= kernels.launch("sample", 3, args, CONSTANTS)
        assert args["token"].tolist() == [draw.token for draw in draws]
        running -= {slot for slot in range(3) if args["token"][slot] == EOS}
        for slot in running:
            texts[slot] += words[args["token"][slot]]
        args["done"] = np.array([int(slot not in running) for slot in range(3)], np.int32)
        args["token"] = np.array([0, 0, 0], np.int32)
        if args["done"].any():
            break
    assert texts[0] == b"aab"
    assert all(b"aab c".startswith(text) for text in texts)


def test_a_slot_that_is_done_stays_idle(kernels: Interpreter) -> None:
    args = device_arrays(ban_automaton([b"x"]), [b"y"] * TOKENIZER, np.zeros((2, VOCAB), np.float32))
    args["done"] = np.array([1, 1], np.int32)
    out = kernels.launch("sample", 2, args, CONSTANTS)
    assert out["token"].tolist() == [-1, -1]
    assert out["step"].tolist() == args["step"].tolist()


def test_penalties_and_biases_are_those_of_the_numpy_twin(kernels: Interpreter) -> None:
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((5, VOCAB)) * 5).astype(np.float32)
    counts = rng.integers(0, 4, (5, VOCAB)).astype(np.int16) * (rng.random((5, VOCAB)) < 0.2)
    counts = (counts | np.where(rng.random((5, VOCAB)) < 0.1, np.int16(-0x8000), np.int16(0))).astype(
        np.int16
    )
    bias_ids, bias_values = np.zeros((5, 1024), np.int32), np.zeros((5, 1024), np.float32)
    biases: list[dict[int, float]] = [
        {},
        {5: 2.5, 1406: -100.0},
        {},
        {n: n / 100 for n in range(1024)},
        {7: 1.0},
    ]
    for slot, bias in enumerate(biases):
        bias_ids[slot, : len(bias)] = list(bias)
        bias_values[slot, : len(bias)] = list(bias.values())
    settings = {
        "repetition_penalty": np.array([1, 1.3, 0.8, 1, 1.3], np.float32),
        "presence_penalty": np.array([0, 0.5, 0, 0, 0.5], np.float32),
        "frequency_penalty": np.array([0, 0.25, -1.5, 0, 0.25], np.float32),
    }
    args: dict[str, Any] = {
        "logits": rows, "vocab_size": VOCAB, "tokenizer_size": TOKENIZER, **settings, "counts": counts,
        "bias_ids": bias_ids, "bias_values": bias_values,
        "bias_count": np.array([len(bias) for bias in biases], np.int32), "done": np.array([0, 0, 0, 0, 1], np.int32),
    }  # fmt: skip
    out = kernels.launch("penalize", 5, args, {"BLOCK": 2048, "ROOM": 1024})["logits"]
    for slot in range(4):
        names = ("repetition", "presence", "frequency")
        wanted = kernel_reference.penalize(
            rows[slot], counts[slot], bias=biases[slot],
            **{name: float(settings[f"{name}_penalty"][slot]) for name in names},
        )  # fmt: skip
        np.testing.assert_array_max_ulp(out[slot, :TOKENIZER], wanted[:TOKENIZER], 1)
        assert (out[slot, TOKENIZER:] == rows[slot, TOKENIZER:]).all()
    assert (out[4] == rows[4]).all()


def test_feedback_makes_the_next_input_and_marks_what_has_ended(kernels: Interpreter) -> None:
    """Slots: goes on; has its last token; its text ended; idle; done before; no token of the row; full count."""
    args: dict[str, Any] = {
        "token": np.array([5, 6, 7, -1, 8, 40, 9], np.int32),
        "fst_state": np.array([1, 1, -1, 1, 1, 0, 2], np.int32),
        "step": np.array([3, 4, 1, 0, 2, 1, 1], np.int32),
        "max_steps": np.array([9, 4, 9, 9, 9, 9, 9], np.int32),
        "counts": np.zeros((7, 20), np.int16),
        "vocab_size": 20,
        "ban_events": np.array([2, 0, 0, 9, 9, 1, 0], np.int32),
        "draw_event": np.array([1, 0, 2, 2, 2, 0, 0], np.int32),
        "slots": 7,
        "done": np.array([0, 0, 0, 0, 1, 0, 0], np.int32),
        "input_id": np.full(7, 11, np.int64),
        "position": np.arange(7, dtype=np.int64) * 10,
        "counters": np.full(6, 1 << 40, np.int64),
    }
    args["counts"][0, 5], args["counts"][6, 9] = -0x8000, 0x7FFF
    out = kernels.launch("feedback", 1, args, {"BLOCK": 1024})
    assert out["input_id"].tolist() == [5, 6, 7, 11, 11, 40, 9]
    assert out["position"].tolist() == [1, 11, 21, 30, 40, 51, 61]
    assert out["done"].tolist() == [0, 1, 1, 0, 1, 0, 0]
    assert (out["counts"] & 0x7FFF).sum(1).tolist() == [1, 1, 1, 0, 0, 0, 0x7FFF]
    assert out["counts"][0, 5] == -0x8000 + 1
    assert (out["counters"] - (1 << 40)).tolist() == [1, 5, 2, 3, 2, 1]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    wanted = probabilities * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize(("temperature", "banned"), [(1.0, ()), (0.6, ()), (1.0, (0, 3))])
def test_draws_follow_the_softmax_of_what_is_not_banned(temperature: float, banned: tuple[int, ...]) -> None:
    """4,000 draws over 12 tokens: chi-square with at most 11 degrees of freedom below 31.3 (p = 0.001)."""
    logits = np.linspace(-2, 2, 12, dtype=np.float32)
    weights = np.exp(logits.astype(np.float64) / temperature)
    weights[list(banned)] = 0
    counts = np.zeros(12)
    for step in range(4000):
        row = kernel_reference.Row(logits, 12, temperature, seed=123, step=step)
        counts[kernel_reference.sample(row, lambda token: token not in banned).token] += 1
    open_ = weights > 0
    assert counts[~open_].sum() == 0
    assert chi_square(counts[open_], weights[open_] / weights.sum()) < 31.3


@pytest.mark.parametrize("top_k", [0, 1, 20, 799, 800, 5000])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_what_is_cut_off_is_what_transformers_cuts_off(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The order is that of transformers: temperature, top_k, top_p, min_p."""
    import torch
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = (np.random.default_rng(4).standard_normal(800) * 3).astype(np.float32)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    kept = torch.isfinite(chain(None, torch.from_numpy(logits)[None])[0]).numpy()
    least = kernel_reference.floor(logits, temperature, top_k, top_p, min_p)
    assert (logits >= least).tolist() == kept.tolist()


@pytest.mark.parametrize(("repetition", "bias"), [(1.4, {}), (0.7, {3: 2.0, 70: -50.0}), (1.0, {9: 5.0})])
def test_bias_then_repetition_is_that_of_transformers(repetition: float, bias: dict[int, float]) -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    rng = np.random.default_rng(8)
    logits = (rng.standard_normal(100) * 3).astype(np.float32)
    prompt, answer = rng.integers(0, 100, 20), rng.integers(0, 100, 20)
    seen = torch.from_numpy(np.concatenate([prompt, answer]))[None]
    scores = torch.from_numpy(logits.copy())[None]
    if bias:
        scores = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(seen, scores)
    scores = RepetitionPenaltyLogitsProcessor(repetition)(seen, scores)
    counts = np.bincount(answer, minlength=100).astype(np.int16)
    counts[prompt] |= np.int16(-0x8000)
    found = kernel_reference.penalize(logits, counts, repetition=repetition, bias=bias)
    np.testing.assert_allclose(found, scores[0].numpy(), rtol=1e-6)


def test_presence_and_frequency_follow_the_published_formula() -> None:
    """OpenAI: mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, c counting the answer alone."""
    logits = np.array([2.0, -1.0, 0.5, 3.0], np.float32)
    counts = np.array([3, 0, -0x8000, 1], np.int16)
    found = kernel_reference.penalize(logits, counts, presence=0.5, frequency=0.25)
    assert found.tolist() == [2.0 - 0.75 - 0.5, -1.0, 0.5, 3.0 - 0.25 - 0.5]
