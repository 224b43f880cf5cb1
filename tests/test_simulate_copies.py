"""`cp.async`: bytes arrive at the wait, whoever looks before it is at fault. Barriers of a part of a block."""

from __future__ import annotations

import numpy as np
import pytest
from simulate_support import program, run

from ralbuild.simulate.faults import Fault, FaultError, PtxError
from ralbuild.simulate.session import Session

COPY = """.shared .align 16 .b8 buf[1024];
mov.b32 %r1, buf; shl.b32 %r2, %i, 4; add.u32 %r3, %r1, %r2;
mul.wide.u32 %rd9, %i, 16; add.u64 %rd10, %rd0, %rd9; add.u64 %rd11, %rd1, %rd9;
"""
READ = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3]; st.global.v4.b32 [%rd11], {%r4, %r5, %r6, %r7};\n"
START = "cp.async.cg.shared.global [%r3], [%rd10], 16;\n"


def copied(body: str, blocks: int = 1) -> tuple[np.ndarray, np.ndarray, Session]:
    given = np.random.default_rng(1).integers(1, 256, 1024 * blocks).astype(np.uint8)
    found = np.zeros(1024 * blocks, np.uint8)
    session = run(program(COPY + body + "ret;", 2, 64), given, found, races=True)
    return given, found, session


def fault(body: str) -> Fault:
    with pytest.raises(FaultError) as caught:
        copied(body)
    return caught.value.fault


@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_a_copy_that_is_waited_for_brings_the_bytes(wait: str) -> None:
    given, found, session = copied(START + wait + READ)
    assert (found == given).all()
    assert session.races == ()


@pytest.mark.parametrize(
    "early",
    [
        "",
        "cp.async.commit_group;",
        "cp.async.commit_group; cp.async.wait_group 1;",
        "cp.async.wait_group 0;",
        "bar.sync 0;",
    ],
)
def test_reading_before_the_wait_is_a_fault(early: str) -> None:
    """A group that is not committed is not waited for; a barrier waits for no copy."""
    found = fault(START + early + "\n" + READ)
    assert (found.kind, found.text.split()[0]) == ("copy not waited for", "ld.shared.v4.b32")


def test_writing_where_a_copy_is_on_its_way_is_a_fault() -> None:
    assert fault(START + "st.shared.b32 [%r3+4], %r2;\n").kind == "copy not waited for"


def test_the_last_groups_may_still_be_on_their_way() -> None:
    """Three groups; a wait for all but one shows the first two, and the third is still out."""
    three = """cp.async.ca.shared.global [%r3], [%rd10], 4; cp.async.commit_group;
cp.async.ca.shared.global [%r3+4], [%rd10+4], 4; cp.async.commit_group;
cp.async.ca.shared.global [%r3+8], [%rd10+8], 4; cp.async.commit_group;
cp.async.wait_group 1;
"""
    read = "ld.shared.b32 %r4, [%r3+{0}]; st.global.b32 [%rd11+{0}], %r4;\n"
    given, found, _ = copied(three + read.format(0) + read.format(4))
    assert (found.reshape(-1, 16)[:, :8] == given.reshape(-1, 16)[:, :8]).all()
    assert fault(three + read.format(8)).kind == "copy not waited for"


@pytest.mark.parametrize("size", [0, 1, 5, 15, 16])
def test_what_the_source_does_not_have_is_zero(size: int) -> None:
    given, found, _ = copied(
        f"cp.async.cg.shared.global [%r3], [%rd10], 16, {size}; cp.async.wait_all;" + READ
    )
    wanted = given.reshape(-1, 16).copy()
    wanted[:, size:] = 0
    assert (found.reshape(-1, 16) == wanted).all()


def test_a_source_of_no_bytes_is_not_touched() -> None:
    far = (
        "add.u64 %rd10, %rd10, 1048576; cp.async.cg.shared.global [%r3], [%rd10], 16, {}; cp.async.wait_all;"
    )
    assert not copied(far.format(0) + READ)[1].any()
    assert fault(far.format(1)).kind == "out of bounds"
    assert fault(far.format(16)).kind == "out of bounds"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("cp.async.cg.shared.global [%r3+1024], [%rd10], 16;", "out of bounds"),
        ("cp.async.cg.shared.global [%r3+8], [%rd10], 16;", "misaligned"),
        ("cp.async.cg.shared.global [%r3], [%rd10+8], 16;", "misaligned"),
        ("cp.async.cg.shared.global [%r3], [%rd10], 16, 17;", "out of bounds"),
    ],
)
def test_a_copy_is_checked_at_both_ends(body: str, kind: str) -> None:
    assert fault(body).kind == kind


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_another_threads_copy_needs_a_barrier_after_the_wait(barrier: str) -> None:
    other = "xor.b32 %r8, %r2, 512; add.u32 %r9, %r1, %r8; ld.shared.b32 %r10, [%r9]; st.global.b32 [%rd11], %r10;"
    _, _, session = copied(START + "cp.async.wait_all;" + barrier + other)
    assert {race.kind for race in session.races} == (set() if barrier else {"write/read"})


