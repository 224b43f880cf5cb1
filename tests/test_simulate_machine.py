"""Control flow, barriers, memory and races: right kernels run, wrong ones are caught where they are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_support import program, run

from ralbuild.simulate.faults import Fault, FaultError

AT = "mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; add.u64 %rd4, %rd1, %rd9;\n"

COLLATZ = (
    AT
    + """ld.global.b32 %r3, [%rd3];
mov.b32 %r4, 0; mov.b32 %r7, 0;
bra $HEAD;
$ODD: mad.lo.s32 %r3, %r3, 3, 1; add.s32 %r7, %r7, 1; bra $NEXT;
$HEAD: setp.le.u32 %p0, %r3, 1;
@%p0 bra $DONE;
and.b32 %r5, %r3, 1; setp.eq.u32 %p1, %r5, 1;
@%p1 bra $ODD;
shr.u32 %r3, %r3, 1;
$NEXT: add.s32 %r4, %r4, 1; bra $HEAD;
$DONE: and.b32 %r6, %r4, 3;
$TAB: .branchtargets $C0, $C1, $C2, $C0;
brx.idx %r6, $TAB;
$C1: add.s32 %r4, %r4, 1000;
setp.gt.u32 %p2, %r7, 20;
@%p2 ret;
bra $JOIN;
$C0: xor.b32 %r4, %r4, 255; bra $JOIN;
$C2: mov.u32 %r8, %laneid; add.s32 %r4, %r4, %r8;
$JOIN: st.global.b32 [%rd4], %r4;
ret;"""
)


def collatz(thread: int, value: int) -> int:
    steps = odd = 0
    while value > 1:
        value, odd, steps = (3 * value + 1, odd + 1, steps + 1) if value & 1 else (value >> 1, odd, steps + 1)
    kind = steps & 3
    if kind == 1:
        return 7777 if odd > 20 else steps + 1000
    return steps + thread % 32 if kind == 2 else steps ^ 255


@pytest.mark.parametrize("wave", [1, 3, 4])
def test_lanes_part_and_meet_again_in_loops_tables_and_early_exits(wave: int) -> None:
    values = np.random.default_rng(3).integers(1, 5000, 512).astype(np.uint32)
    out = np.full(512, 7777, np.uint32)
    session = run(program(COLLATZ, 2, 128), values, out, blocks=4, wave=wave, races=True)
    assert out.tolist() == [collatz(n, int(v)) for n, v in enumerate(values)]
    assert session.races == ()


def test_lanes_of_a_loop_with_continues_run_in_step() -> None:
    """Both arms jump to the header; without waiting at the loop's end they would drift apart for good."""
    body = (
        AT
        + """ld.global.b32 %r1, [%rd3]; mov.b32 %r2, 0; mov.b32 %r3, 0;
$L: add.u32 %r2, %r2, 1; setp.gt.u32 %p1, %r2, 50; @%p1 bra $E;
xor.b32 %r4, %r1, %r2; and.b32 %r4, %r4, 1; setp.eq.u32 %p2, %r4, 0; @%p2 bra $A;
add.u32 %r3, %r3, 5; add.u32 %r3, %r3, 6; bra $L;
$A: add.u32 %r3, %r3, 7; bra $L;
$E: st.global.b32 [%rd4], %r3; ret;"""
    )
    values, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    session = run(program(body, 2), values, out)
    assert out.tolist() == [25 * 11 + 25 * 7] * 32
    # The loop's head ran 51 times for the whole warp, not once for each half.
    head = next(count for name, count in session.counters.by_name.items() if name == "xor.b32")
    assert head == 50


def caught(body: str, *arrays: np.ndarray, parameters: int = 1, threads: int = 32, **options: int) -> Fault:
    with pytest.raises(FaultError) as error:
        run(program(body, parameters, threads), *arrays, **options)
    return error.value.fault


@pytest.mark.parametrize("extra", [0, 1])
def test_a_store_one_past_the_end_is_caught(extra: int) -> None:
    array = np.zeros(32, np.int32)
    body = f"mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9;\nst.global.b32 [%rd3+{4 * extra}], %i;\nret;"
    if not extra:
        run(program(body), array)
        assert array.tolist() == list(range(32))
        return
    fault = caught(body, array)
    assert (fault.kind, fault.thread, fault.cta) == ("out of bounds", 31, 0)
    assert "0 bytes past the end of 'p0' (128 bytes)" in fault.detail
    assert fault.text == "st.global.b32 [%rd3+4], %i;"
    assert not array.any()


