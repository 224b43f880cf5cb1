"""Wraps a step's text in <b> and </b> when its token is one of the terms.

Against the article's kernel: ids are compared with `token` (int32) and not with bytes; the text is
moved, not overwritten; every access is masked by the row's own length; a program touches its slot's row
only; and the terms are read a block at a time.
"""

import triton
import triton.language as tl


@triton.jit
def bold_tokens_kernel(
    token_ptr,  # *int32, sampled id per slot; -1 when the slot is idle
    terms_ptr,  # *int32, token ids of the config's terms
    term_count,  # int32
    output_ptr,  # *uint8, text decided in this step, one row a slot
    output_len_ptr,  # *int32, its length
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr = 4096,
):
    slot = tl.program_id(axis=0)
    token = tl.load(token_ptr + slot)
    found = 0
    for start in range(0, term_count, BLOCK_SIZE):
        at = start + tl.arange(0, BLOCK_SIZE)
        terms = tl.load(terms_ptr + at, mask=at < term_count, other=-2)
        found += tl.sum((terms == token).to(tl.int32), axis=0)
    size = tl.load(output_len_ptr + slot)
    if (found > 0) & (size > 0) & (size + 7 <= ROW):
        place = tl.arange(0, ROW)
        row = output_ptr + slot * ROW
        text = tl.load(row + place - 3, mask=(place >= 3) & (place < size + 3), other=0)
        tl.debug_barrier()  # every lane has read before one writes
        text = tl.where(place == 0, 60, text)  # <
        text = tl.where((place == 1) | (place == size + 5), 98, text)  # b
        text = tl.where((place == 2) | (place == size + 6), 62, text)  # >
        text = tl.where(place == size + 3, 60, text)  # <
        text = tl.where(place == size + 4, 47, text)  # /
        tl.store(row + place, text.to(tl.uint8), mask=place < size + 7)
        tl.store(output_len_ptr + slot, size + 7)
