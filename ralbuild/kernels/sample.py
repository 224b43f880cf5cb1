# mypy: ignore-errors
"""The sampler: one program per slot draws the next token and keeps out what the rules forbid.

Perturbed scores (Gumbel noise) are walked from the largest down; the first candidate whose bytes
the ban automaton allows is an exact draw from the masked distribution. When too many are refused,
or the profile has an `allow`, every token is walked and the illegal ones are masked in the row of
logits. docs/kernels.md holds every formula; tests/kernel_reference.py computes the same in NumPy.

Memory order: every warp loads the slot's state; each scan ends in a block-wide reduction, so all
loads happen before the first store. Masking the row has a barrier before and after it, for scans
share the row among the lanes in another way. The idle path has a barrier of its own.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(2147483647)
"""The id that stands for no token."""


@triton.jit
def _logits(row, ids, size):
    """Load logits; what is not a token of the tokenizer, or not a number, is minus infinity."""
    value = tl.load(row + ids, mask=ids < size, other=-float("inf"))
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
def _key(value):
    """Return a whole number that orders as the float does."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """Return the float that `_key` gave ``key`` for."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _wider(most, least, other_most, other_least):
    return tl.maximum(most, other_most), tl.minimum(least, other_least)


@triton.jit
def _largest(row, size, WIDE: tl.constexpr):
    """Return the largest logit, and one that WIDE tokens reach at least: the least of the lanes'."""
    best = tl.full((WIDE,), -float("inf"), tl.float32)
    for first in range(0, size, WIDE):
        best = tl.maximum(best, _logits(row, first + tl.arange(0, WIDE), size))
    return tl.reduce((best, best), 0, _wider)


@triton.jit
def _weight(value, top, scale, count):
    """Return what a logit weighs: exp((value - top) * scale) in units of 2^-24, or 1 to count tokens."""
    weight = (tl.exp((value - top) * scale) * 16777216.0 + 0.5).to(tl.uint32)
    return tl.where(count, 1, weight)


@triton.jit
def _sums(a, b, c, more_a, more_b, more_c):
    return a + more_a, b + more_b, c + more_c


@triton.jit
def _mass(row, size, top, scale, count, a, b, c, WIDE: tl.constexpr):
    """Return what the tokens of at least ``a``, ``b`` and ``c`` weigh together; with ``count`` their number.

    Weights are whole numbers, so sums have no order; the three meet in one reduction of the block.
    """
    sum_a = tl.zeros((WIDE,), tl.uint32)
    sum_b = tl.zeros((WIDE,), tl.uint32)
    sum_c = tl.zeros((WIDE,), tl.uint32)
    for first in range(0, size, WIDE):
        value = _logits(row, first + tl.arange(0, WIDE), size)
        weight = _weight(value, top, scale, count)
        sum_a += tl.where(value >= a, weight, 0)
        sum_b += tl.where(value >= b, weight, 0)
        sum_c += tl.where(value >= c, weight, 0)
    return tl.reduce((sum_a.to(tl.int64), sum_b.to(tl.int64), sum_c.to(tl.int64)), 0, _sums)


@triton.jit
def _total(row, size, top, scale, least, WIDE: tl.constexpr):
    """Return what the tokens of at least ``least`` weigh together."""
    total = tl.zeros((WIDE,), tl.uint32)
    for first in range(0, size, WIDE):
        value = _logits(row, first + tl.arange(0, WIDE), size)
        total += tl.where(value >= least, _weight(value, top, scale, False), 0)
    return tl.sum(total.to(tl.int64), 0)