def test_a_load_before_the_beginning_is_caught() -> None:
    fault = caught("ld.global.b8 %r1, [%rd0-1];\nret;", np.zeros(4, np.uint8))
    assert fault.kind == "out of bounds"
    assert "1 bytes before 'p0'" in fault.detail or "below every buffer" in fault.detail


def test_a_null_pointer_is_caught() -> None:
    fault = caught("ld.global.b32 %r1, [0];\nret;", np.zeros(4, np.uint8))
    assert (fault.kind, "a null pointer" in fault.detail) == ("out of bounds", True)


def test_a_masked_lane_may_hold_any_address() -> None:
    array = np.zeros(16, np.int32)
    run(program("""mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; setp.lt.u32 %p1, %i, 16;
@%p1 st.global.b32 [%rd3], %i;\nret;"""), array)  # fmt: skip
    assert array.tolist() == list(range(16))


def test_a_misaligned_vector_is_caught() -> None:
    body = "mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9;\nld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd3];\nret;"
    fault = caught(body, np.zeros(256, np.int32))
    assert (fault.kind, fault.thread) == ("misaligned", 1)
    assert "16 bytes" in fault.detail


def test_a_vector_whose_end_is_outside_is_caught() -> None:
    body = "mul.wide.u32 %rd9, %i, 16; add.u64 %rd3, %rd0, %rd9;\nld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd3];\nret;"
    fault = caught(body, np.zeros(127, np.int32))
    assert (fault.kind, fault.thread) == ("out of bounds", 31)


SHARED = ".shared .align 4 .b8 s[256];\n"
REVERSE = (
    AT
    + """ld.global.b32 %r1, [%rd3]; mov.u32 %r2, s; shl.b32 %r3, %t, 2; add.u32 %r4, %r2, %r3;
st.shared.b32 [%r4], %r1;
BARRIER
sub.u32 %r5, 63, %t; shl.b32 %r5, %r5, 2; add.u32 %r6, %r2, %r5;
ld.shared.b32 %r7, [%r6];
st.global.b32 [%rd4], %r7; ret;"""
)


def reverse(barrier: str, **options: object):
    values, out = np.arange(192, dtype=np.int32), np.zeros(192, np.int32)
    text = program(REVERSE.replace("BARRIER", barrier), 2, 64, SHARED)
    return run(text, values, out, blocks=3, races=True, **options), values, out


def test_blocks_have_shared_memory_of_their_own() -> None:
    session, values, out = reverse("bar.sync 0;")
    assert out.tolist() == values.reshape(3, 64)[:, ::-1].reshape(-1).tolist()
    assert session.races == ()


def test_a_missing_barrier_is_a_race_even_where_the_result_is_right() -> None:
    session, values, out = reverse("")
    assert out.tolist() == values.reshape(3, 64)[:, ::-1].reshape(-1).tolist()
    (race,) = session.races
    assert (race.scope, race.kind, race.buffer) == ("between warps", "write/read", "shared memory")
    assert race.earlier.text == "st.shared.b32 [%r4], %r1;"
    assert race.later.text == "ld.shared.b32 %r7, [%r6];"
    assert race.earlier.thread + race.later.thread == 63


def test_a_warp_barrier_does_not_order_other_warps() -> None:
    session, _, _ = reverse("bar.warp.sync -1;")
    assert {race.scope for race in session.races} == {"between warps"}


def test_threads_of_a_warp_are_not_taken_to_run_in_step() -> None:
    text = program(REVERSE.replace("63, %t", "31, %t").replace("BARRIER", "BARRIER"), 2, 32, SHARED)
    values = np.arange(32, dtype=np.int32)
    for barrier, scopes in (("", {"within a warp"}), ("bar.warp.sync -1;", set()), ("bar.sync 0;", set())):
        out = np.zeros(32, np.int32)
        session = run(text.replace("BARRIER", barrier), values, out, races=True)
        assert out.tolist() == values[::-1].tolist()
        assert {race.scope for race in session.races} == scopes


