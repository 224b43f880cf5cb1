# mypy: ignore-errors
"""The transducer step: one program (one warp) per slot rewrites the bytes of the token just sampled.

Semantics are those of `ralbuild.contract.transducer`, byte for byte. Parameters are named by
`ralbuild.contract.buffers`; docs/kernels.md describes the launch.

Each turn of the main loop does the most urgent thing: the rules read a byte that the redactions have
released, else the redactions read a byte that the markers have released, else the markers read a byte of
the token. What a turn decides is one program, run in one place at its end.

Memory order: the warp is the whole block. Every lane loads the slot's state, then the block meets
one barrier, and only after it are ring bytes read by other lanes than wrote them and state stored.
An idle slot loads its token and stores only ``output_len``, which this kernel never loads.
"""

import triton
import triton.language as tl


@triton.jit
def _copy(
    ring, output, pending, length, count, RING: tl.constexpr, OUTPUT: tl.constexpr, LANES: tl.constexpr
):
    """Write ``count`` bytes of the ring; those beyond OUTPUT are counted, not written."""
    lane = tl.arange(0, LANES)
    for done in range(0, count, LANES):
        at = done + lane
        keep = (at < count) & (length + at < OUTPUT)
        byte = tl.load(ring + ((pending + at) & (RING - 1)), mask=keep, other=0)
        tl.store(output + length + at, byte, mask=keep)
    return length + count


@triton.jit
def _emit(string, string_offsets, string_pool, output, length, OUTPUT: tl.constexpr, LANES: tl.constexpr):
    """Write string number ``string``."""
    lane = tl.arange(0, LANES)
    start = tl.load(string_offsets + string)
    size = tl.load(string_offsets + string + 1) - start
    for done in range(0, size, LANES):
        at = done + lane
        keep = (at < size) & (length + at < OUTPUT)
        byte = tl.load(string_pool + start + at, mask=keep, other=0)
        tl.store(output + length + at, byte, mask=keep)
    return length + size


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
    """Run one program; return the new (pending, length)."""
    for k in range(tl.load(program_offsets + program), tl.load(program_offsets + program + 1)):
        word = tl.load(program_ops + k)
        kind = word & 3
        arg = (word >> 2) & 0x3FFFFFFF
        if kind == 0:  # COPY
            length = _copy(ring, output, pending, length, arg, RING, OUTPUT, LANES)
            pending += arg
        elif kind == 1:  # EMIT
            length = _emit(arg, string_offsets, string_pool, output, length, OUTPUT, LANES)
        elif kind == 2:  # DROP
            pending += arg
        else:  # EVENT
            tl.atomic_add(rule_events + arg, 1)
    return pending, length


@triton.jit
def _character(ring, at, limit, word_pages, word_bits, RING: tl.constexpr):
    """Return (bytes, 256 when it is a word character) of the character at ``at``.

    A broken byte is a character of its own. 0 bytes: what is before ``limit`` is not complete.
    """
    b0 = tl.load(ring + (at & (RING - 1))).to(tl.int32)
    size = 1
    code = b0
    known = 256
    if b0 >= 0x80:
        code = 0
        known = 0
        need = tl.where(
            b0 < 0xC2, 5, tl.where(b0 < 0xE0, 2, tl.where(b0 < 0xF0, 3, tl.where(b0 < 0xF5, 4, 5)))
        )
        have = limit - at
        b1 = tl.load(ring + ((at + 1) & (RING - 1)), mask=have > 1, other=0).to(tl.int32)
        b2 = tl.load(ring + ((at + 2) & (RING - 1)), mask=have > 2, other=0).to(tl.int32)
        b3 = tl.load(ring + ((at + 3) & (RING - 1)), mask=have > 3, other=0).to(tl.int32)
        low = tl.where(b0 == 0xE0, 0xA0, tl.where(b0 == 0xF0, 0x90, 0x80))
        high = tl.where(b0 == 0xED, 0x9F, tl.where(b0 == 0xF4, 0x8F, 0xBF))
        good = 1 + ((b1 >= low) & (b1 <= high)).to(tl.int32)
        good += ((good == 2) & ((b2 & 0xC0) == 0x80)).to(tl.int32)
        good += ((good == 3) & ((b3 & 0xC0) == 0x80)).to(tl.int32)
        if good >= need:
            size = need
            known = 256
            two = ((b0 & 0x1F) << 6) | (b1 & 0x3F)
            three = ((b0 & 0x0F) << 12) | ((b1 & 0x3F) << 6) | (b2 & 0x3F)
            four = ((b0 & 0x07) << 18) | ((b1 & 0x3F) << 12) | ((b2 & 0x3F) << 6) | (b3 & 0x3F)
            code = tl.where(need == 2, two, tl.where(need == 3, three, four))
        elif (good == have) & (need < 5):
            size = 0
    page = tl.load(word_pages + (code >> 8)).to(tl.int32)
    bits = tl.load(word_bits + page * 32 + ((code >> 3) & 31)).to(tl.int32)
    return size, ((bits >> (code & 7)) & 1) * known


