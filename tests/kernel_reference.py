"""What the `sample` kernel must compute, written a second time in NumPy from docs/kernels.md.

Nothing here looks at the kernel's source. The CPU target's sampler has to agree with it too.
"""

from __future__ import annotations

import numpy as np

CANDIDATES = 256
GROUP = 1024
UNIT = np.float32(2.0**24)


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


def nucleus(weights: np.ndarray, top_p: np.float32) -> int:
    """Return the largest weight w such that the tokens of weight >= w hold ``top_p`` of the mass."""
    total = int(weights.sum(dtype=np.int64))
    need = int(np.float64(top_p) * np.float64(total))
    order = np.sort(weights)[::-1].astype(np.int64)
    mass = np.cumsum(order)
    return int(order[int(np.argmax(mass >= need))])


def sample(
    logits: np.ndarray,
    *,
    tokenizer_size: int,
    temperature: float,
    top_p: float,
    seed: int,
    step: int,
    eos_id: int,
    allows,
    candidates: int = CANDIDATES,
) -> tuple[int, int]:
    """Return (token, refused candidates) for one row of float32 logits; ``allows(id)`` says no to a ban."""
    size = min(tokenizer_size, len(logits))
    value = logits[:size].astype(np.float32)
    value = np.where(np.isnan(value), np.float32(-np.inf), value)
    tiers = [np.ones(size, bool)]
    score = value
    if temperature > 0:
        scale = np.float32(1.0) / np.float32(temperature)
        score = value * scale + gumbel(philox_uniform(seed, step, np.arange(size)))
        if top_p < 1:
            weights = (np.exp((value - value.max()) * scale) * UNIT + np.float32(0.5)).astype(np.int32)
            inside = weights >= nucleus(weights, np.float32(top_p))
            tiers = [inside, ~inside]
    refused = 0
    for tier in tiers:
        ids = np.flatnonzero(tier & (score > -np.inf))
        for token in ids[np.lexsort((ids, -score[ids]))]:
            if allows(int(token)):
                return int(token), refused
            refused += 1
            if refused == candidates:
                return eos_id, refused
    return eos_id, refused
