"""A user's kernel on the CPU: Triton's interpreter runs its source at its place in the decode step.

Only a bundle that asks for it (`runtime.cpu_user_kernels: interpret`) comes here, so only then is triton
imported; its wheel is a layer of such an image. For each step an array is made for every buffer that the
kernel takes; what it stored in `logits`, `token` and `output` is what the loop goes on with.
"""

from __future__ import annotations

import linecache
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ralbuild.contract.arrays import read_arrays
from ralbuild.contract.buffers import OUTPUT_BYTES
from ralbuild.contract.bundle import Kernel
from ralbuild.contract.codec import FormatError
from ralbuild.contract.interpreted import WRITTEN
from ralbuild.contract.manifest import ModelManifest
from ralbuild.contract.vocab import TokenBytes
from ralbuild.runtime.errors import BundleCorruptError, PatchUnsupportedError
from ralbuild.runtime.sampler import Logits

if TYPE_CHECKING:
    from ralbuild.runtime.steps import PatchSlot

Value = Any
"""A NumPy array, or a Python number for a parameter that is passed by value."""

_DTYPES = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
_ONE_AT_A_TIME = threading.Lock()
"""The interpreter keeps the running program's place in module variables."""


class UserKernelError(RuntimeError):
    """A user's kernel failed, or stored what the loop cannot go on with; the step is lost, not the server."""


@dataclass(frozen=True, slots=True)
class _Now:
    """What a step is about."""

    logits: Logits
    slots: Sequence[PatchSlot]