@triton.jit
def _edge(row, size, top, scale, count, need, total, low, high, WIDE: tl.constexpr):
    """Return a key from ``low`` to ``high`` that parts the tokens which hold ``need`` from the smaller ones.

    The tokens of at least ``low`` hold ``total`` at most, and it is taken when no other key does. A pass over
    the row tries three keys; the search ends when one token, or one value, is left between the bounds.
    """
    held = total
    above = total * 0
    while low < high:
        span = high - low
        a = low + (span + 3) // 4
        b = low + (span + 1) // 2
        c = low + (span * 3 + 3) // 4
        in_a, in_b, in_c = _mass(row, size, top, scale, count, _value(a), _value(b), _value(c), WIDE)
        if in_c >= need:
            low = c
            held = in_c
        elif in_b >= need:
            low = b
            high = c - 1
            held = in_b
            above = in_c
        elif in_a >= need:
            low = a
            high = b - 1
            held = in_a
            above = in_b
        else:
            high = a - 1
            above = in_a
        # Two tokens weigh at least 2 of the lightest together; the half is room for the exponential's error.
        if (held - above) * 2 < _weight(_value(low), top, scale, count).to(tl.int64) * 3:
            high = low
    return low


@triton.jit
def _floor(row, size, heat, scale, top_k, top_p, min_p, WIDE: tl.constexpr):
    """Return the least logit that top_k, then top_p, then min_p keep."""
    floor = -3.4028234663852886e38
    if (heat > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        top, reached = _largest(row, size, WIDE)
        if top > -float("inf"):
            low = _key(floor)
            high = _key(top)
            for cut in range(2):  # top_k counts tokens, then top_p weighs what is left
                by_count = cut == 0
                if tl.where(by_count, top_k > 0, top_p < 1.0):
                    need = top_k.to(tl.int64)
                    total = size.to(tl.int64)
                    least = tl.where(top_k <= WIDE, reached, floor)
                    if cut == 1:
                        total = _total(row, size, top, scale, _value(low), WIDE)
                        need = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
                        least = top - 18.0 * heat  # what is below weighs nothing
                    low = tl.maximum(low, _key(least))
                    low = _edge(row, size, top, scale, by_count, need, total, low, high, WIDE)
            floor = _value(low)
            if min_p > 0.0:
                floor = tl.maximum(floor, top + heat * tl.log(min_p))
                floor = tl.minimum(floor, top)
    return floor


@triton.jit
def _mask(
    row, size, state, strict, eos_ids, eos_count, token_offsets, token_bytes,
    ban_class, ban_next, ban_classes, ban_accepts, WIDE: tl.constexpr,
):  # fmt: skip
    """Make the logit of every token that is not legal in ``state`` minus infinity."""
    may_end = tl.load(ban_accepts + state).to(tl.int32)
    for first in range(0, size, WIDE):
        ids = first + tl.arange(0, WIDE)
        inside = ids < size
        at = tl.load(token_offsets + ids, mask=inside, other=0)
        end = tl.load(token_offsets + ids + 1, mask=inside, other=0)
        legal = (at < end) | (strict == 0)
        ends = ids < 0
        for k in range(eos_count):
            ends = ends | (ids == tl.load(eos_ids + k))
        here = tl.full((WIDE,), 0, tl.int32) + state
        going = inside & (at < end) & (ends == False)  # noqa: E712
        while tl.max(going.to(tl.int32), 0) > 0:
            byte = tl.load(token_bytes + at, mask=going, other=0).to(tl.int32)
            column = tl.load(ban_class + byte, mask=going, other=0).to(tl.int32)
            here = tl.load(ban_next + here * ban_classes + column, mask=going, other=0) + tl.where(
                going, 0, here
            )
            at += 1
            going = going & (here > 0) & (at < end)
        legal = tl.where(ends, may_end > 0, legal & (here > 0))
        tl.store(row + ids, tl.full((WIDE,), -float("inf"), tl.float32), mask=inside & (legal == False))  # noqa: E712


@triton.jit
def _next(row, size, greedy, scale, seed, step, floor, last, last_id, BLOCK: tl.constexpr):
    """Return (score, id) of the best token after (last, last_id); id is NONE when none is left.

    Only tokens of at least the logit ``floor`` count. Each lane keeps its own best, so the block meets
    once, at the end. One Philox block serves four ids that are a quarter of BLOCK apart: so every load
    is coalesced.
    """
    lane = tl.arange(0, BLOCK // 4)
    best = tl.full((BLOCK // 4,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK // 4,), NONE, tl.int32)
    for first in range(0, size, BLOCK):
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
            value = _logits(row, ids, size)
            score = value
            if greedy == 0:
                score = value * scale + _noise(words[j])
            score = tl.where(value >= floor, score, -float("inf"))
            fresh = (score < last) | ((score == last) & (ids > last_id))
            take = fresh & (score > best)
            best = tl.where(take, score, best)
            best_id = tl.where(take, ids, best_id)
    score = tl.max(best, 0)
    return score, tl.min(tl.where(best == score, best_id, NONE), 0)


@triton.jit
def sample(
    logits,
    vocab_size,
    tokenizer_size,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    step,
    eos_id,
    eos_ids,
    eos_count,
    token,
    token_offsets,
    token_bytes,
    ban_class,
    ban_next,
    ban_classes,
    ban_accepts,
    ban_strict,
    ban_state,
    ban_events,
    draw_event,
    done,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Draw the token of slot ``program_id(0)``; a slot that is done becomes idle."""
    slot = tl.program_id(0)
    if tl.load(done + slot) != 0:
        tl.debug_barrier()
        tl.store(token + slot, -1)
    else:
        row = logits + slot.to(tl.int64) * vocab_size
        size = tl.minimum(tokenizer_size, vocab_size)
        heat = tl.load(temperature + slot)
        k = tl.load(top_k + slot)
        p = tl.load(top_p + slot)
        m = tl.load(min_p + slot)
        key = tl.load(seed + slot)
        index = tl.load(step + slot)
        strict = tl.load(ban_strict + slot)
        start = tl.load(ban_state + slot)
        greedy = (heat <= 0.0).to(tl.int32)
        scale = 1.0 / tl.where(heat > 0.0, heat, 1.0)
        state = start
        chosen = NONE
        refused = 0
        # 0: walk candidates; 1: the row is masked; 2: masked, and cut anew.
        phase = tl.where(strict > 0, 2, 0)
        mask = strict > 0
        cut = True
        floor = 0.0
        last = float("inf")
        last_id = -1
        searching = True
        while searching:
            if mask:
                tl.debug_barrier()
                _mask(row, size, start, strict, eos_ids, eos_count, token_offsets, token_bytes,
                      ban_class, ban_next, ban_classes, ban_accepts, WIDE)  # fmt: skip
                tl.debug_barrier()
            if cut:
                floor = _floor(row, size, heat, scale, k, p, m, WIDE)
            mask = False
            cut = False
            last, last_id = _next(row, size, greedy, scale, key, index, floor, last, last_id, BLOCK)
            if last_id != NONE:
                ends = last_id < 0
                for e in range(eos_count):
                    ends = ends | (last_id == tl.load(eos_ids + e))
                at = tl.load(token_offsets + last_id)
                end = tl.where(ends, at, tl.load(token_offsets + last_id + 1))
                state = start
                while at < end:
                    byte = tl.load(token_bytes + at).to(tl.int32)
                    state = tl.load(ban_next + state * ban_classes + tl.load(ban_class + byte).to(tl.int32))
                    at = tl.where(state > 0, at + 1, end)
                if state > 0:
                    chosen = last_id
                    searching = False
                else:
                    refused += 1
            if searching & ((last_id == NONE) | (refused == CANDIDATES)):
                searching = phase < 2
                mask = phase == 0
                cut = phase == 1
                phase += 1
                last = float("inf")
                last_id = -1
        dead = (chosen == NONE).to(tl.int32)
        tl.store(token + slot, tl.where(dead > 0, eos_id, chosen))
        tl.store(ban_state + slot, tl.where(dead > 0, start, state))
        tl.store(ban_events + slot, refused)
        tl.store(draw_event + slot, tl.where(phase > 0, 1, 0) + dead)
        tl.store(step + slot, index + 1)
