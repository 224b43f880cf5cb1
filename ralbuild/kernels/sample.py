# mypy: ignore-errors
"""The sampler: one program per slot draws the next token and keeps banned phrases out.

Perturbed scores (Gumbel noise) are walked from the largest down; the first candidate whose bytes
the ban automaton allows is an exact draw from the masked distribution. docs/kernels.md holds every
formula (noise, nucleus, order); tests/kernel_reference.py computes the same in NumPy.

Memory order: every warp loads the slot's state; each scan ends in a block-wide reduction, so all
loads happen before the first store. The idle path has a barrier of its own.
"""

import triton
import triton.language as tl


@triton.jit
def _logits(row, ids, tokenizer_size):
    """Load logits; what is not a token of the tokenizer, or not a number, is minus infinity."""
    value = tl.load(row + ids, mask=ids < tokenizer_size, other=-float("inf"))
    return tl.where(value == value, value, -float("inf"))


@triton.jit
def _noise(word):
    """Return the Gumbel noise that 32 random bits stand for."""
    # Uniform on (0, 1); 1 - 2^-24 is the largest value that keeps the logarithm finite.
    u = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)
    # -log(1 - u), by its series where 1 - u would round away the digits that decide the draw.
    wait = tl.where(u < 0.00390625, u * (1.0 + u * (0.5 + u * (0.33333333 + u * 0.25))), -tl.log(1.0 - u))
    return -tl.log(wait)


@triton.jit
def _weights(value, top, scale):
    """Return exp((value - top) * scale) in units of 2^-24, an integer, so that sums have no order."""
    return (tl.exp((value - top) * scale) * 16777216.0 + 0.5).to(tl.int32)


@triton.jit
def _largest(row, tokenizer_size, BLOCK: tl.constexpr):
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    for first in range(0, tokenizer_size, BLOCK):
        best = tl.maximum(best, _logits(row, first + tl.arange(0, BLOCK), tokenizer_size))
    return tl.max(best, 0)


@triton.jit
def _mass(row, tokenizer_size, top, scale, least, BLOCK: tl.constexpr):
    """Return the summed weight of the tokens that weigh at least ``least``."""
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, tokenizer_size, BLOCK):
        weight = _weights(_logits(row, first + tl.arange(0, BLOCK), tokenizer_size), top, scale)
        total += tl.where(weight >= least, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _nucleus(row, tokenizer_size, top, scale, top_p, BLOCK: tl.constexpr):
    """Return the largest weight whose tokens and all heavier ones hold ``top_p`` of the mass."""
    total = _mass(row, tokenizer_size, top, scale, 1, BLOCK)
    need = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    low = 1
    high = 16777216
    while low < high:
        middle = (low + high + 1) // 2
        if _mass(row, tokenizer_size, top, scale, middle, BLOCK) >= need:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _next(
    row, tokenizer_size, greedy, scale, seed, step, top, least, outside, last, last_id, BLOCK: tl.constexpr
):
    """Return (score, id) of the best token after (last, last_id); id is 2^31 - 1 when none is left.

    With ``least`` > 0 only tokens of that weight and more count, or only the others when ``outside``.
    Each lane keeps its own best, so the block meets once, at the end. One Philox block serves four
    ids that are a quarter of BLOCK apart: so every load is coalesced.
    """
    lane = tl.arange(0, BLOCK // 4)
    best = tl.full((BLOCK // 4,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK // 4,), 2147483647, tl.int32)
    for first in range(0, tokenizer_size, BLOCK):
        counter = first // 4 + lane
        zero = counter * 0
        w0 = zero.to(tl.uint32)
        w1 = w0
        w2 = w0
        w3 = w0
        if greedy == 0:
            w0, w1, w2, w3 = tl.philox(seed, counter, zero + step, zero, zero)
        words = (w0, w1, w2, w3)
        for j in tl.static_range(4):
            ids = first + j * (BLOCK // 4) + lane
            value = _logits(row, ids, tokenizer_size)
            score = value
            if greedy == 0:
                score = value * scale + _noise(words[j])
            if least > 0:
                inside = _weights(value, top, scale) >= least
                score = tl.where(inside != outside, score, -float("inf"))
            fresh = (score < last) | ((score == last) & (ids > last_id))
            take = fresh & (score > best)
            best = tl.where(take, score, best)
            best_id = tl.where(take, ids, best_id)
    score = tl.max(best, 0)
    return score, tl.min(tl.where(best == score, best_id, 2147483647), 0)


@triton.jit
def sample(
    logits,
    vocab_size,
    tokenizer_size,
    temperature,
    top_p,
    seed,
    step,
    eos_id,
    token,
    token_offsets,
    token_bytes,
    ban_class,
    ban_next,
    ban_classes,
    ban_state,
    ban_events,
    fst_state,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Draw the token of slot ``program_id(0)``; a slot whose text has ended becomes idle."""
    slot = tl.program_id(0)
    if (tl.load(token + slot) < 0) | (tl.load(fst_state + slot) < 0):
        tl.debug_barrier()
        tl.store(token + slot, -1)
    else:
        row = logits + slot.to(tl.int64) * vocab_size
        tokenizer_size = tl.minimum(tokenizer_size, vocab_size)
        heat = tl.load(temperature + slot)
        keep = tl.load(top_p + slot)
        key = tl.load(seed + slot)
        index = tl.load(step + slot)
        banned = tl.load(ban_state + slot)
        events = tl.load(ban_events + slot)
        greedy = (heat <= 0.0).to(tl.int32)
        scale = 1.0 / tl.where(heat > 0.0, heat, 1.0)
        top = 0.0
        least = 0
        if (greedy == 0) & (keep < 1.0):
            top = _largest(row, tokenizer_size, BLOCK)
            least = _nucleus(row, tokenizer_size, top, scale, keep, BLOCK)
        outside = False
        last = float("inf")
        last_id = -1
        chosen = eos_id
        refused = 0
        searching = True
        while searching:
            last, last_id = _next(
                row, tokenizer_size, greedy, scale, key, index, top, least, outside, last, last_id, BLOCK
            )
            if last_id == 2147483647:
                # Every token of the nucleus was refused: go on with the rest, then give up.
                searching = (least > 0) & (outside == False)  # noqa: E712
                outside = True
                last = float("inf")
                last_id = -1
            else:
                state = banned
                end = tl.load(token_offsets + last_id + 1)
                for k in range(tl.load(token_offsets + last_id), end):
                    byte = tl.load(token_bytes + k).to(tl.int32)
                    state = tl.load(ban_next + state * ban_classes + tl.load(ban_class + byte).to(tl.int32))
                if state > 0:
                    chosen = last_id
                    banned = state
                    searching = False
                else:
                    refused += 1
                    searching = refused < CANDIDATES
        tl.store(token + slot, chosen)
        tl.store(ban_state + slot, banned)
        tl.store(ban_events + slot, events + refused)
        tl.store(step + slot, index + 1)
