"""Device functions are run where they are called; what a kernel prints is what C's printf gives."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from simulate_support import HEAD, program, run, run_triton, triton_ptx

from ralbuild.simulate.faults import FaultError, PtxError
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Session

NOINLINE = """
@triton.jit(noinline=True)
def scaled(x, y):
    return x * y + 3

@triton.jit(noinline=True)
def both(x, y):
    if x > 40000:
        x = scaled(x, 2)
    return x + y, x - y

@triton.jit
def k(a, b):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(a + i)
    total = tl.sum(x, 0)
    z = scaled(total, 5)
    p, q = both(z, total)
    tl.store(b + i, x + z + p * q)
"""
PRINTS = """
@triton.jit
def k(a):
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    x = tl.load(a + i)
    tl.device_print("whole", x)
    tl.device_print("half", x * 1.5)
    tl.device_print("bits", x, hex=True)
    tl.store(a + i, x + 1)
"""


@pytest.fixture(scope="module")
def noinline() -> tuple[str, int]:
    return triton_ptx(NOINLINE, (("a", "*i32"), ("b", "*i32")))


def test_functions_that_are_not_inlined_are_run(noinline: tuple[str, int]) -> None:
    assert noinline[0].count("call.uni") >= 3
    a, b = np.arange(256, dtype=np.int32) * 3, np.zeros(256, np.int32)
    session = run_triton(noinline, {"a": a, "b": b}, blocks=2)
    for block in range(2):
        x = a[128 * block : 128 * block + 128].astype(np.int64)
        total = int(x.sum())
        z = total * 5 + 3
        c = z * 2 + 3 if z > 40000 else z
        wanted = (x + z + (c + total) * (c - total)).astype(np.uint64).astype(np.uint32).view(np.int32)
        assert (b[128 * block : 128 * block + 128] == wanted).all()
    assert session.races == ()


def test_a_fault_in_a_function_names_the_functions_own_line(noinline: tuple[str, int]) -> None:
    text = noinline[0].replace("mad.lo.s32", "trap;\n\tmad.lo.s32", 1)
    with pytest.raises(FaultError) as caught:
        run_triton((text, noinline[1]), {"a": np.zeros(128, np.int32), "b": np.zeros(128, np.int32)})
    assert caught.value.fault.line == text[: text.index("trap;")].count("\n") + 1


def test_triton_prints_every_thread_of_every_block() -> None:
    a = np.arange(64, dtype=np.int32) - 3
    session = run_triton(triton_ptx(PRINTS, (("a", "*i32"),), warps=1), {"a": a}, blocks=2)
    found = sorted("".join(session.printed).splitlines())
    wanted = []
    for number in range(64):
        block, lane, x = number // 32, number % 32, number - 3
        place = f"pid ({block}, 0, 0) idx ({lane:2d})"
        wanted += [
            f"{place} whole: {x}",
            f"{place} half: {x * 1.5:f}",
            f"{place} bits: 0x{x & 0xFFFFFFFF:08x}",
        ]
    assert found == sorted(wanted)
    assert (a == np.arange(64) - 2).all()


FUNCTION = """.func (.param .b32 out) twice(.param .b32 in) {
.reg .b32 %r<3>; ld.param.b32 %r1, [in]; setp.lt.s32 %p1, %r1, 8; @%p1 bra $SMALL;
add.s32 %r2, %r1, %r1; st.param.b32 [out], %r2; ret;
$SMALL: st.param.b32 [out], 7; ret;
}
"""
CALL = """{ .param .b32 param0; .param .b32 retval0; st.param.b32 [param0], %i;
call.uni (retval0), twice, (param0); ld.param.b32 %r5, [retval0]; }
"""
STORE = "mul.wide.u32 %rd9, %i, 4; add.u64 %rd3, %rd0, %rd9; st.global.b32 [%rd3], %r5; ret;"


def with_function(body: str, function: str = FUNCTION) -> str:
    declared = function.replace("{\n", "{\n.reg .pred %p<3>; ", 1)
    return HEAD + declared + program(body).removeprefix(HEAD)


def test_a_function_branches_and_returns_from_two_places() -> None:
    out = np.zeros(32, np.int32)
    run(with_function(CALL + STORE), out)
    assert out.tolist() == [7 if n < 8 else 2 * n for n in range(32)]


@pytest.mark.parametrize("negated", ["", "!"])
def test_a_call_under_a_predicate_is_made_by_some_threads(negated: str) -> None:
    out = np.zeros(32, np.int32)
    call = CALL.replace("call.uni", f"@{negated}%p2 call")
    run(with_function("setp.gt.u32 %p2, %i, 20; mov.b32 %r5, -1;" + call.replace("ld.param.b32 %r5",
        f"@{negated}%p2 ld.param.b32 %r5") + STORE), out)  # fmt: skip
    called = [(n > 20) != bool(negated) for n in range(32)]
    assert out.tolist() == [(7 if n < 8 else 2 * n) if called[n] else -1 for n in range(32)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("twice, (param0)", "thrice, (param0)", "a call of 'thrice', which is not there"),
        ("twice, (param0)", "twice, (param0, param0)", "other parameters than the function has"),
        ("call.uni (retval0), twice", "call.uni (retval0), %rd4", "an indirect call"),
        (".param .b32 param0", ".param .b64 param0", "other parameters than the function has"),
    ],
)
def test_a_call_that_cannot_be_followed_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(PtxError, match=words):
        run(with_function(CALL.replace(old, new) + STORE), np.zeros(32, np.int32))


def test_a_function_that_calls_itself_is_refused() -> None:
    again = FUNCTION.replace("$SMALL: ", "$SMALL: call.uni (out), twice, (in); ")
    with pytest.raises(PtxError, match="'twice' calls itself"):
        run(with_function(CALL + STORE, again), np.zeros(32, np.int32))


def test_calls_that_grow_without_measure_are_refused_in_no_time() -> None:
    """Twenty functions, each of which calls the next one eight times."""
    text = HEAD
    for number in range(20):
        calls = f"call.uni f{number + 1};\n" * 8 if number < 19 else ""
        text += f".func f{number}()\n{{\n{calls}ret;\n}}\n"
    text += ".visible .entry t()\n.reqntid 32\n{\ncall.uni f0;\nret;\n}\n"
    with pytest.raises(PtxError, match="more than 1024 calls"):
        Session(parse_module(text), "t", (1, 1, 1), {})


def printf(template: bytes, packed: bytes) -> str:
    """Let thread 0 print a template with packed arguments."""
    text = (
        f".global .align 8 .b8 text[{len(template) + 1}] = {{{', '.join(map(str, template + bytes(1)))}}};\n"
    )
    stores = "\n".join(f"st.local.b8 [args+{k}], {byte};" for k, byte in enumerate(packed))
    body = f""".local .align 8 .b8 args[{max(8, len(packed))}];
{stores}
setp.ne.u32 %p1, %i, 0; @%p1 bra $END;
mov.b64 %rd4, text; cvta.global.u64 %rd5, %rd4; mov.b64 %rd6, args; cvta.local.u64 %rd7, %rd6;
{{ .param .b64 param0; .param .b64 param1; .param .b32 retval0; st.param.b64 [param0], %rd5;
st.param.b64 [param1], %rd7; call.uni (retval0), vprintf, (param0, param1); }}
$END: ret;"""
    extern = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) ;\n"
    session = run(HEAD + extern + text + program(body).removeprefix(HEAD), np.zeros(8, np.uint8))
    return "".join(session.printed)


@pytest.mark.parametrize(
    ("form", "code", "value"),
    [
        ("%i", "i", -5), ("%5d|%-5d|%05d", "iii", 42), ("%+d % d", "ii", 7), ("%u", "I", 2**32 - 1),
        ("%x %X %#x %08x %o", "IIIII", 0xBEEF), ("%lld", "q", -(2**62)), ("%llx", "Q", 2**63 + 1), ("%lu", "Q", 2**64 - 1),
        ("%f %.3f %10.2f", "ddd", -3.14159), ("%e %g %G", "ddd", 6.02e23), ("%c%%", "i", 65), ("%f", "d", float("inf")),
    ],
)  # fmt: skip
def test_printf_formats_as_the_c_library_does(form: str, code: str, value: float) -> None:
    kinds = {"i": ctypes.c_int, "I": ctypes.c_uint, "q": ctypes.c_longlong, "Q": ctypes.c_ulonglong, "d": ctypes.c_double}  # fmt: skip
    buffer = ctypes.create_string_buffer(400)
    ctypes.CDLL(None).snprintf(buffer, 400, form.encode(), *(kinds[one](value) for one in code))
    assert printf(form.encode(), struct.pack("@" + code, *[value] * len(code))) == buffer.value.decode()


def test_a_format_that_reads_past_its_arguments_is_out_of_bounds() -> None:
    with pytest.raises(FaultError) as caught:
        printf(b"%d " * 40, bytes(4))
    assert caught.value.fault.kind == "out of bounds"


def test_an_unknown_conversion_is_a_fault() -> None:
    with pytest.raises(FaultError) as caught:
        printf(b"%y", bytes(8))
    assert caught.value.fault.kind == "bad format"
