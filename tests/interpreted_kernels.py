"""User kernels that the tests of the CPU target share. As text: the file that runs must be its own module."""

HEAD = "import triton\nimport triton.language as tl\n\n\n"
LEAN = (
    HEAD
    + """@triton.jit
def lean_kernel(
    logits_ptr: "*fp32",
    vocab_size: "i32",
    ids: "*i32",
    ids_count: "i32",
    boost: "fp32",
    BLOCK_SIZE: tl.constexpr,
):
    slot = tl.program_id(0)
    at = tl.arange(0, BLOCK_SIZE)
    here = at < ids_count
    row = logits_ptr + slot * vocab_size + tl.load(ids + at, mask=here, other=0)
    tl.store(row, tl.load(row, mask=here, other=0.0) + boost, mask=here)
"""
)
"""Adds a number to the logits of some ids."""
UPPER = (
    HEAD
    + """@triton.jit
def upper_kernel(output_ptr: "*u8", output_len: "*i32", ROW: tl.constexpr = 4096):
    slot = tl.program_id(0)
    at = tl.arange(0, ROW)
    here = at < tl.load(output_len + slot)
    row = output_ptr + slot * ROW
    text = tl.load(row + at, mask=here, other=0)
    small = (text >= 97) & (text <= 122)
    tl.store(row + at, tl.where(small, text - 32, text).to(tl.uint8), mask=here)
"""
)
"""Makes ASCII letters of the decided text upper case."""