def test_a_copy_into_what_others_still_read_is_a_race() -> None:
    body = "xor.b32 %r8, %r2, 512; add.u32 %r9, %r1, %r8; ld.shared.b32 %r10, [%r9];" + START
    assert {race.kind for race in copied(body)[2].races} == {"read/write"}


PRODUCER = """.shared .align 4 .b8 buf[512];
mov.b32 %r1, buf; and.b32 %r2, %i, 31; shl.b32 %r3, %r2, 2; add.u32 %r4, %r1, %r3;
shr.u32 %r5, %i, 5; setp.eq.u32 %p1, %r5, 0; setp.eq.u32 %p2, %r5, 1; setp.gt.u32 %p3, %r5, 1;
@%p3 bra $END;
@%p2 bra $READER;
st.shared.b32 [%r4], %i;
{produce}
bra $END;
$READER: {consume}
ld.shared.b32 %r6, [%r4]; add.s32 %r6, %r6, 100;
mul.wide.u32 %rd9, %i, 4; add.u64 %rd10, %rd0, %rd9; st.global.b32 [%rd10], %r6;
$END: bar.sync 0; ret;"""


@pytest.mark.parametrize("produce", ["bar.sync 1, 64;", "bar.arrive 1, 64;", "barrier.cta.arrive 1, 64;"])
def test_two_warps_of_four_meet_at_a_barrier_of_their_own(produce: str) -> None:
    out = np.zeros(128, np.int32)
    text = PRODUCER.format(produce=produce, consume="bar.sync 1, 64;")
    session = run(program(text, 1, 128), out, blocks=1, races=True)
    assert out[32:64].tolist() == list(range(100, 132))
    assert session.races == ()


@pytest.mark.parametrize(
    ("produce", "consume", "scope"),
    [("", "", "between warps"), ("bar.sync 1, 32;", "bar.sync 2, 32;", "between warps")],
)
def test_a_barrier_that_orders_other_warps_leaves_the_race(produce: str, consume: str, scope: str) -> None:
    out = np.zeros(128, np.int32)
    session = run(program(PRODUCER.format(produce=produce, consume=consume), 1, 128), out, races=True)
    assert {(race.scope, race.kind) for race in session.races} <= {
        (scope, "write/read"),
        (scope, "read/write"),
    }
    assert session.races


def test_arriving_orders_nothing_for_the_one_that_arrives() -> None:
    """The reader only arrives: it may read before the producer has written."""
    out = np.zeros(128, np.int32)
    text = PRODUCER.format(produce="bar.sync 1, 64;", consume="bar.arrive 1, 64;")
    session = run(program(text, 1, 128), out, races=True)
    assert {race.scope for race in session.races} == {"between warps"}


@pytest.mark.parametrize(
    ("produce", "consume", "kind"),
    [
        ("bar.sync 1, 96;", "bar.sync 1, 96;", "deadlock"),
        ("bar.sync 1, 64;", "bar.sync 1, 96;", "divergent barrier"),
        ("bar.arrive 1, 64; bar.arrive 1, 64;", "bar.sync 1, 64;", "divergent barrier"),
        ("bar.sync 1, 64;", "bar.sync 2, 64;", "deadlock"),
    ],
)
def test_barriers_that_do_not_fit_together_are_faults(produce: str, consume: str, kind: str) -> None:
    with pytest.raises(FaultError) as caught:
        run(program(PRODUCER.format(produce=produce, consume=consume), 1, 128), np.zeros(128, np.int32))
    assert caught.value.fault.kind == kind


def test_a_copy_of_another_size_is_refused() -> None:
    with pytest.raises(PtxError, match="a copy of another size"):
        copied("cp.async.cg.shared.global [%r3], [%rd10], 8;")