def test_shared_memory_is_as_large_as_it_was_declared() -> None:
    text = program(REVERSE.replace("BARRIER", "bar.sync 0;"), 2, 64, SHARED.replace("256", "252"))
    with pytest.raises(FaultError, match=r"shared memory byte 252 of 252"):
        run(text, np.zeros(64, np.int32), np.zeros(64, np.int32))


def test_dynamic_shared_memory_is_as_large_as_the_launch_says() -> None:
    text = program(REVERSE.replace("BARRIER", "bar.sync 0;"), 2, 64)
    text = text.replace(".visible", ".extern .shared .align 16 .b8 s[];\n.visible")
    run(text, np.zeros(64, np.int32), np.zeros(64, np.int32), shared=256)
    with pytest.raises(FaultError, match="out of bounds"):
        run(text, np.zeros(64, np.int32), np.zeros(64, np.int32), shared=255)


def test_blocks_that_share_a_cell_race_unless_both_are_atomic() -> None:
    store = run(program("st.global.b32 [%rd0], %i;\nret;"), np.zeros(1, np.int32), blocks=2, races=True)
    assert "between blocks" in {race.scope for race in store.races}
    both = run(program("red.global.add.u32 [%rd0], 1;\nret;"), np.zeros(1, np.int32), blocks=2, races=True)
    assert both.races == ()
    mixed = run(program("red.global.add.u32 [%rd0], 1;\nld.global.b32 %r1, [%rd0];\nret;"),
                np.zeros(1, np.int32), blocks=2, races=True)  # fmt: skip
    assert {race.kind for race in mixed.races} >= {"write/read"}


def test_equal_values_from_many_threads_are_no_race() -> None:
    session = run(
        program("mov.b32 %r1, 7; st.global.b32 [%rd0], %r1;\nret;"),
        np.zeros(1, np.int32),
        blocks=2,
        races=True,
    )
    assert session.races == ()


@pytest.mark.parametrize("wave", [1, 2])
def test_the_blocks_of_later_waves_race_with_earlier_ones(wave: int) -> None:
    body = """setp.eq.u32 %p1, %c, 0; @%p1 bra $W;
ld.global.b32 %r1, [%rd0]; st.global.b32 [%rd1], %r1; ret;
$W: st.global.b32 [%rd0], %c; ret;"""
    session = run(
        program(body, 2), np.ones(1, np.int32), np.zeros(1, np.int32), blocks=2, wave=wave, races=True
    )
    assert "between blocks" in {race.scope for race in session.races}


def test_the_first_reader_of_many_is_remembered() -> None:
    """Threads 0 and 5 read a cell, then thread 5 writes it: thread 0's read is what races."""
    body = """setp.eq.u32 %p1, %i, 0; setp.eq.u32 %p2, %i, 5;
@%p1 ld.global.b32 %r1, [%rd0];
@%p2 ld.global.b32 %r1, [%rd0];
@%p2 st.global.b32 [%rd0], %i;
ret;"""
    (race,) = run(program(body), np.zeros(1, np.int32), races=True).races
    assert (race.scope, race.kind, race.earlier.thread, race.later.thread) == (
        "within a warp",
        "read/write",
        0,
        5,
    )


LONE = """setp.lt.u32 %p1, %t, 40;
@%p1 bra $A;
bar.sync 1;
$A: bar.sync 0;
ret;"""


def test_a_barrier_that_a_part_of_the_block_reaches_is_a_deadlock() -> None:
    fault = caught(LONE, np.zeros(1), threads=64)
    assert fault.kind == "deadlock"
    assert "bar.sync 1;" in fault.detail
    assert "bar.sync 0;" in fault.detail


def test_threads_that_have_ended_are_not_waited_for() -> None:
    out = np.zeros(64, np.int32)
    body = """setp.ge.u32 %p1, %t, 32;\n@%p1 ret;
bar.sync 0;
mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; mov.b32 %r1, 1; st.global.b32 [%rd3], %r1; ret;"""
    run(program(body, threads=64), out)
    assert out.tolist() == [1] * 32 + [0] * 32


