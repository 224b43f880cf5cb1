"""Drawing tokens on the CPU, by the formulas of docs/kernels.md.

A draw is the largest of ``logit / temperature + Gumbel noise``. The noise comes from Philox 4x32-10
keyed by the request's seed, the step and the token id, so it depends on nothing else: not on the
batch, not on the machine. The Triton kernels `penalize` and `sample` give the same token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ralbuild.contract.buffers import COUNT_MASK, PROMPT_FLAG

Logits: TypeAlias = NDArray[np.float32]
"""float32, [rows, V] or one row."""
Mask: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int16]
"""By token id: how often it was drawn, and the sign bit for ids of the prompt."""
_Words: TypeAlias = NDArray[np.uint32]
_Ids: TypeAlias = NDArray[np.int64]

GROUP = 1024
"""Token ids that share Philox blocks: four ids, a quarter of a group apart, take a block's four words."""
LOWEST = np.float32(-3.4028234663852886e38)
"""The floor that keeps every token."""
_NOISE_SPREAD = np.float32(25.8)
"""No two noises differ by more: the largest is -log(2^-33), the smallest -log(log(2^24))."""
_PROBES = 1024
_CHUNK = 8192
_HEAVY = (1e-2, 1e-4, 0)
_FACTORS = np.array([[0xCD9E8D57], [0xD2511F53]], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True, slots=True)
class Draw:
    """How a request draws its tokens.

    Attributes:
        temperature: 0 takes the largest logit.
        top_k: tokens kept; 0 keeps all.
        top_p, min_p: nucleus mass kept; least share of the largest probability.
        seed: 64 bits.
        repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 change nothing.
        logit_bias: (id, what is added), each id once.
        logprobs: alternatives to report with each token; None reports nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """True when tokens that occurred before are treated in another way."""
        wanted = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return wanted != (1.0, 0.0, 0.0)


class Sampler:
    """Ranks the ids of a tokenizer; ids at and above ``size`` are never drawn."""

    def __init__(self, size: int) -> None:
        self.size = size

    def counts(self, prompt: Sequence[int]) -> Counts:
        """Return the counts of a text that begins with ``prompt``."""
        counts = np.zeros(self.size, np.int16)
        ids = np.asarray(prompt, np.int64)
        counts[ids[ids < self.size]] = PROMPT_FLAG
        return counts

    def adjusted(self, row: Logits, draw: Draw, counts: Counts | None) -> Logits:
        """Return the logits to draw from: biases added, penalties taken; NaN is minus infinity."""
        value = row[: self.size]
        biased = [(token, bias) for token, bias in draw.logit_bias if token < len(value)]
        if biased or counts is not None:
            value = value.copy()
        for token, bias in biased:
            value[token] += np.float32(bias)
        if counts is not None:
            ids = np.flatnonzero(counts[: len(value)])
            value[ids] = _penalised(value[ids], counts[ids].astype(np.int32) & COUNT_MASK, draw)
        if np.isnan(value.max(initial=-np.inf)):
            value = np.where(np.isnan(value), np.float32(-np.inf), value)
        return value

    def ranked(
        self, value: Logits, draw: Draw, step: int, floor: np.float32 = LOWEST, count: int = 1
    ) -> Iterator[int]:
        """Yield ids of logits of at least ``floor`` from the best down, up to ``count`` of them.

        The first is the draw, the next is it without the first, and so on. Finding the first is cheap.
        """
        if draw.temperature <= 0:
            yield from _descending(value, count)
            return
        scale = np.float32(1.0) / np.float32(draw.temperature)
        if floor > LOWEST:
            ids = np.flatnonzero(value >= floor)
            scores = value[ids] * scale + noise(draw.seed, step, ids)
            yield from (int(ids[index]) for index in _descending(scores, count))
            return
        if value.max(initial=-np.inf) == -np.inf:
            return
        scaled = value * scale
        first = _winner(scaled, draw, step)
        yield first
        if count > 1:
            scores = scaled + noise_of_all(draw.seed, step, len(scaled))
            yield from (token for token in _descending(scores, count) if token != first)


def _penalised(value: Logits, drawn: NDArray[np.int32], draw: Draw) -> Logits:
    repetition = np.float32(draw.repetition_penalty)
    value = np.where(value > 0, value / repetition, value * repetition)
    value = value - np.float32(draw.frequency_penalty) * drawn.astype(np.float32)
    return np.where(drawn > 0, value - np.float32(draw.presence_penalty), value)


def masked(value: Logits, mask: Mask) -> Logits:
    """Return the logits with those that ``mask`` does not allow at minus infinity."""
    return np.where(mask[: len(value)], value, np.float32(-np.inf))


def count_token(counts: Counts, token: int) -> None:
    """Count a drawn token; the count stays at its most."""
    if token < len(counts) and counts[token] & COUNT_MASK < COUNT_MASK:
        counts[token] += 1


def cut(value: Logits, draw: Draw) -> np.float32:
    """Return the least logit that top_k, then top_p, then min_p keep.

    Ties at the edge are all kept. Weights are whole numbers, so that their sum has no order.
    """
    if draw.temperature <= 0:
        return LOWEST
    top = value.max(initial=-np.inf)
    if top == -np.inf:
        return LOWEST
    least = LOWEST
    heat = np.float32(draw.temperature)
    if 0 < draw.top_k < len(value):
        least = max(least, np.partition(value, len(value) - draw.top_k)[len(value) - draw.top_k])
    if np.float32(draw.top_p) < 1:
        least = _nucleus(value[value >= least], top, heat, draw.top_p)
    if draw.min_p > 0:
        share = top + heat * np.log(np.float32(draw.min_p))
        least = max(least, min(share, top))
    return np.float32(least)


def _nucleus(kept: Logits, top: np.float32, heat: np.float32, top_p: float) -> np.float32:
    scale = np.float32(1.0) / heat
    unit, half = np.float32(2.0**24), np.float32(0.5)
    weights = (np.exp((kept - top) * scale) * unit + half).astype(np.uint32)
    need = int(np.float64(np.float32(top_p)) * float(weights.sum(dtype=np.int64)))
    for share in _HEAVY:  # a nucleus rarely needs more than the heaviest tokens to be sorted
        heavy = np.flatnonzero(weights >= np.uint32(2**24 * share))
        if share == 0 or weights[heavy].sum(dtype=np.int64) >= need:
            break
    order = heavy[np.argsort(-kept[heavy])]
    least: np.float32 = kept[order[np.argmax(np.cumsum(weights[order], dtype=np.int64) >= need)]]
    return least


def no_logits() -> Logits:
    """Return an empty row set, for steps that read none."""
    return np.zeros((0, 0), np.float32)


def _winner(scaled: Logits, draw: Draw, step: int) -> int:
    """Return the id of the best score; the logarithms of noise are taken for those alone that may win."""
    near = scaled >= scaled.max() - _NOISE_SPREAD
    if 8 * np.count_nonzero(near) > len(scaled):
        words = _words_of_all(draw.seed, step, len(scaled))
        ids = _possible(scaled, words)
        return int(ids[np.argmax(scaled[ids] + _gumbel(words[ids]))])
    ids = np.flatnonzero(near)
    return int(ids[np.argmax(scaled[ids] + noise(draw.seed, step, ids))])


def _possible(scaled: Logits, words: _Words) -> _Ids:
    """Return the ids whose score may be the best, by that of the likeliest ones.

    Noise is at most -log(u): a token wins only if its u is below exp(scaled - best), nearly. Whole groups
    are held to their largest logit first, which needs one exponential a group.
    """
    tops = np.maximum.reduceat(scaled, np.arange(0, len(scaled), GROUP))
    probes = np.flatnonzero(scaled >= tops.max() - np.float32(4))[:_PROBES]
    best = (scaled[probes] + _gumbel(words[probes])).max()
    best -= np.float32(1e-3) + abs(best) * np.float32(1e-6)  # for what rounding does to either side
    reach = np.exp(np.minimum(tops.astype(np.float64) - best, 0)) * (2.0**32 - 1)
    ids = np.flatnonzero(words <= np.repeat(reach.astype(np.uint32), GROUP)[: len(words)])
    shares = words[ids].astype(np.float32) * np.float32(2.0**-32)
    kept: _Ids = ids[shares <= np.exp(np.minimum(scaled[ids] - best, np.float32(1)))]
    return kept


def noise(seed: int, step: int, ids: _Ids) -> Logits:
    """Return the Gumbel noise of ``ids``, float32."""
    counters = ids // GROUP * (GROUP // 4) + ids % (GROUP // 4)
    words = _philox(seed, step, counters)
    return _gumbel(words[ids % GROUP // (GROUP // 4), np.arange(len(ids))])


def noise_of_all(seed: int, step: int, size: int) -> Logits:
    """Return the noise of ids 0..size-1: each Philox block is computed once, not four times."""
    return _gumbel(_words_of_all(seed, step, size))


def _words_of_all(seed: int, step: int, size: int) -> _Words:
    groups = -(-size // GROUP)
    words = _philox(seed, step, np.arange(groups * (GROUP // 4)))
    return words.reshape(4, groups, GROUP // 4).transpose(1, 0, 2).reshape(-1)[:size]


def _philox(seed: int, step: int, counters: _Ids) -> _Words:
    """Philox 4x32-10 (Salmon et al. 2011) of the counters (c, step, 0, 0); returns [4, n] words."""
    words = np.empty((4, len(counters)), np.uint32)
    for begin in range(0, len(counters), _CHUNK):  # so much stays in the processor's cache
        part = slice(begin, begin + _CHUNK)
        _philox_chunk(seed, step, counters[part], words[:, part])
    return words


def _philox_chunk(seed: int, step: int, counters: _Ids, out: _Words) -> None:
    # Both halves of a round are one array: `even` is (c0, c2), `odd` is (c1, c3).
    even = np.zeros((2, len(counters)), np.uint64)
    odd = np.zeros_like(even)
    even[0], odd[0] = counters, step
    product = np.empty_like(even)
    for keys in _round_keys(seed):
        np.multiply(even[::-1], _FACTORS, out=product)
        np.right_shift(product, _HALF, out=even)
        even ^= odd
        even ^= keys
        np.bitwise_and(product, _LOW, out=odd)
    out[0::2], out[1::2] = even, odd


def _round_keys(seed: int) -> NDArray[np.uint64]:
    """Return [10, 2, 1]: the two keys of every round."""
    first = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint64)
    return ((first + np.arange(10, dtype=np.uint64)[:, None] * _WEYL) & _LOW)[:, :, None]


def _gumbel(words: _Words) -> Logits:
    """Return -log(-log(1 - u)) for the uniform number u in (0, 1) that each word stands for."""
    u = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    u = np.minimum(u, np.float32(1 - 2.0**-24))
    one, half, third, quarter = (np.float32(x) for x in (1.0, 0.5, 0.33333333, 0.25))
    # Below 2^-8 the logarithm is taken by its series: 1 - u would round away what decides the draw.
    series = u * (one + u * (half + u * (third + u * quarter)))
    wait = np.where(u < np.float32(2.0**-8), series, -np.log(one - u))
    return np.asarray(-np.log(wait), np.float32)


def _descending(score: Logits, count: int) -> Iterator[int]:
    """Yield up to ``count`` places by falling score, then rising place; never at minus infinity."""
    if not len(score):
        return
    best = int(np.argmax(score))
    if score[best] == -np.inf:
        return
    yield best
    if count == 1:
        return
    least = np.partition(score, len(score) - count)[len(score) - count] if count < len(score) else -np.inf
    kept = np.flatnonzero((score >= least) & (score > -np.inf))
    for index in kept[np.argsort(-score[kept], kind="stable")][1:count]:
        yield int(index)
