# mypy: ignore-errors
"""The transducer step: one program (one warp) per slot rewrites the bytes of the token just sampled.

Semantics are those of `ralbuild.contract.transducer`, byte for byte. Parameters are named by
`ralbuild.contract.buffers`; docs/kernels.md describes the launch.

Memory order: the warp is the whole block. Every lane loads the slot's state, then the block meets
one barrier, and only after it are ring bytes read by other lanes than wrote them and state stored.
An idle slot loads its token and stores only ``output_len``, which this kernel never loads.
"""

import triton
import triton.language as tl


@triton.jit
def _run(
    program,
    program_offsets,
    program_ops,
    string_offsets,
    string_pool,
    rule_events,
    ring,
    output,
    pending,
    length,
    RING: tl.constexpr,
    OUTPUT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Run one program; return the new (pending, length). Bytes beyond OUTPUT are counted, not written."""
    lane = tl.arange(0, LANES)
    for k in range(tl.load(program_offsets + program), tl.load(program_offsets + program + 1)):
        word = tl.load(program_ops + k)
        kind = word & 3
        arg = (word >> 2) & 0x3FFFFFFF
        if kind == 0:  # COPY
            for done in range(0, arg, LANES):
                at = done + lane
                keep = (at < arg) & (length + at < OUTPUT)
                byte = tl.load(ring + ((pending + at) & (RING - 1)), mask=keep, other=0)
                tl.store(output + length + at, byte, mask=keep)
            pending += arg
            length += arg
        elif kind == 1:  # EMIT
            start = tl.load(string_offsets + arg)
            size = tl.load(string_offsets + arg + 1) - start
            for done in range(0, size, LANES):
                at = done + lane
                keep = (at < size) & (length + at < OUTPUT)
                byte = tl.load(string_pool + start + at, mask=keep, other=0)
                tl.store(output + length + at, byte, mask=keep)
            length += size
        elif kind == 2:  # DROP
            pending += arg
        else:  # EVENT
            tl.atomic_add(rule_events + arg, 1)
    return pending, length


@triton.jit
def transduce(
    token,
    tokenizer_size,
    eos_ids,
    eos_count,
    token_offsets,
    token_bytes,
    fst_class,
    fst_next,
    fst_final,
    fst_classes,
    program_offsets,
    program_ops,
    string_offsets,
    string_pool,
    fst_state,
    ring,
    read_pos,
    pending_pos,
    output,
    output_len,
    rule_events,
    RING: tl.constexpr,
    OUTPUT: tl.constexpr,
    LANES: tl.constexpr,
    STATE_BITS: tl.constexpr,
):
    """Advance slot ``program_id(0)`` by its token; at an end of text run the final program."""
    slot = tl.program_id(0)
    lane = tl.arange(0, LANES)
    id = tl.load(token + slot)
    state = tl.load(fst_state + slot)
    length = 0
    if (id >= 0) & (id < tokenizer_size) & (state >= 0):
        read = tl.load(read_pos + slot)
        pending = tl.load(pending_pos + slot)
        ring += slot * RING
        output += slot * OUTPUT
        ended = False
        for k in range(eos_count):
            ended = ended | (tl.load(eos_ids + k) == id)
        start = tl.load(token_offsets + id)
        size = tl.load(token_offsets + id + 1) - start
        if ended:
            size = 0
        for done in range(0, size, LANES):
            at = done + lane
            keep = at < size
            byte = tl.load(token_bytes + start + at, mask=keep, other=0)
            tl.store(ring + ((read + at) & (RING - 1)), byte, mask=keep)
        tl.debug_barrier()
        for k in range(size):
            byte = tl.load(token_bytes + start + k).to(tl.int32)
            entry = tl.load(fst_next + state * fst_classes + tl.load(fst_class + byte).to(tl.int32))
            state = entry & ((1 << STATE_BITS) - 1)
            program = (entry >> STATE_BITS) & ((1 << (32 - STATE_BITS)) - 1)
            if program == 0:  # COPY 1: text that no rule can touch
                passed = tl.load(ring + (pending & (RING - 1)))
                tl.store(output + length, passed, mask=length < OUTPUT)
                pending += 1
                length += 1
            else:
                pending, length = _run(
                    program,
                    program_offsets,
                    program_ops,
                    string_offsets,
                    string_pool,
                    rule_events,
                    ring,
                    output,
                    pending,
                    length,
                    RING,
                    OUTPUT,
                    LANES,
                )
        if ended:
            pending, length = _run(
                tl.load(fst_final + state),
                program_offsets,
                program_ops,
                string_offsets,
                string_pool,
                rule_events,
                ring,
                output,
                pending,
                length,
                RING,
                OUTPUT,
                LANES,
            )
            state = -1
        tl.store(fst_state + slot, state)
        tl.store(read_pos + slot, read + size)
        tl.store(pending_pos + slot, pending)
    tl.store(output_len + slot, length)
