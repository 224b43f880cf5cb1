"""`mma`, `ldmatrix` and `stmatrix`: fragments as the PTX ISA's formulas lay them out, products as NumPy gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulate_support import program, run, run_triton, triton_ptx

from ralbuild.simulate.faults import FaultError, PtxError

LANES = range(32)

# "Matrix Fragments for mma.m16n8k..": (row, column) of element i that a lane holds, each formula as printed.


def a_f16_k16(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8


def b_f16_k16(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return thread * 2 + (i & 1) if i < 2 else thread * 2 + (i & 1) + 8, group


def a_f16_k8(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group if 0 <= i < 2 else group + 8, thread * 2 + (i & 1)


def b_f16_k8(lane: int, i: int) -> tuple[int, int]:
    return (lane % 4) * 2 + i, lane >> 2


def a_tf32_k4(lane: int, i: int) -> tuple[int, int]:
    return lane >> 2 if i == 0 else (lane >> 2) + 8, lane % 4


def b_tf32_k4(lane: int, i: int) -> tuple[int, int]:
    del i
    return lane % 4, lane >> 2


def a_tf32_k8(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group if i in (0, 2) else group + 8, thread if i in (0, 1) else thread + 4


def b_tf32_k8(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 if i == 0 else lane % 4 + 4, lane >> 2


def a_8bit_k16(lane: int, i: int) -> tuple[int, int]:
    return lane >> 2 if 0 <= i < 4 else (lane >> 2) + 8, (lane % 4) * 4 + (i & 3)


def b_8bit_k16(lane: int, i: int) -> tuple[int, int]:
    return (lane % 4) * 4 + i, lane >> 2


def a_8bit_k32(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    return row, thread * 4 + (i & 3) if i < 8 else thread * 4 + (i & 3) + 16


def b_8bit_k32(lane: int, i: int) -> tuple[int, int]:
    thread = lane % 4
    return thread * 4 + (i & 3) if i < 4 else thread * 4 + (i & 3) + 16, lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    return lane >> 2 if i < 2 else (lane >> 2) + 8, (lane % 4) * 2 + (i & 1)


def pack(matrix: np.ndarray, place, per_lane: int) -> np.ndarray:
    """The registers of every lane, [32, words], from a matrix of elements."""
    rows = [[matrix[place(lane, i)] for i in range(per_lane)] for lane in LANES]
    return np.array(rows, matrix.dtype).view(np.uint32).reshape(32, -1)


def multiply(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, out: int) -> np.ndarray:
    """Run one warp's mma over packed registers; return D's registers."""
    arrays = [a, b, c]
    text, first, names = [], 5, []
    for number, array in enumerate(arrays):
        words = array.shape[1]
        names.append([f"%r{first + k}" for k in range(words)])
        text.append(f"mul.wide.u32 %rd9, %i, {4 * words}; add.u64 %rd10, %rd{number}, %rd9;")
        text += [f"ld.global.b32 {name_}, [%rd10+{4 * k}];" for k, name_ in enumerate(names[-1])]
        first += words
    results = [f"%r{first + k}" for k in range(out)]
    lists = ", ".join(f"{{{', '.join(items)}}}" for items in (results, *names))
    text.append(f"{name} {lists};\nmul.wide.u32 %rd9, %i, {4 * out}; add.u64 %rd10, %rd3, %rd9;")
    text += [f"st.global.b32 [%rd10+{4 * k}], {item};" for k, item in enumerate(results)]
    found = np.zeros((32, out), np.uint32)
    run(program("\n".join([*text, "ret;"]), 4), *(np.ascontiguousarray(item) for item in arrays), found)
    return found


def values(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Elements as stored, and as numbers; products and sums of them are exact in binary32."""
    if kind in ("s8", "u8"):
        low, high = (-128, 128) if kind == "s8" else (0, 256)
        whole = rng.integers(low, high, shape)
        return whole.astype(np.int8 if kind == "s8" else np.uint8), whole
    number = rng.integers(-64, 65, shape) / 16
    if kind == "f16":
        return number.astype(np.float16), number
    bits = number.astype(np.float32).view(np.uint32)
    if kind == "bf16":
        return (bits >> 16).astype(np.uint16), number
    return (bits | 0x1FFF * (number != 0)).astype(np.uint32), number  # tf32: the low bits do not count


