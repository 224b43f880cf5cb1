"""How a token is drawn, in NumPy, from the text of docs/kernels.md: what the `sample` kernel must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ralbuild.simulate.lanes import Array

CANDIDATES = 16
GROUP = 1024
"""Ids that share Philox blocks: four ids a quarter of a group apart take a block's four words."""
LOWEST = np.float32(-3.4028234663852886e38)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to draw from: float32 logits and the request's sampling values.

    ``strict`` masks what is not legal before anything else, as a profile with an `allow` does.
    """

    logits: Array
    tokenizer_size: int
    temperature: float
    top_p: float
    seed: int
    step: int
    eos_id: int
    top_k: int = 0
    min_p: float = 0.0
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token, how many candidates were refused before it, and every score, for near ties.

    ``event`` is 1 when the whole row was masked; 2 when no token was legal as well: the token is then
    ``eos_id``, and the ban automaton stays. ``legal`` is the mask, a bool a token; None for no mask.
    """

    token: int
    refused: int
    scores: Array
    event: int = 0
    legal: Array | None = None


def draw(row: Draw, legal: Callable[[int], bool]) -> Drawn:
    """Draw a token; ``legal`` says whether one may come next."""
    size = min(row.tokenizer_size, len(row.logits))
    value = row.logits[:size].astype(np.float32)
    value = np.where(np.isnan(value), np.float32(-np.inf), value)
    score = value
    if row.temperature > 0:
        scale = np.float32(1.0) / np.float32(row.temperature)
        score = value * scale + noise(row.seed, row.step, np.arange(size))
    refused = 0
    floors = []
    if not row.strict:
        floors = [_floor(row, value)]
        for token in _ranked(score, value >= floors[0])[:CANDIDATES]:
            if legal(token):
                return Drawn(token, refused, score)
            refused += 1
    mask = np.array([legal(token) for token in range(size)], np.bool_)
    value = np.where(mask, value, np.float32(-np.inf))
    score = np.where(value > -np.inf, score, np.float32(-np.inf))
    for floor in [*floors, _floor(row, value)]:
        found = _ranked(score, value >= floor)
        if found:
            return Drawn(found[0], refused, score, 1, mask)
    return Drawn(row.eos_id, refused, score, 2, mask)


def _ranked(score: Array, kept: Array) -> list[int]:
    """Return ids by falling score, the lower id first among equal ones; minus infinity is never drawn."""
    ids = np.flatnonzero(kept & (score > -np.inf))
    ranked: list[int] = ids[np.lexsort((ids, -score[ids]))].tolist()
    return ranked


def _floor(row: Draw, value: Array) -> np.float32:
    """Return the least logit that is kept; weights are whole numbers, so their sum has no order."""
    real = np.sort(value[value > -np.inf])[::-1]
    least = LOWEST
    if row.temperature <= 0 or not len(real):
        return least
    heat, top_p = np.float32(row.temperature), np.float32(row.top_p)
    if 0 < row.top_k <= len(real):
        least = real[row.top_k - 1]
    if top_p < 1:
        kept = real[real >= least]
        weights = (
            np.exp((kept - real[0]) * (np.float32(1) / heat)) * np.float32(2.0**24) + np.float32(0.5)
        ).astype(np.int64)
        need = int(np.float64(top_p) * np.float64(weights.sum()))
        least = kept[int(np.argmax(np.cumsum(weights) >= need))]
    if row.min_p > 0:
        share = min(real[0] + heat * np.log(np.float32(row.min_p)), real[0])
        least = max(least, share)
    return np.float32(least)


def noise(seed: int, step: int, ids: Array) -> Array:
    """Return the Gumbel noise of token ids, float32."""
    counters = ids // GROUP * (GROUP // 4) + ids % (GROUP // 4)
    words = _philox(seed & 0xFFFF_FFFF_FFFF_FFFF, step, counters)
    word = words[ids % GROUP // (GROUP // 4), np.arange(len(ids))]
    u = word.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    u = np.minimum(u, np.float32(1 - 2.0**-24))
    one, half, third, quarter = (np.float32(x) for x in (1.0, 0.5, 0.33333333, 0.25))
    series = u * (one + u * (half + u * (third + u * quarter)))
    wait = np.where(u < np.float32(2.0**-8), series, -np.log(one - u))
    return np.asarray(-np.log(wait), np.float32)


def _philox(seed: int, step: int, counters: Array) -> Array:
    """Philox 4x32-10 (Salmon et al. 2011) of the counters (c, step, 0, 0); returns [4, n] words."""
    c0 = counters.astype(np.uint64)
    c1 = np.full_like(c0, step & 0xFFFFFFFF)
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(key0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(key1), p0 & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)
