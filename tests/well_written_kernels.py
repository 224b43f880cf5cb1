"""Triton kernels without a defect, in the manner of Triton's tutorials: the lint must be silent on them."""

# ruff: noqa: N803, PIE808
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(
        out_ptr + offsets,
        tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask),
        mask=mask,
    )


@triton.jit
def softmax(out_ptr, in_ptr, in_stride, out_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    values = tl.load(in_ptr + row * in_stride + cols, mask=mask, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out_ptr + row * out_stride + cols, values / tl.sum(values, axis=0), mask=mask)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, m, n, k, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(axis=0)
    blocks_n = tl.cdiv(n, BN)
    first = (pid // (GROUP * blocks_n)) * GROUP
    size = min(tl.cdiv(m, BM) - first, GROUP)
    pid_m = first + (pid % (GROUP * blocks_n)) % size
    pid_n = (pid % (GROUP * blocks_n)) // size
    rows = (pid_m * BM + tl.arange(0, BM)) % m
    cols = (pid_n * BN + tl.arange(0, BN)) % n
    inner = tl.arange(0, BK)
    a_ptrs = a_ptr + (rows[:, None] * sam + inner[None, :] * sak)
    b_ptrs = b_ptr + (inner[:, None] * sbk + cols[None, :] * sbn)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, BK)):
        a = tl.load(a_ptrs, mask=inner[None, :] < k - step * BK, other=0.0)
        b = tl.load(b_ptrs, mask=inner[:, None] < k - step * BK, other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BK * sak
        b_ptrs += BK * sbk
    out_rows = pid_m * BM + tl.arange(0, BM)
    out_cols = pid_n * BN + tl.arange(0, BN)
    c_ptrs = c_ptr + scm * out_rows[:, None] + scn * out_cols[None, :]
    tl.store(c_ptrs, total.to(tl.float16), mask=(out_rows[:, None] < m) & (out_cols[None, :] < n))


@triton.jit
def dropout(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(out_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


@triton.jit
def layer_norm(x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    y_ptr += row * stride
    x_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    tl.store(mean_ptr + row, mean)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n
        w = tl.load(w_ptr + cols, mask=mask)
        b = tl.load(b_ptr + cols, mask=mask)
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, (x - mean) * w + b, mask=mask)


@triton.jit
def difference(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Reads its neighbour, within the bound, and writes elsewhere."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at + 1 < n
    here = tl.load(x_ptr + at, mask=at < n, other=0)
    after = tl.load(x_ptr + at + 1, mask=inside, other=0)
    tl.store(out_ptr + at, after - here, mask=inside)


@triton.jit
def shorter_bound(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after = tl.load(x_ptr + at + 1, mask=(at >= 0) & (at < n - 1), other=0)
    tl.store(out_ptr + at, after, mask=at < n - 1)


@triton.jit
def count(x_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Whole numbers add up to the same in any order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hits = tl.sum((tl.load(x_ptr + at, mask=at < n, other=0) > 0).to(tl.int32), axis=0)
    tl.atomic_add(count_ptr, hits)