def test_the_two_halves_of_a_warp_at_different_barriers_are_caught() -> None:
    body = """and.b32 %r1, %t, 16; setp.eq.u32 %p1, %r1, 0;
@%p1 bra $A;
bar.sync 0;
ret;
$A: bar.sync 0;
ret;"""
    assert caught(body, np.zeros(1)).kind == "divergent barrier"
    run(program(body.replace("bar.sync", "barrier.sync")), np.zeros(1))


def test_a_shuffle_that_reads_a_lane_outside_its_mask_is_caught() -> None:
    body = """and.b32 %r5, %t, 16; setp.ne.u32 %p1, %r5, 0;
@%p1 bra $H;
shfl.sync.down.b32 %r4, %t, 3, 0x1f, 0x0000ffff;
$H: ret;"""
    fault = caught(body, np.zeros(1))
    assert (fault.kind, fault.thread) == ("inactive lane", 13)


def test_a_shuffle_that_half_the_warp_never_reaches_is_a_deadlock() -> None:
    body = """and.b32 %r5, %t, 16; setp.ne.u32 %p1, %r5, 0;
@%p1 bra $H;
shfl.sync.bfly.b32 %r4, %t, 3, 0x1f, -1;
bra $E;
$H: bar.sync 0;
$E: ret;"""
    assert caught(body, np.zeros(1)).kind == "deadlock"


def test_half_warps_shuffle_apart_and_meet() -> None:
    body = (
        AT
        + """ld.global.b32 %r3, [%rd3]; and.b32 %r5, %t, 16; setp.ne.u32 %p0, %r5, 0;
@%p0 bra $HI;
shfl.sync.down.b32 %r4|%p1, %r3, 3, 0x100f, 0x0000ffff;
bra $JOIN;
$HI: shfl.sync.bfly.b32 %r4, %r3, 5, 0x101f, 0xffff0000;
$JOIN: shfl.sync.idx.b32 %r6, %r4, 17, 0x1f, -1; add.s32 %r4, %r4, %r6;
st.global.b32 [%rd4], %r4; ret;"""
    )
    values, out = np.random.default_rng(1).integers(0, 999, 64).astype(np.int32), np.zeros(64, np.int32)
    run(program(body, 2, 64), values, out)
    for warp in range(2):
        row = values[32 * warp : 32 * warp + 32].tolist()
        half = [row[j + 3] if j + 3 < 16 else row[j] for j in range(16)] + [row[j ^ 5] for j in range(16, 32)]
        assert out[32 * warp : 32 * warp + 32].tolist() == [x + half[17] for x in half]


def test_a_spin_lock_between_blocks_makes_progress() -> None:
    body = """setp.ne.u32 %p1, %t, 0; @%p1 ret;
$L: atom.global.cas.b32 %r1, [%rd0], 0, 1; setp.ne.u32 %p2, %r1, 0; @%p2 bra $L;
ld.global.b32 %r2, [%rd1]; add.u32 %r2, %r2, 3; st.global.b32 [%rd1], %r2;
atom.global.exch.b32 %r3, [%rd0], 0; ret;"""
    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    run(program(body, 2), lock, total, blocks=7)
    assert (int(total[0]), int(lock[0])) == (21, 0)


def test_an_endless_loop_is_given_up() -> None:
    fault = caught("$L: bra $L;\nret;", np.zeros(1), step_limit=1000)
    assert fault.kind == "step limit"
    parted = "setp.eq.u32 %p1, %t, 3; @%p1 bra $M;\n$L: bra $L;\n$M: bra $M;\nret;"
    assert caught(parted, np.zeros(1), step_limit=1000).kind == "step limit"


def test_a_branch_table_index_out_of_range_and_a_trap_are_caught() -> None:
    table = "$T: .branchtargets $A, $B;\nbrx.idx %t, $T;\n$A: ret;\n$B: ret;"
    fault = caught(table, np.zeros(1))
    assert (fault.kind, fault.thread) == ("branch index", 2)
    assert caught("setp.eq.u32 %p1, %t, 9;\n@%p1 trap;\nret;", np.zeros(1)).thread == 9


