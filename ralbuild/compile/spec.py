"""What is compiled: a Triton source, its entry, and the type and buffer of every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from ralbuild.contract.buffers import BIAS_ROOM, BUFFERS, OUTPUT_BYTES, RING_BYTES
from ralbuild.contract.codec import canonical_json, sha256_hex
from ralbuild.contract.transducer import STATE_BITS

SCALAR_SIZES: Mapping[str, int] = {
    "i8": 1, "i16": 2, "i32": 4, "i64": 8,
    "u8": 1, "u16": 2, "u32": 4, "u64": 8,
    "fp32": 4, "fp64": 8,
}  # fmt: skip
"""Types that a parameter passed by value may have, and their sizes in bytes."""
ELEMENT_SIZES: Mapping[str, int] = {**SCALAR_SIZES, "i1": 1, "fp16": 2, "bf16": 2}
"""Types that a pointer may point to."""

CANDIDATES = 16
"""Tokens that the sampler offers to the ban automaton before it masks the whole row."""
SAMPLE_BLOCK = 1024
"""Ids per pass of the sampler's loop; part of the noise formula in docs/kernels.md."""
SCAN_BLOCK = 2048
"""Ids per pass of the loops whose result does not depend on it."""
FEEDBACK_SLOTS = 1024
"""Slots that the one program of `feedback` serves: `max_batch_size` is at most this."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel to compile.

    Attributes:
        name: step name, unique in a bundle.
        source: the Triton source file, UTF-8.
        filename: how messages name that file; no part of the result.
        entry: the kernel function in it.
        signature: parameter to Triton type (``*i32``, ``fp32``), in launch order, without constants.
        constants: compile-time parameter to value.
        buffers: parameter to the name of its buffer (`ralbuild.contract.buffers`).
        align: parameter to a promised divisor of its address or value; absent means no promise.
        num_warps: warps per block.
        user: True for a file of the user's ``transformers/`` folder.
        data: table file of a user kernel's own config; no part of what is compiled.
    """

    name: str
    source: bytes
    filename: str
    entry: str
    signature: Mapping[str, str]
    constants: Mapping[str, int]
    buffers: Mapping[str, str]
    align: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    user: bool = False
    data: bytes | None = None

    @property
    def source_sha256(self) -> str:
        """Digest of the source file."""
        return sha256_hex(self.source)

    def identity(self) -> bytes:
        """Return canonical JSON of everything that can change the compiled bytes."""
        return canonical_json(
            {
                "source": self.source_sha256,
                "entry": self.entry,
                "signature": list(self.signature.items()),
                "constants": sorted(self.constants.items()),
                "align": sorted(self.align.items()),
                "num_warps": self.num_warps,
            }
        )


def type_size(triton_type: str) -> int:
    """Return the bytes that a parameter of this type takes: 8 for a pointer."""
    return 8 if triton_type.startswith("*") else SCALAR_SIZES[triton_type]


def type_align(triton_type: str) -> int:
    """Return the alignment that the address of a buffer must have; 1 for a number."""
    return ELEMENT_SIZES[triton_type[1:]] if triton_type.startswith("*") else 1


def builtin_specs() -> tuple[KernelSpec, ...]:
    """Return the built-in kernels in launch order; user kernels come before ``feedback``, in the patch.

    They hold no rule and no size of a model: tables are buffers, so one compilation serves every config.
    """
    transduce = {"RING": RING_BYTES, "OUTPUT": OUTPUT_BYTES, "LANES": 32, "STATE_BITS": STATE_BITS}
    sample = {"BLOCK": SAMPLE_BLOCK, "WIDE": SCAN_BLOCK, "CANDIDATES": CANDIDATES}
    return (
        _builtin("penalize", _PENALIZE, {"BLOCK": SCAN_BLOCK, "ROOM": BIAS_ROOM}, num_warps=8),
        _builtin("sample", _SAMPLE, sample, num_warps=8),
        _builtin("transduce", _TRANSDUCE, transduce, num_warps=1),
        _builtin("feedback", _FEEDBACK, {"BLOCK": FEEDBACK_SLOTS}, num_warps=4),
    )


_PENALIZE = (
    "logits vocab_size tokenizer_size repetition_penalty presence_penalty frequency_penalty counts "
    "bias_ids bias_values bias_count done"
)
_SAMPLE = (
    "logits vocab_size tokenizer_size temperature top_k top_p min_p seed step eos_id eos_ids eos_count "
    "token token_offsets token_bytes ban_class ban_next ban_classes ban_accepts ban_strict ban_state "
    "ban_events draw_event done"
)
_FEEDBACK = (
    "token fst_state step max_steps counts vocab_size ban_events draw_event slots done input_id position "
    "counters"
)
_TRANSDUCE = (
    "token tokenizer_size eos_ids eos_count token_offsets token_bytes fst_class fst_next fst_final "
    "fst_classes program_offsets program_ops string_offsets string_pool word_pages word_bits modes "
    "mark_class mark_next mark_actions marker_rows mark_classes redact_class redact_next redact_final "
    "accept_offsets accept_rows redact_rows redact_classes fst_state front ring read_pos "
    "pending_pos output output_len rule_events"
)


def _builtin(name: str, params: str, constants: dict[str, int], num_warps: int) -> KernelSpec:
    """Bind each parameter to the buffer of the same name."""
    names = params.split()
    return KernelSpec(
        name=name,
        source=resources.files("ralbuild.kernels").joinpath(f"{name}.py").read_bytes(),
        filename=f"ralbuild/kernels/{name}.py",
        entry=name,
        signature={param: BUFFERS[param].type for param in names},
        constants=constants,
        buffers={param: param for param in names},
        num_warps=num_warps,
    )
