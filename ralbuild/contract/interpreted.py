"""Buffers that a user's kernel may take where Triton's interpreter runs it, on the CPU target.

There the decode loop keeps no device memory: an array is made for each step from what the loop knows.
`ralbuild.contract.buffers` says what each holds. What the loop does not keep as such (the transducer's
registers, the model's next input) has no entry here.
"""

from __future__ import annotations

WRITTEN = frozenset({"logits", "token", "output", "output_len"})
"""A kernel may change these; the loop goes on with what it stored."""
READ = frozenset(
    {
        *("slots", "vocab_size", "tokenizer_size", "eos_id", "eos_ids", "eos_count"),
        *("temperature", "top_k", "top_p", "min_p", "seed", "step"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "counts"),
        *("token_offsets", "token_bytes", "terms", "term_count"),
    }
)
"""A kernel may read these; a store into one of them is an error."""
CONFIG_PREFIX = "config."
"""Values of the kernel's own config; they are in its data object and may be read."""


def is_interpreted(buffer: str) -> bool:
    """Tell whether the CPU target can give a kernel the buffer of that name."""
    return buffer in WRITTEN or buffer in READ or buffer.startswith(CONFIG_PREFIX)
