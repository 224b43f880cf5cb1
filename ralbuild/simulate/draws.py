"""How a token is drawn, in NumPy, from the text of docs/kernels.md: what the `sample` kernel must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ralbuild.simulate.lanes import Array

CANDIDATES = 256
GROUP = 1024
"""Ids that share Philox blocks: four ids a quarter of a group apart take a block's four words."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to draw from: float32 logits and the request's sampling values."""

    logits: Array
    tokenizer_size: int
    temperature: float
    top_p: float
    seed: int
    step: int
    eos_id: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token, how many candidates were refused before it, and every score, for near ties.

    ``given_up`` says that no candidate was allowed: the token is ``eos_id``, and the ban automaton stays.
    """

    token: int
    refused: int
    scores: Array
    given_up: bool = False


def draw(row: Draw, allows: Callable[[int], bool]) -> Drawn:
    """Draw a token; ``allows`` says whether the ban automaton lets one pass."""
    size = min(row.tokenizer_size, len(row.logits))
    value = row.logits[:size].astype(np.float32)
    value = np.where(np.isnan(value), np.float32(-np.inf), value)
    score = value
    tiers = [np.ones(size, bool)]
    if value.max(initial=-np.inf) == -np.inf:
        return Drawn(row.eos_id, 0, score, given_up=True)
    if row.temperature > 0:
        scale = np.float32(1.0) / np.float32(row.temperature)
        score = value * scale + noise(row.seed, row.step, np.arange(size))
        if row.top_p < 1:
            inside = _nucleus(value, scale, np.float32(row.top_p))
            tiers = [inside, ~inside]
    refused = 0
    for token in _ranked(score, tiers):
        if allows(token):
            return Drawn(token, refused, score)
        refused += 1
        if refused == CANDIDATES:
            break
    return Drawn(row.eos_id, refused, score, given_up=True)


def _ranked(score: Array, tiers: list[Array]) -> Iterator[int]:
    """Yield ids by falling score, the lower id first among equal ones; minus infinity is never drawn."""
    for tier in tiers:
        ids = np.flatnonzero(tier & (score > -np.inf))
        yield from ids[np.lexsort((ids, -score[ids]))].tolist()


def _nucleus(value: Array, scale: np.float32, top_p: np.float32) -> Array:
    """Return which tokens are in the nucleus; weights are whole numbers, so their sum has no order."""
    weights = (np.exp((value - value.max()) * scale) * np.float32(2.0**24) + np.float32(0.5)).astype(np.int32)
    need = int(np.float64(top_p) * np.float64(weights.sum(dtype=np.int64)))
    heaviest = np.sort(weights)[::-1].astype(np.int64)
    least = max(1, int(heaviest[int(np.argmax(np.cumsum(heaviest) >= need))]))
    inside: Array = weights >= least
    return inside


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
