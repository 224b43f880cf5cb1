"""PTX is understood as a whole or refused with a line: no traceback, no hang, nothing skipped."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_support import ARCHS, HEAD, module, program, ptx, run

from ralbuild.simulate.faults import FaultError, PtxError
from ralbuild.simulate.ptx.model import Guard
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options, Session


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["sample", "transduce", "html_enhancer"])
def test_every_instruction_of_the_shipped_ptx_is_read(name: str, arch: str) -> None:
    """Counted in another way: lines that end in a semicolon and begin with a lower-case word."""
    text = ptx(name, arch)
    (entry,) = module(name, arch).entries
    lines = re.findall(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.:]*(?:\s[^;\n]*)?;", text, re.M)
    assert len(entry.code) == len(lines)
    assert [item.name for item in entry.code] == [
        re.match(r"\s*(?:@!?%p\d+\s+)?([\w.:]+)", line)[1] for line in lines
    ]
    assert len(entry.parameters) == text.count(".param .u64 .ptr") + len(
        re.findall(r"\.param \.[usf]\d+ (?!\.ptr)", text)
    )


def test_parameters_are_placed_as_the_cubin_places_them() -> None:
    """html_enhancer: two pointers, a 32-bit count, two hidden pointers, 40 bytes (docs/kernels.md)."""
    (entry,) = module("html_enhancer").entries
    assert [(item.offset, item.size) for item in entry.parameters] == [
        (0, 8),
        (8, 8),
        (16, 4),
        (24, 8),
        (32, 8),
    ]
    assert entry.parameter_bytes == 40
    assert entry.block == (128, 1, 1)


def test_guards_and_lines_are_kept() -> None:
    text = program("@!%p1 bra $A;\n$A: ret;")
    code = parse_module(text).entries[0].code
    branch = code[-2]
    assert isinstance(branch.guard, Guard)
    assert branch.guard.negated
    assert text.splitlines()[branch.line - 1] == branch.text == "@!%p1 bra $A;"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "needs .version"),
        (".version 8.2\n.target sm_80\n\x00", 3, "no PTX token"),
        (HEAD + ".func f(.reg .b32 %a) { ret; }", 4, "needs '.param'"),
        (HEAD + ".visible .entry t() .reqntid 33 { ret; ", 4, "ends too early"),
        (program("frobnicate.u32 %r1, %r2;\nret;"), 13, "unknown instruction 'frobnicate'"),
        (program("add.u33 %r1, %r2, %r3;\nret;"), 13, "unknown form 'add.u33'"),
        (program("add.rn.u32 %r1, %r2, %r3;\nret;"), 13, "unknown form 'add.rn.u32'"),
        (program("add.u32 %r1, %r2;\nret;"), 13, "with 2 operands"),
        (program("add.u32 %r1, %rd2, %r3;\nret;"), 13, "%rd2 has 64 bits, .u32 needs 32"),
        (program("add.u32 %r1, %r2, %r99;\nret;"), 13, "unknown register %r99"),
        (program("mov.u32 %r1, %envreg3;\nret;"), 13, "unknown register %envreg3"),
        (program("bra $NOWHERE;\nret;"), 13, "no instruction follows the label"),
        (program("add.u32 %r1, %r2, %r3;"), 13, "ends without ret"),
        (program("mov.u32 %r1, 99999999999999999999999;\nret;"), 13, "does not fit 64 bits"),
        (program("wgmma.fence.sync.aligned;\nret;"), 13, "unknown instruction 'wgmma'"),
        (program("cp.async.bulk.commit_group;\nret;"), 13, "'cp"),
        (program("ld.global.v4.b64 {%rd5,%rd6,%rd7,%rd8}, [%rd0];\nret;"), 13, "an access of 32 bytes"),
        (program("bar.sync 0, 16;\nret;"), 13, "a barrier of a number of threads that cannot be"),
        (program("bar.sync %r1;\nret;"), 13, "a barrier whose number is no constant"),
        (program("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 0;\nret;"), 13,
         "unknown instruction 'wgmma'"),
        (program("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%rd1], [%rd0], 16, [%rd2];\nret;"),
         13, "unknown form 'cp.async.bulk"),
        (program("mbarrier.init.shared.b64 [%rd1], 1;\nret;"), 13, "unknown instruction 'mbarrier'"),
        (program("call.uni $NOWHERE;\nret;"), 13, "a call of '$NOWHERE', which is not there"),
        (program("@%p1 bar.sync 0;\nret;"), 13, "a barrier or warp-wide instruction under a predicate"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(PtxError, match=re.escape(words)) as caught:
        Session(parse_module(text), "t", (1, 1, 1), {})
    assert caught.value.line == line
    assert caught.value.problems[0].place == f"line {line}"


def mutated(text: str, rng: random.Random) -> str:
    """Damage a text as editors, transfers and newer compilers would."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines)) if lines else 0
        lines = lines or [""]
        line = lines[at]
        kind = rng.randrange(6)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, rng.choice(lines))
        elif kind == 2 and line:
            cut = rng.randrange(len(line))
            lines[at] = line[:cut] + rng.choice('{}()[];:,@!|.%$0x"\\ \0é') + line[cut + 1 :]
        elif kind == 3:
            words = line.split()
            rng.shuffle(words)
            lines[at] = " ".join(words)
        elif kind == 4:
            lines[at] = re.sub(r"\d+", lambda m: str(int(m[0]) * rng.choice([0, 3, 2**31, 2**70])), line)
        else:
            lines = lines[: max(1, at)]
    return "\n".join(lines)


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**64))
def test_a_damaged_kernel_is_read_or_refused_never_a_traceback(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(["transduce", "html_enhancer", "html_enhancer"])
    text = mutated(ptx(name), rng)
    try:
        parsed = parse_module(text)
        for entry in parsed.entries:
            Session(parsed, entry.name, (1, 1, 1), {})
    except PtxError as error:
        assert 1 <= error.line <= text.count("\n") + 1
        assert str(error)


EVERYTHING = HEAD + """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) ;
.global .align 1 .b8 text[8] = {104, 105, 32, 37, 100, 10};
.func (.param .align 8 .b8 out[8]) both(.param .b32 x, .param .b32 y) {
.reg .b32 %r<5>; .reg .pred %p<2>;
ld.param.b32 %r1, [x]; ld.param.b32 %r2, [y];
setp.lt.s32 %p1, %r1, %r2;
@%p1 bra $LESS;
sub.s32 %r3, %r1, %r2;
$LESS: add.s32 %r4, %r1, %r2;
st.param.v2.b32 [out], {%r4, %r3};
ret;
}
""" + program("""{ .param .b32 param0; .param .b32 param1; .param .align 8 .b8 retval0[8];
st.param.b32 [param0], %i;
st.param.b32 [param1], 9;
call.uni (retval0), both, (param0, param1);
ld.param.v2.b32 {%r1, %r2}, [retval0]; }
.local .align 8 .b8 args[8];
st.local.b32 [args], %r1;
mov.b64 %rd4, text; cvta.global.u64 %rd5, %rd4; mov.b64 %rd6, args; cvta.local.u64 %rd7, %rd6;
{ .param .b64 param0; .param .b64 param1; .param .b32 retval0;
st.param.b64 [param0], %rd5;
st.param.b64 [param1], %rd7;
call.uni (retval0), vprintf, (param0, param1); }
.shared .align 16 .b8 buf[1024];
mov.b32 %r3, buf; shl.b32 %r4, %t, 4; add.u32 %r5, %r3, %r4; mul.wide.u32 %rd8, %t, 16; add.u64 %rd9, %rd0, %rd8;
cp.async.cg.shared.global [%r5], [%rd9], 16, %r7;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r5];
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r14,%r15,%r16,%r17}, {%r10,%r11,%r12,%r13}, {%r10,%r11}, {%r14,%r15,%r16,%r17};
setp.lt.u32 %p1, %t, 32;
@%p1 bra $FIRST;
bar.sync 1, 64;
bra $END;
$FIRST: bar.arrive 1, 64;
$END: st.global.b32 [%rd9], %r14;
ret;""", 1, 64).removeprefix(HEAD)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64))
def test_a_damaged_program_runs_or_is_at_fault_and_always_ends(seed: int) -> None:
    """Calls, printing, copies, matrices and barriers, each line damaged in turn."""
    text = mutated(EVERYTHING, random.Random(seed)) if seed else EVERYTHING
    try:
        parsed = parse_module(text)
        options = Options(shared=64, races=True, step_limit=300)
        for entry in parsed.entries:
            Session(parsed, entry.name, (2, 1, 1), {"p0": np.zeros(4096, np.uint8)}, options).launch()
    except (PtxError, FaultError) as error:
        assert str(error)


def test_the_program_that_is_damaged_is_right_by_itself() -> None:
    session = run(EVERYTHING.replace(", 16, %r7;", ", 16;"), np.zeros(4096, np.uint8), races=True)
    assert len(session.printed) == 64
    assert session.printed[20] == "hi 29\n"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*'.%$@!{}[]();:,+-<>|"0123456789abxfFU_ \n', ".entry t", ".reg .b32 ", "ret;", "%r1", "ld"]
        )
    )
)
def test_any_text_is_read_or_refused(words: list[str]) -> None:
    text = "".join(words)
    for candidate in (text, HEAD + text, program(text)):
        try:
            parse_module(candidate)
        except PtxError as error:
            assert 1 <= error.line <= candidate.count("\n") + 1