@triton.jit
def _holds(check, ring, begin, end, RING: tl.constexpr):
    """Tell (1 or 0) whether the checksum ``check`` holds for the ring's bytes: 1 is Luhn, 2 is mod 97."""
    rest = 0
    if check == 1:
        double = 0
        for k in range(end - begin):
            digit = tl.load(ring + ((end - 1 - k) & (RING - 1))).to(tl.int32) - 48
            is_digit = (digit >= 0) & (digit <= 9)
            value = digit + double * digit
            value = tl.where(value > 9, value - 9, value)
            rest += tl.where(is_digit, value, 0)
            double = tl.where(is_digit, 1 - double, double)
        rest = rest % 10
    elif check == 2:
        size = end - begin
        turn = tl.where(size > 4, 4, 0)
        for k in range(size):
            byte = tl.load(ring + ((begin + (k + turn) % size) & (RING - 1))).to(tl.int32)
            digit = byte - 48
            letter = (byte | 32) - 87
            rest = tl.where((digit >= 0) & (digit <= 9), (rest * 10 + digit) % 97, rest)
            rest = tl.where((letter >= 10) & (letter <= 35), (rest * 100 + letter) % 97, rest)
        rest = tl.where(rest == 1, 0, 1)
    return (rest == 0).to(tl.int32)


@triton.jit
def _accept(number, accept_offsets, accept_rows, ring, start, end, best, best_end, RING: tl.constexpr):
    """Take the first entry of a list whose check holds; return the new (best, best_end)."""
    done = 0
    if end > start:
        for k in range(tl.load(accept_offsets + number), tl.load(accept_offsets + number + 1)):
            entry = tl.load(accept_rows + k)
            if done == 0:
                done = _holds((entry >> 1) & 3, ring, start, end, RING)
                best = tl.where(done == 1, entry, best)
                best_end = tl.where(done == 1, end, best_end)
    return best, best_end