def test_local_memory_belongs_to_its_thread() -> None:
    body = (
        AT
        + """mov.u64 %rd10, l; st.local.b32 [%rd10+4], %i; ld.local.b32 %r1, [%rd10+4]; st.global.b32 [%rd4], %r1; ret;"""
    )
    out = np.zeros(64, np.int32)
    run(program(body, 2, 64, ".local .align 4 .b8 l[8];"), np.zeros(64, np.int32), out)
    assert out.tolist() == list(range(64))
    assert caught("ld.local.b32 %r1, [12];\nret;", np.zeros(1)).kind == "out of bounds"


def test_generic_addresses_reach_shared_and_global_memory() -> None:
    body = (
        AT
        + """cvta.shared.u64 %rd11, %rd10; mul.wide.u32 %rd9, %t, 4; add.u64 %rd11, %rd11, %rd9;
ld.b32 %r1, [%rd3]; st.b32 [%rd11], %r1; bar.sync 0; ld.b32 %r2, [%rd11]; st.b32 [%rd4], %r2; ret;"""
    )
    body = body.replace("cvta", "mov.u64 %rd10, s; cvta", 1)
    values, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    run(program(body, 2, 64, SHARED), values, out, blocks=2)
    assert (values == out).all()


def test_constants_of_the_module_are_read_and_not_written() -> None:
    text = program("ld.const.b32 %r1, [k+4]; st.global.b32 [%rd0], %r1; ret;")
    out = np.zeros(1, np.int32)
    run(text.replace(".visible", ".const .align 4 .b32 k[3] = {5, -6, 7};\n.visible"), out)
    assert out[0] == -6


def test_results_that_depend_on_what_registers_held_show_up() -> None:
    """A register read before it is written gives another result under other garbage."""
    results = set()
    for poison in (0xDEADBEEFDEADBEEF, 0x0123456789ABCDEF):
        out = np.zeros(1, np.int32)
        run(program("add.u32 %r1, %r2, 1; st.global.b32 [%rd0], %r1; ret;"), out, poison=poison)
        results.add(int(out[0]))
    assert len(results) == 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]))
def test_random_programs_give_what_one_thread_at_a_time_gives(seed: int, wave: int) -> None:
    """Straight arithmetic, forward branches and counted loops, against a scalar interpreter of the same text."""
    rng = np.random.default_rng(seed)
    lines, model = [], []
    for number in range(12):
        a, b, d = (int(x) for x in rng.integers(1, 6, 3))
        kind = int(rng.integers(0, 4))
        if kind == 0:
            lines.append(f"add.u32 %r{d}, %r{a}, %r{b};")
            model.append(("add", a, b, d, 0))
        elif kind == 1:
            lines.append(f"xor.b32 %r{d}, %r{a}, %r{b}; mul.lo.u32 %r{d}, %r{d}, 2654435761;")
            model.append(("mix", a, b, d, 0))
        elif kind == 2:
            lines.append(
                f"setp.lt.u32 %p1, %r{a}, %r{b}; @%p1 bra $S{number}; sub.u32 %r{d}, %r{b}, %r{a}; $S{number}:"
            )
            model.append(("skip", a, b, d, 0))
        else:
            lines.append(f"and.b32 %r8, %r{a}, 7; $T{number}: add.u32 %r{d}, %r{d}, %r{b}; setp.eq.u32 %p2, %r8, 0; "
                         f"sub.u32 %r8, %r8, 1; @!%p2 bra $T{number};")  # fmt: skip
            model.append(("loop", a, b, d, 0))
    start = "\n".join(f"mad.lo.u32 %r{n}, %i, {n * 7919}, {n};" for n in range(1, 6))
    end = "mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; st.global.b32 [%rd3], %r3; ret;"
    out = np.zeros(160, np.uint32)
    run(program("\n".join([start, *lines, end])), out, blocks=5, wave=wave)
    low = (1 << 32) - 1
    for thread in range(160):
        r = [0] + [(thread * n * 7919 + n) & low for n in range(1, 6)]
        for name, a, b, d, _ in model:
            if name == "add":
                r[d] = (r[a] + r[b]) & low
            elif name == "mix":
                r[d] = ((r[a] ^ r[b]) * 2654435761) & low
            elif name == "skip":
                r[d] = r[d] if r[a] < r[b] else (r[b] - r[a]) & low
            else:
                for _ in range((r[a] & 7) + 1):
                    r[d] = (r[d] + r[b]) & low
        assert out[thread] == r[3], (seed, thread)
