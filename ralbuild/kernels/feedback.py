# mypy: ignore-errors
"""Token feedback: one program, one lane a slot, makes the next step's input out of this step's token.

It runs after all kernels that read ``token``. What it writes never leaves the device: the next
forward pass reads ``input_id`` and ``position``, the next draw reads ``counts`` and ``done``.
"""

import triton
import triton.language as tl


@triton.jit
def feedback(
    token,
    fst_state,
    step,
    max_steps,
    counts,
    vocab_size,
    ban_events,
    draw_event,
    slots,
    done,
    input_id,
    position,
    counters,
    BLOCK: tl.constexpr,
):
    """Advance every slot that drew a token; mark those whose text has ended."""
    slot = tl.arange(0, BLOCK)
    here = slot < slots
    drawn = tl.load(token + slot, mask=here, other=0)
    ended = tl.load(done + slot, mask=here, other=1)
    active = here & (drawn >= 0) & (ended == 0)
    place = tl.load(position + slot, mask=active, other=0)
    tl.store(input_id + slot, drawn.to(tl.int64), mask=active)
    tl.store(position + slot, place + 1, mask=active)
    entry = counts + slot.to(tl.int64) * vocab_size + drawn
    known = active & (drawn < vocab_size)
    count = tl.load(entry, mask=known, other=0).to(tl.int32)
    tl.store(entry, (count + 1).to(tl.int16), mask=known & ((count & 0x7FFF) < 0x7FFF))
    last = tl.load(step + slot, mask=active, other=0) >= tl.load(max_steps + slot, mask=active, other=1)
    last = last | (tl.load(fst_state + slot, mask=active, other=0) < 0)
    tl.store(done + slot, 1, mask=active & last)
    event = tl.load(draw_event + slot, mask=active, other=0)
    refused = tl.load(ban_events + slot, mask=active, other=0)
    tl.atomic_add(counters + 0, tl.full((), 1, tl.int64))
    tl.atomic_add(counters + 1, tl.sum(active.to(tl.int64), 0))
    tl.atomic_add(counters + 2, tl.sum((active & last).to(tl.int64), 0))
    tl.atomic_add(counters + 3, tl.sum(tl.where(active, refused, 0).to(tl.int64), 0))
    tl.atomic_add(counters + 4, tl.sum((active & (event > 0)).to(tl.int64), 0))
    tl.atomic_add(counters + 5, tl.sum((active & (event > 1)).to(tl.int64), 0))