@triton.jit
def transduce(  # noqa: C901
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
    word_pages,
    word_bits,
    modes,
    mark_class,
    mark_next,
    mark_actions,
    marker_rows,
    mark_classes,
    redact_class,
    redact_next,
    redact_final,
    accept_offsets,
    accept_rows,
    redact_rows,
    redact_classes,
    fst_state,
    front,
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
    """Advance slot ``program_id(0)`` by its token; at an end of text decide what is pending."""
    slot = tl.program_id(0)
    lane = tl.arange(0, LANES)
    id = tl.load(token + slot)
    state = tl.load(fst_state + slot)
    length = 0
    if (id >= 0) & (id < tokenizer_size) & (state >= 0):
        read = tl.load(read_pos + slot)
        pending = tl.load(pending_pos + slot)
        front += slot * 8
        mode = tl.load(front)
        mark = tl.load(front + 1)
        redact = tl.load(front + 2)
        free = tl.load(front + 3)
        redact_at = tl.load(front + 4)
        start = tl.load(front + 5)
        best = tl.load(front + 6)
        best_end = tl.load(front + 7)
        fresh = mode >> 16
        mode = mode & 0xFFFF
        home = tl.load(modes + 5 * mode + 1)
        ring += slot * RING
        output += slot * OUTPUT
        ended = False
        for k in range(eos_count):
            ended = ended | (tl.load(eos_ids + k) == id)
        first = tl.load(token_offsets + id)
        size = tl.load(token_offsets + id + 1) - first
        if ended:
            size = 0
        if (fresh > 0) & (size > 0):
            # What the decoder strips from the beginning of a text: one space.
            space = (tl.load(token_bytes + first).to(tl.int32) == 32).to(tl.int32)
            first += space
            size -= space
            fresh = 0
        for done in range(0, size, LANES):
            at = done + lane
            keep = at < size
            byte = tl.load(token_bytes + first + at, mask=keep, other=0)
            tl.store(ring + ((read + at) & (RING - 1)), byte, mask=keep)
        tl.debug_barrier()
        seen = read
        end = read + size
        rules_at = start
        rules_left = 0
        rules_flag = 0
        redact_left = 0
        redact_flag = 0
        marker = 0
        flush = 0  # 1: everything released is to be decided, for a marker or the end of the text
        last = ended
        go = True
        while go:
            program = -1
            resolve = False
            settle = False
            if rules_at < start:
                byte = tl.load(ring + (rules_at & (RING - 1))).to(tl.int32)
                if rules_left == 0:
                    rules_left, rules_flag = _character(ring, rules_at, free, word_pages, word_bits, RING)
                    rules_left = tl.where(rules_left == 0, 1, rules_left)
                    rules_flag = tl.where(byte < 0x80, 0, rules_flag)
                rules_left -= 1
                rules_at += 1
                entry = tl.load(
                    fst_next + state * fst_classes + tl.load(fst_class + byte + rules_flag).to(tl.int32)
                )
                state = entry & ((1 << STATE_BITS) - 1)
                program = (entry >> STATE_BITS) & ((1 << (32 - STATE_BITS)) - 1)
                if program == 0:  # COPY 1: text that no rule can touch
                    passed = tl.load(ring + (pending & (RING - 1)))
                    tl.store(output + length, passed, mask=length < OUTPUT)
                    pending += 1
                    length += 1
                    program = -1
            else:
                ready = redact_at < free
                if ready & (redact_left == 0):
                    redact_left, redact_flag = _character(ring, redact_at, free, word_pages, word_bits, RING)
                    if (redact_left == 0) & (flush == 1):
                        redact_left = 1
                    first_byte = tl.load(ring + (redact_at & (RING - 1))).to(tl.int32)
                    redact_flag = tl.where(first_byte < 0x80, 0, redact_flag)
                ready = ready & (redact_left > 0)
                number = 0
                target = -1
                if ready:
                    if home < 0:
                        redact_at += redact_left
                        redact_left = 0
                        start = redact_at
                    else:
                        byte = tl.load(ring + (redact_at & (RING - 1))).to(tl.int32)
                        klass = tl.load(redact_class + byte + redact_flag).to(tl.int32)
                        entry = tl.load(redact_next + redact * redact_classes + klass)
                        number = (entry >> 18) & 0x3FFF
                        target = entry & 0x3FFFF
                        resolve = target >= 0x3FFFE
                        redact_at += (target == 0x3FFFE).to(tl.int32)
                elif flush == 1:
                    resolve = start < redact_at
                    settle = start >= redact_at
                    if resolve:
                        number = tl.load(redact_final + redact)
                elif seen < end:
                    begin = tl.load(modes + 5 * mode)
                    if begin < 0:
                        seen = end
                        free = end
                    else:
                        byte = tl.load(ring + (seen & (RING - 1))).to(tl.int32)
                        entry = tl.load(
                            mark_next + mark * mark_classes + tl.load(mark_class + byte).to(tl.int32)
                        )
                        mark = entry & 0xFFFF
                        action = (entry >> 16) & 0xFFFF
                        seen += 1
                        free = tl.minimum(free + tl.load(mark_actions + 2 * action), seen)
                        marker = tl.load(mark_actions + 2 * action + 1)
                        flush = tl.where(marker > 0, 1, 0)
                elif last:
                    free = end
                    flush = 1
                    marker = 0
                else:
                    go = False
                if number > 0:
                    best, best_end = _accept(
                        number,
                        accept_offsets,
                        accept_rows,
                        ring,
                        start,
                        redact_at,
                        best,
                        best_end,
                        RING,
                    )
                word = 0
                if resolve:
                    redact_left = 0
                    skip, word = _character(ring, start, free, word_pages, word_bits, RING)
                    word = word >> 8
                    if best >= 0:
                        settle = True
                    else:
                        redact = home + word
                        start += tl.where(skip == 0, 1, skip)
                        redact_at = start
                elif target >= 0:
                    redact = target
                    redact_at += 1
                    redact_left -= 1
                    if (redact == home) | (redact == home + 1):
                        start = redact_at
                if settle:
                    program = tl.load(fst_final + 2 * state + word)
            if program >= 0:
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
            if settle:
                after = 0
                if resolve:
                    row = redact_rows + 2 * (tl.load(modes + 5 * mode + 4) + (best >> 3))
                    length = _emit(
                        tl.load(row + 1),
                        string_offsets,
                        string_pool,
                        output,
                        length,
                        OUTPUT,
                        LANES,
                    )
                    tl.atomic_add(rule_events + tl.load(row), 1)
                    after = best & 1
                    start = best_end
                    redact = home + after
                    best = -1
                    best_end = 0
                else:
                    flush = 0
                    if marker > 0:
                        row = marker_rows + 3 * (marker - 1)
                        flags = tl.load(row + 1)
                        if (flags & 1) != 0:
                            length = _copy(ring, output, free, length, seen - free, RING, OUTPUT, LANES)
                        tl.atomic_add(rule_events + tl.load(row), 1)
                        mode = tl.load(row + 2)
                        mark = tl.load(modes + 5 * mode)
                        home = tl.load(modes + 5 * mode + 1)
                        redact = home
                        free = seen
                        start = seen
                        marker = 0
                        if (flags & 2) != 0:
                            seen = end
                            start = end
                            ended = True
                            go = False
                    else:
                        start = end
                        go = False
                pending = start
                redact_at = start
                rules_at = start
                state = tl.load(modes + 5 * mode + 2) + after
        if ended:
            program = tl.load(modes + 5 * mode + 3)
            if program >= 0:
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
            state = -1
        tl.store(fst_state + slot, state)
        tl.store(read_pos + slot, end)
        tl.store(pending_pos + slot, pending)
        if state >= 0:
            tl.store(front, mode | (fresh << 16))
            tl.store(front + 1, mark)
            tl.store(front + 2, redact)
            tl.store(front + 3, free)
            tl.store(front + 4, redact_at)
            tl.store(front + 5, start)
            tl.store(front + 6, best)
            tl.store(front + 7, best_end)
    tl.store(output_len + slot, length)
