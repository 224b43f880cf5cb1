# mypy: ignore-errors
"""Logit biases and penalties: one program per slot changes the slot's row of logits in place.

docs/kernels.md holds the formulas; tests/kernel_reference.py computes the same in NumPy. A slot
that asks for neither costs five loads.

Memory order: the biases are scattered by id, the penalties walk the row; a barrier parts the two.
"""

import triton
import triton.language as tl


@triton.jit
def penalize(
    logits,
    vocab_size,
    tokenizer_size,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    counts,
    bias_ids,
    bias_values,
    bias_count,
    done,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Add biases, then penalise the ids that occurred before, in the row of slot ``program_id(0)``."""
    slot = tl.program_id(0)
    if tl.load(done + slot) == 0:
        row = logits + slot.to(tl.int64) * vocab_size
        size = tl.minimum(tokenizer_size, vocab_size)
        entries = tl.load(bias_count + slot)
        repetition = tl.load(repetition_penalty + slot)
        presence = tl.load(presence_penalty + slot)
        frequency = tl.load(frequency_penalty + slot)
        if entries > 0:
            at = tl.arange(0, ROOM)
            ids = tl.load(bias_ids + slot * ROOM + at, mask=at < entries, other=-1)
            keep = (ids >= 0) & (ids < size)
            value = tl.load(row + ids, mask=keep, other=0.0)
            bias = tl.load(bias_values + slot * ROOM + at, mask=keep, other=0.0)
            tl.store(row + ids, value + bias, mask=keep)
            tl.debug_barrier()
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            count_row = counts + slot.to(tl.int64) * vocab_size
            for first in range(0, size, BLOCK):
                ids = first + tl.arange(0, BLOCK)
                count = tl.load(count_row + ids, mask=ids < size, other=0).to(tl.int32)
                seen = count != 0
                drawn = count & 0x7FFF
                value = tl.load(row + ids, mask=seen, other=0.0)
                value = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
                value = value - frequency * drawn.to(tl.float32)
                value = tl.where(drawn > 0, value - presence, value)
                tl.store(row + ids, value, mask=seen)
