"""Drawing tokens on the CPU, by the formulas of docs/kernels.md. The only door to numpy.

A draw is the largest of ``logit / temperature + Gumbel noise``. The noise comes from Philox 4x32-10
keyed by the request's seed, the step and the token id, so it depends on nothing else: not on the
batch, not on the machine. The Triton kernel `sample` gives the same token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
"""float32, [rows, V] or one row."""
_Words: TypeAlias = NDArray[np.uint32]
_Ids: TypeAlias = NDArray[np.int64]

GROUP = 1024
"""Token ids that share Philox blocks: four ids, a quarter of a group apart, take a block's four words."""
_MOST_NOISE = np.float32(22.9)
"""No noise is larger: it is -log(2^-33) for the smallest uniform number."""
_PROBES = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """How a request draws its tokens: temperature 0 takes the largest logit; seed is 64 bits."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Ranks the ids of a tokenizer; ids at and above ``size`` are never drawn."""

    def __init__(self, size: int) -> None:
        self.size = size

    def ranked(self, row: Logits, draw: Draw, step: int) -> Iterator[int]:
        """Yield token ids from the best down; the first is the draw, the next is it without the first.

        Ids outside the nucleus follow those inside. Finding the first is cheap; going on sorts.
        """
        value = row[: self.size]
        if np.isnan(value).any():
            value = np.where(np.isnan(value), np.float32(-np.inf), value)
        if value.max() == -np.inf:
            return
        if draw.temperature <= 0:
            yield from _descending(value, np.arange(len(value)))
            return
        scaled = value * (np.float32(1.0) / np.float32(draw.temperature))
        if draw.top_p < 1:
            for ids in _tiers(value, draw):
                yield from _descending(scaled[ids] + noise(draw.seed, step, ids), ids)
            return
        first = self._winner(scaled, draw, step)
        yield first
        everything = np.arange(len(scaled))
        following = _descending(scaled + noise_of_all(draw.seed, step, len(scaled)), everything)
        yield from (token for token in following if token != first)

    def _winner(self, scaled: Logits, draw: Draw, step: int) -> int:
        """Return the id of the best score, without noise for ids that cannot reach it."""
        probes = np.argpartition(scaled, -min(_PROBES, len(scaled)))[-_PROBES:]
        best = (scaled[probes] + noise(draw.seed, step, probes)).max()
        ids = np.flatnonzero(scaled >= best - _MOST_NOISE)
        if 4 * len(ids) < len(scaled):
            return int(ids[np.argmax(scaled[ids] + noise(draw.seed, step, ids))])
        return int(np.argmax(scaled + noise_of_all(draw.seed, step, len(scaled))))


def no_logits() -> Logits:
    """Return an empty row set, for steps that read none."""
    return np.zeros((0, 0), np.float32)


def noise(seed: int, step: int, ids: _Ids) -> Logits:
    """Return the Gumbel noise of ``ids``, float32."""
    counters = ids // GROUP * (GROUP // 4) + ids % (GROUP // 4)
    words = _philox(seed, step, counters)
    return _gumbel(words[ids % GROUP // (GROUP // 4), np.arange(len(ids))])


def noise_of_all(seed: int, step: int, size: int) -> Logits:
    """Return the noise of ids 0..size-1: each Philox block is computed once, not four times."""
    groups = -(-size // GROUP)
    words = _philox(seed, step, np.arange(groups * (GROUP // 4)))
    by_id = words.reshape(4, groups, GROUP // 4).transpose(1, 0, 2).reshape(-1)
    return _gumbel(by_id[:size])


def _philox(seed: int, step: int, counters: _Ids) -> _Words:
    """Philox 4x32-10 (Salmon et al. 2011) of the counters (c, step, 0, 0); returns [4, n] words."""
    c0 = counters.astype(np.uint64)
    c1 = np.full_like(c0, step)
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> half) ^ c1 ^ np.uint64(key0), p1 & low
        c2, c3 = (p0 >> half) ^ c3 ^ np.uint64(key1), p0 & low
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def _gumbel(words: _Words) -> Logits:
    """Return -log(-log(1 - u)) for the uniform number u in (0, 1) that each word stands for."""
    u = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    u = np.minimum(u, np.float32(1 - 2.0**-24))
    one, half, third, quarter = (np.float32(x) for x in (1.0, 0.5, 0.33333333, 0.25))
    # Below 2^-8 the logarithm is taken by its series: 1 - u would round away what decides the draw.
    series = u * (one + u * (half + u * (third + u * quarter)))
    wait = np.where(u < np.float32(2.0**-8), series, -np.log(one - u))
    return np.asarray(-np.log(wait), np.float32)


def _tiers(value: Logits, draw: Draw) -> Iterator[_Ids]:
    """Yield the ids of the nucleus, then all others.

    The nucleus is the smallest set of the heaviest tokens that holds ``top_p`` of the mass, with all
    that weigh as much as its lightest. Weights are integers, so their sum has no order.
    """
    scale = np.float32(1.0) / np.float32(draw.temperature)
    unit, half = np.float32(2.0**24), np.float32(0.5)
    weights = (np.exp((value - value.max()) * scale) * unit + half).astype(np.int32)
    need = int(np.float64(np.float32(draw.top_p)) * float(weights.sum(dtype=np.int64)))
    heaviest = np.sort(weights[weights > 0])[::-1]
    least = heaviest[np.argmax(np.cumsum(heaviest, dtype=np.int64) >= need)]
    yield np.flatnonzero(weights >= least)
    yield np.flatnonzero(weights < least)


def _descending(score: Logits, ids: _Ids) -> Iterator[int]:
    """Yield ``ids`` by falling score, equal scores by rising id; minus infinity is never drawn."""
    if not len(score):
        return
    best = int(np.argmax(score))
    if score[best] == -np.inf:
        return
    yield int(ids[best])
    kept = np.flatnonzero(score > -np.inf)
    for index in kept[np.lexsort((ids[kept], -score[kept]))][1:]:
        yield int(ids[index])