FORMS = {
    "m16n8k16.row.col.f32.f16.f16.f32": (a_f16_k16, b_f16_k16, 8, 4), "m16n8k8.row.col.f32.f16.f16.f32": (a_f16_k8, b_f16_k8, 4, 2),
    "m16n8k16.row.col.f16.f16.f16.f16": (a_f16_k16, b_f16_k16, 8, 4), "m16n8k8.row.col.f32.f16.f16.f16": (a_f16_k8, b_f16_k8, 4, 2),
    "m16n8k16.row.col.f32.bf16.bf16.f32": (a_f16_k16, b_f16_k16, 8, 4), "m16n8k8.row.col.f32.bf16.bf16.f32": (a_f16_k8, b_f16_k8, 4, 2),
    "m16n8k4.row.col.f32.tf32.tf32.f32": (a_tf32_k4, b_tf32_k4, 2, 1), "m16n8k8.row.col.f32.tf32.tf32.f32": (a_tf32_k8, b_tf32_k8, 4, 2),
    "m16n8k16.row.col.s32.s8.s8.s32": (a_8bit_k16, b_8bit_k16, 8, 4), "m16n8k32.row.col.s32.u8.s8.s32": (a_8bit_k32, b_8bit_k32, 16, 8),
    "m16n8k32.row.col.satfinite.s32.s8.u8.s32": (a_8bit_k32, b_8bit_k32, 16, 8),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_product_of_fragments_is_the_matrix_product(form: str) -> None:
    place_a, place_b, count_a, count_b = FORMS[form]
    *shape, to, left, right, start = form.replace(".satfinite", "").split(".")
    depth = int(shape[0].rpartition("k")[2])
    rng = np.random.default_rng(len(form))
    a, x = values(left, (16, depth), rng)
    b, y = values(right, (depth, 8), rng)
    addend = rng.integers(-500, 500, (16, 8)) * (1 if to == "s32" else 0.25)
    wanted = x @ y + addend
    if to == "s32":
        addend = addend.astype(np.int64)
        addend[0] = 2**31 - 1 if "satfinite" in form else 2**31 - 5
        total = x.astype(object) @ y.astype(object) + addend.astype(object)
        wanted = np.array([[max(-(2**31), min(2**31 - 1, v)) if "satfinite" in form else (v + 2**31) % 2**32 - 2**31
                            for v in row] for row in total.tolist()])  # fmt: skip
    types = {"f16": np.float16, "f32": np.float32, "s32": np.int32}
    c = pack(addend.astype(types[start]), c_place, 4)
    found = multiply(f"mma.sync.aligned.{form}", pack(a, place_a, count_a), pack(b, place_b, count_b), c, 2 if to == "f16" else 4)  # fmt: skip
    elements = found.view(types[to])
    for lane in LANES:
        for i in range(4):
            assert elements[lane, i] == types[to](wanted[c_place(lane, i)])


@pytest.mark.parametrize(
    ("count", "trans"), [(1, ""), (2, ""), (4, ""), (1, ".trans"), (2, ".trans"), (4, ".trans")]
)
def test_ldmatrix_and_stmatrix_spread_rows_as_the_figure_says(count: int, trans: str) -> None:
    """Lane t gets elements 2 (t mod 4) and the next of row t / 4; of column t / 4 with .trans."""
    registers = [f"%r{10 + k}" for k in range(count)]
    body = f""".shared .align 16 .b8 buf[2048];
mov.b32 %r1, buf; shl.b32 %r2, %i, 4; add.u32 %r3, %r1, %r2;
mul.wide.u32 %rd9, %i, 16; add.u64 %rd10, %rd0, %rd9;
ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd10]; st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}};
bar.sync 0;
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{", ".join(registers)}}}, [%r3];
stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r3+1024], {{{", ".join(registers)}}};
bar.sync 0;
mul.wide.u32 %rd9, %i, {4 * count}; add.u64 %rd10, %rd1, %rd9;
{" ".join(f"st.global.b32 [%rd10+{4 * k}], {item};" for k, item in enumerate(registers))}
mul.wide.u32 %rd9, %i, 16; add.u64 %rd10, %rd2, %rd9;
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3+1024]; st.global.v4.b32 [%rd10], {{%r4, %r5, %r6, %r7}};
ret;"""
    rows = np.random.default_rng(count).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    found, back = np.zeros((32, count, 2), np.uint16), np.zeros((4, 8, 8), np.uint16)
    session = run(program(body, 3), rows.reshape(-1), found.reshape(-1), back.reshape(-1), races=True)
    for lane in LANES:
        for k in range(count):
            matrix = rows[k].T if trans else rows[k]
            assert found[lane, k].tolist() == matrix[lane // 4, 2 * (lane % 4) :][:2].tolist()
    assert (back[:count] == rows[:count]).all()
    assert session.races == ()


def test_a_warp_that_is_not_whole_cannot_multiply() -> None:
    body = """setp.lt.u32 %p1, %i, 9; @%p1 ret;
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r3}, {%r1,%r2,%r3,%r4};\nret;"""
    with pytest.raises(FaultError) as caught:
        run(program(body), np.zeros(4, np.uint8))
    assert caught.value.fault.kind == "inactive lane"


def test_ldmatrix_checks_its_rows() -> None:
    body = """.shared .align 16 .b8 buf[96];
mov.b32 %r1, buf; shl.b32 %r2, %i, 4; add.u32 %r3, %r1, %r2;
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r3];\nret;"""
    with pytest.raises(FaultError) as caught:
        run(program(body), np.zeros(4, np.uint8))
    assert (caught.value.fault.kind, caught.value.fault.thread) == ("out of bounds", 6)


DOT = """
@triton.jit
def k(a, b, c):
    m = tl.arange(0, 32)
    acc = tl.zeros((32, 32), TYPE)
    for s in range(3):
        x = tl.load(a + m[:, None] * 96 + s * 32 + m[None, :])
        y = tl.load(b + (s * 32 + m[:, None]) * 32 + m[None, :])
        acc = tl.dot(x, y, acc, out_dtype=TYPE)
    tl.store(c + m[:, None] * 32 + m[None, :], acc)
"""
KINDS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "i8": torch.int8}


@pytest.mark.parametrize(("kind", "arch"), [("fp16", "sm_80"), ("bf16", "sm_80"), ("fp32", "sm_80"), ("i8", "sm_80"), ("fp16", "sm_90")])  # fmt: skip
def test_tritons_dot_is_torchs_matmul(kind: str, arch: str) -> None:
    """Pipelined by Triton: cp.async, ldmatrix, mma. Small numbers, so that every sum is exact."""
    whole = kind == "i8"
    out = "i32" if whole else "fp32"
    source = DOT.replace("TYPE", "tl.int32" if whole else "tl.float32")
    built = triton_ptx(source, (("a", f"*{kind}"), ("b", f"*{kind}"), ("c", f"*{out}")), arch, align=16)
    assert "mma.sync" in built[0]
    assert "cp.async.wait_group" in built[0]
    torch.manual_seed(1)
    a, b = (torch.randint(-100, 100, shape).to(KINDS[kind]) for shape in ((32, 96), (96, 32)))
    c = np.zeros((32, 32), np.int32 if whole else np.float32)
    raw = [x.view(torch.int16).numpy() if kind == "bf16" else x.numpy() for x in (a, b)]
    session = run_triton(built, {"a": raw[0], "b": raw[1], "c": c})
    wanted = a.to(torch.float64) @ b.to(torch.float64)
    assert (c == wanted.numpy()).all()
    assert session.races == ()


def test_wgmma_is_refused_by_name_and_line() -> None:
    source = (
        DOT.replace("TYPE", "tl.float32")
        .replace("arange(0, 32)", "arange(0, 64)")
        .replace("(32, 32)", "(64, 64)")
    )
    text, shared = triton_ptx(source, (("a", "*fp16"), ("b", "*fp16"), ("c", "*fp32")), "sm_90", align=16)
    first = next(
        n
        for n, line in enumerate(text.splitlines(), 1)
        if "wgmma" in line and not line.strip().startswith("//")
    )
    empty = np.zeros(8, np.float16)
    with pytest.raises(PtxError, match="wgmma") as caught:
        run_triton((text, shared), {"a": empty, "b": empty, "c": np.zeros(8, np.float32)})
    assert caught.value.line == first
