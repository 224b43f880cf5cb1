"""What the kernels around sampling must compute, written a second time in NumPy from docs/kernels.md.

Nothing here looks at a kernel's source. The CPU target's sampler has to agree with it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CANDIDATES = 16
GROUP = 1024
UNIT = np.float32(2.0**24)
LOWEST = np.float32(-3.4028234663852886e38)


def philox_4x32_10(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox 4x32 (Salmon et al. 2011); ``counter`` is [n, 4] uint32, so is the result."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def philox_uniform(seed: int, step: int, ids: np.ndarray) -> np.ndarray:
    """Return float32 in (0, 1), one for each token id, keyed by the request's seed and step."""
    ids = np.asarray(ids, np.int64)
    counter = np.zeros((len(ids), 4), np.uint32)
    counter[:, 0] = ids // GROUP * (GROUP // 4) + ids % (GROUP // 4)
    counter[:, 1] = step
    seed &= (1 << 64) - 1
    words = philox_4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    word = words[np.arange(len(ids)), ids % GROUP // (GROUP // 4)]
    u = word.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return np.minimum(u, np.float32(1 - 2.0**-24))


def gumbel(u: np.ndarray) -> np.ndarray:
    """Return -log(-log(1 - u)), float32, with the inner logarithm by its series below 2^-8."""
    one, half, third, quarter = (np.float32(x) for x in (1.0, 0.5, 0.33333333, 0.25))
    series = u * (one + u * (half + u * (third + u * quarter)))
    wait = np.where(u < np.float32(2.0**-8), series, -np.log(one - u))
    return -np.log(wait)


def penalize(
    row: np.ndarray,
    counts: np.ndarray,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
) -> np.ndarray:
    """Return a row with biases added and penalties taken; ``counts`` is int16, its sign bit the prompt."""
    out = row.astype(np.float32)
    for token, amount in (bias or {}).items():
        if token < len(out):
            out[token] += np.float32(amount)
    drawn = counts.astype(np.int32) & 0x7FFF
    for token in np.flatnonzero(counts[: len(out)]):
        value = out[token]
        value = value / np.float32(repetition) if value > 0 else value * np.float32(repetition)
        value -= np.float32(frequency) * np.float32(drawn[token])
        if drawn[token]:
            value -= np.float32(presence)
        out[token] = value
    return out


def floor(value: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.float32:
    """Return the least logit that top_k, then top_p, then min_p keep."""
    real = np.sort(value[value > -np.inf])[::-1]
    least = LOWEST
    if temperature <= 0 or not len(real):
        return least
    heat = np.float32(temperature)
    scale = np.float32(1.0) / heat
    if 0 < top_k < len(real):
        least = real[top_k - 1]
    if np.float32(top_p) < 1:
        kept = real[real >= least]
        weights = (np.exp((kept - real[0]) * scale) * UNIT + np.float32(0.5)).astype(np.int64)
        need = int(np.float64(np.float32(top_p)) * np.float64(weights.sum()))
        least = kept[int(np.argmax(np.cumsum(weights) >= need))]
    if min_p > 0:
        least = max(least, min(real[0] + heat * np.log(np.float32(min_p)), real[0]))
    return np.float32(least)


@dataclass
class Row:
    """One row of float32 logits and how to draw from it."""

    logits: np.ndarray
    size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    step: int = 0
    strict: bool = False
    candidates: int = CANDIDATES


@dataclass
class Drawn:
    """The token, None when no token is legal; refused candidates; whether the row had to be masked."""

    token: int | None
    refused: int
    masked: bool


def sample(row: Row, legal: Callable[[int], bool]) -> Drawn:
    """Draw; ``legal(id)`` says whether the rules let a token come next."""
    size = min(row.size, len(row.logits))
    value = row.logits[:size].astype(np.float32)
    value = np.where(np.isnan(value), np.float32(-np.inf), value)
    refused = 0
    if not row.strict:
        order = _ranked(row, value, value >= _floor(row, value))
        for token in order[: row.candidates]:
            if legal(int(token)):
                return Drawn(int(token), refused, False)
            refused += 1
    allowed = np.array([legal(token) for token in range(size)], bool)
    masked = np.where(allowed, value, np.float32(-np.inf))
    floors = [_floor(row, masked)] if row.strict else [_floor(row, value), _floor(row, masked)]
    for least in floors:
        order = _ranked(row, masked, masked >= least)
        if len(order):
            return Drawn(int(order[0]), refused, True)
    return Drawn(None, refused, True)


def _floor(row: Row, value: np.ndarray) -> np.float32:
    return floor(value, row.temperature, row.top_k, row.top_p, row.min_p)


def _ranked(row: Row, value: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return kept ids by falling score, the lower id first among equal ones."""
    score = value
    if row.temperature > 0:
        scale = np.float32(1.0) / np.float32(row.temperature)
        score = value * scale + gumbel(philox_uniform(row.seed, row.step, np.arange(len(value))))
    ids = np.flatnonzero(kept & (score > -np.inf))
    return ids[np.lexsort((ids, -score[ids]))]