class UserStep:
    """One user kernel of the patch, run by the interpreter once for each slot."""

    def __init__(
        self, kernel: Kernel, objects: Mapping[str, bytes], manifest: ModelManifest, vocab: TokenBytes
    ) -> None:
        """Load the kernel's source.

        Raises:
            BundleCorruptError: when its source or data is not what the bundle says.
            PatchUnsupportedError: when Triton is not there, the source does not load, or it takes a buffer
                that the CPU target does not keep.
        """
        self.name = kernel.name
        self._params = [param for param in kernel.params if not param.hidden]
        self._constants = kernel.constants
        self._fixed = _fixed(kernel, objects, manifest, vocab)
        unknown = [
            param.buffer
            for param in self._params
            if param.buffer not in self._fixed and param.buffer not in _PER_STEP
        ]
        if unknown:
            message = f"takes {', '.join(unknown)}, which the CPU target does not keep"
            raise PatchUnsupportedError(message, place=f"user kernel {self.name!r}")
        self._launch = _load(kernel, objects)

    def run(self, logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Launch one program a slot and take over what it stored.

        Raises:
            UserKernelError: naming the kernel.
        """
        now = _Now(logits, slots)
        values = {param.buffer: self._value(param.buffer, now) for param in self._params}
        before = {
            name: value.copy()
            for name, value in values.items()
            if name not in WRITTEN and isinstance(value, np.ndarray)
        }
        given = {param.name: _argument(param.type, values[param.buffer]) for param in self._params}
        try:
            with _ONE_AT_A_TIME:
                self._launch(len(slots), given | dict(self._constants))
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserKernelError(f"user kernel {self.name!r} failed: {reason}") from error
        for name, old in before.items():
            if not np.array_equal(old, values[name]):
                raise UserKernelError(
                    f"user kernel {self.name!r} stored into {name!r}, which it may only read on the CPU"
                )
        self._take(values, now)

    def _value(self, buffer: str, now: _Now) -> Value:
        if buffer in self._fixed:
            return self._fixed[buffer]
        return _PER_STEP[buffer](now)

    def _take(self, values: Mapping[str, Value], now: _Now) -> None:
        if "logits" in values and values["logits"] is not now.logits:
            now.logits[:] = values["logits"]
        if "token" in values:
            size = self._fixed["tokenizer_size"]
            for slot, token in zip(now.slots, values["token"].tolist(), strict=True):
                if not 0 <= token < size:
                    raise UserKernelError(f"user kernel {self.name!r} stored the token {token}, of {size}")
                slot.token = token
        if "output" in values or "output_len" in values:
            rows = values.get("output", None)
            sizes = values.get("output_len", None)
            for row, slot in enumerate(now.slots):
                self._take_output(slot, rows, sizes, row)

    def _take_output(self, slot: PatchSlot, rows: Value, sizes: Value, row: int) -> None:
        held = min(len(slot.output), OUTPUT_BYTES)
        size = held if sizes is None else int(sizes[row])
        if not 0 <= size <= OUTPUT_BYTES:
            raise UserKernelError(f"user kernel {self.name!r} stored the length {size}, of {OUTPUT_BYTES}")
        text = slot.output.ljust(size, b"\0")[:size] if rows is None else rows[row, :size].tobytes()
        slot.output = text + slot.output[held:]


def _fixed(
    kernel: Kernel, objects: Mapping[str, bytes], manifest: ModelManifest, vocab: TokenBytes
) -> dict[str, Value]:
    """Return what is the same in every step: sizes, the vocabulary, the values of the kernel's config."""
    eos = sorted(manifest.eos_token_ids)
    fixed: dict[str, Value] = {
        "tokenizer_size": manifest.tokenizer_size,
        "eos_id": eos[0],
        "eos_ids": np.array(eos, np.int32),
        "eos_count": len(eos),
    }
    wanted = {param.buffer for param in kernel.params}
    if wanted & {"token_offsets", "token_bytes"}:
        pieces = [vocab[token] for token in range(len(vocab))]
        offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
        fixed |= {"token_offsets": offsets, "token_bytes": np.frombuffer(b"".join(pieces), np.uint8).copy()}
    if kernel.data is not None:
        try:
            arrays = read_arrays(objects[kernel.data.sha256], kernel.name).arrays
        except (FormatError, KeyError) as error:
            raise BundleCorruptError(f"has no usable data: {error}", place=kernel.name) from None
        fixed |= {name: np.array(view) for name, view in arrays.items()}
    return fixed


def _load(kernel: Kernel, objects: Mapping[str, bytes]) -> Callable[[int, dict[str, Value]], None]:
    """Import triton, run the kernel's file and return what launches it."""
    place = f"user kernel {kernel.name!r}"
    if kernel.source is None:
        raise PatchUnsupportedError(
            "is machine code for GPUs and the CPU target has none",
            place=place,
            hint="build with runtime.cpu_user_kernels: interpret, with --target cuda, or without it",
        )
    source = objects[kernel.source.sha256]
    try:
        import triton  # noqa: F401  the kernel's file imports it again
    except ImportError as error:
        hint = "the image was not built with runtime.cpu_user_kernels: interpret"
        raise PatchUnsupportedError(f"needs Triton: {error}", place=place, hint=hint) from None
    name = f"transformers/{kernel.name}.py"
    text = source.decode("utf-8", errors="replace")
    # The interpreter reads the source of a function through this cache; the file lies elsewhere.
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType(f"ral_user_{kernel.name}")
    module.__file__ = name
    try:
        exec(compile(source, name, "exec"), vars(module))  # noqa: S102  the image's own kernel
        function = getattr(module, kernel.entry)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise PatchUnsupportedError(f"its file does not load: {reason}", place=place) from None
    return lambda grid, given: function[(grid,)](**given)


def _argument(kind: str, value: Value) -> Value:
    """Return ``value`` as the parameter's type says: a tensor over the same memory, or a number."""
    if not kind.startswith("*"):
        return value.item() if isinstance(value, np.ndarray) else value
    import torch

    return torch.from_numpy(value.view(_DTYPES[kind[1:]]))


def _numbers(read: Callable[[PatchSlot], float], dtype: type) -> Callable[[_Now], Value]:
    return lambda now: np.array([read(slot) for slot in now.slots], dtype)


def _logits(now: _Now) -> Value:
    usable = now.logits.flags.c_contiguous and now.logits.flags.writeable
    return now.logits if usable else np.array(now.logits, order="C")


def _output(now: _Now) -> Value:
    rows = np.zeros((len(now.slots), OUTPUT_BYTES), np.uint8)
    for row, slot in enumerate(now.slots):
        text = slot.output[:OUTPUT_BYTES]
        rows[row, : len(text)] = np.frombuffer(text, np.uint8)
    return rows


def _counts(now: _Now) -> Value:
    rows = np.zeros(now.logits.shape, np.int16)
    for row, slot in enumerate(now.slots):
        if slot.counts is not None:
            rows[row, : len(slot.counts)] = slot.counts
    return rows


_PER_STEP: dict[str, Callable[[_Now], Value]] = {
    "slots": lambda now: len(now.slots),
    "vocab_size": lambda now: now.logits.shape[1],
    "logits": _logits,
    "counts": _counts,
    "output": _output,
    "output_len": _numbers(lambda slot: min(len(slot.output), OUTPUT_BYTES), np.int32),
    "token": _numbers(lambda slot: slot.token, np.int32),
    "step": _numbers(lambda slot: slot.step, np.int32),
    "seed": lambda now: np.array([slot.draw.seed for slot in now.slots], np.uint64).view(np.int64),
    "temperature": _numbers(lambda slot: slot.draw.temperature, np.float32),
    "top_k": _numbers(lambda slot: slot.draw.top_k, np.int32),
    "top_p": _numbers(lambda slot: slot.draw.top_p, np.float32),
    "min_p": _numbers(lambda slot: slot.draw.min_p, np.float32),
    "repetition_penalty": _numbers(lambda slot: slot.draw.repetition_penalty, np.float32),
    "presence_penalty": _numbers(lambda slot: slot.draw.presence_penalty, np.float32),
    "frequency_penalty": _numbers(lambda slot: slot.draw.frequency_penalty, np.float32),
}
