"""The buffers of `ralbuild.contract.buffers` on a device: tables uploaded, registers of idle slots.

`docs/kernels.md` has the life of a slot; here are its first moment and its last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ralbuild.contract.arrays import read_arrays
from ralbuild.contract.buffers import (
    BIAS_ROOM,
    BUFFERS,
    COUNTERS,
    FRONT_REGISTERS,
    OUTPUT_BYTES,
    RING_BYTES,
)
from ralbuild.contract.bundle import Kernel
from ralbuild.contract.codec import FormatError
from ralbuild.contract.transducer import Slot
from ralbuild.runtime.cuda.patch import Values
from ralbuild.runtime.cuda.pool import Kind, Pool
from ralbuild.runtime.errors import BundleCorruptError
from ralbuild.runtime.sampler import Draw, Sampler
from ralbuild.runtime.steps import IDLE, Tables

_DTYPES = {
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
_SIGNED = {
    "B": torch.uint8, "H": torch.int16, "I": torch.int32, "Q": torch.int64, "f": torch.float32,
    "b": torch.int8, "h": torch.int16, "i": torch.int32, "q": torch.int64, "d": torch.float64,
}  # fmt: skip
"""By a `memoryview`'s code. A kernel takes the bits as they are, and torch 2.4 has no unsigned words."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What buffers are made for: slots, columns of a logits row, ids that are tokens or end a text."""

    slots: int
    columns: int
    tokens: int
    eos_ids: tuple[int, ...]


class Buffers:
    """Every buffer that a kernel may be bound to.

    Attributes:
        tensors: the arrays by name, as torch sees them.
        values: what kernels are launched with, by name: addresses and numbers.
        own: by kernel name, the values of a user kernel's own config, which beat those of the same name.
    """

    def __init__(
        self,
        tables: Tables,
        sizes: Sizes,
        kernels: Sequence[Kernel],
        objects: Mapping[str, bytes],
        place: torch.device,
    ) -> None:
        """Take the memory, upload the tables and make every slot idle."""
        self._tables = tables
        self._sampler = Sampler(sizes.tokens)
        given = {kernel.name: _own_arrays(kernel, objects) for kernel in kernels if kernel.data is not None}
        data = {name: _tensor(view) for name, view in table_views(tables, sizes.eos_ids).items()}
        for kernel, arrays in given.items():
            data |= {_own_name(kernel, name): _tensor(view) for name, view in arrays.items()}
        kinds = {name: (item.dtype, tuple(item.shape)) for name, item in data.items()}
        pool = Pool({**kinds, **_registers(sizes, tables.machine.table.rules)}, place)
        for name, item in data.items():
            pool.tensors[name].copy_(item)
        self.tensors = pool.tensors
        self.size = pool.size
        self.values: dict[str, int | float] = {**pool.addresses, **table_numbers(tables, sizes)}
        self.own: dict[str, Values] = {
            kernel.name: {
                param.buffer: pool.addresses[_own_name(kernel.name, param.buffer)]
                if param.type.startswith("*")
                else given[kernel.name][param.buffer][0]
                for param in kernel.params
                if param.buffer in given[kernel.name]
            }
            for kernel in kernels
            if kernel.name in given
        }
        self._trash = 0
        for name in ("top_p", "repetition_penalty"):
            self.tensors[name].fill_(1)

    def rest_all(self, trash: int) -> None:
        """Make every slot idle; its steps write keys and values to the position ``trash``."""
        self._trash = trash
        self.tensors["done"].fill_(1)
        self.tensors["token"].fill_(IDLE)
        self.tensors["position"].fill_(trash)

    def rest(self, row: int) -> None:
        """Make one slot idle, whatever its text was about to do."""
        self.tensors["done"][row].fill_(1)
        self.tensors["position"][row].fill_(self._trash)

    def begin(self, row: int, profile: int, draw: Draw, prompt: Sequence[int], limit: int) -> None:
        """Let a slot go on behind ``prompt``: its last token is the input of the next step."""
        self.set_rules(row, profile)
        self._set_draw(row, draw, prompt)
        numbers = {
            "step": 0,
            "max_steps": limit,
            "token": IDLE,
            "ban_events": 0,
            "draw_event": 0,
            "input_id": prompt[-1],
            "position": len(prompt) - 1,
            "done": 0,
        }
        for name, value in numbers.items():
            self.tensors[name][row].fill_(value)

    def text(self, row: int) -> Slot:
        """Read a text's state back, as the plain executor has it. Waits for the device."""
        state, read, pending = (
            int(self.tensors[name][row]) for name in ("fst_state", "read_pos", "pending_pos")
        )
        ring = self.tensors["ring"][row].cpu().numpy().tobytes()
        raw = bytes(ring[at % RING_BYTES] for at in range(pending, read))
        return self._tables.machine.resume(state, self.tensors["front"][row].tolist(), raw, read)

    def set_rules(self, row: int, profile: int) -> None:
        """Put a slot into the start states of a profile."""
        tables = self._tables
        slot = tables.machine.start(profile)
        front = list(slot.registers(0))
        front[0] |= tables.vocab.strips << 16
        self.tensors["front"][row].copy_(torch.tensor(front, dtype=torch.int32))
        numbers = {
            "fst_state": slot.state,
            "read_pos": 0,
            "pending_pos": 0,
            "output_len": 0,
            "ban_state": tables.bans.starts[profile],
            "ban_strict": tables.bans.strict[profile],
        }
        for name, value in numbers.items():
            self.tensors[name][row].fill_(value)

    def _set_draw(self, row: int, draw: Draw, prompt: Sequence[int]) -> None:
        for name in _DRAWN:
            self.tensors[name][row].fill_(getattr(draw, name))
        self.tensors["seed"][row].fill_(draw.seed - (draw.seed >> 63 << 64))
        bias = draw.logit_bias
        if bias:
            self.tensors["bias_ids"][row, : len(bias)].copy_(torch.tensor([token for token, _ in bias]))
            self.tensors["bias_values"][row, : len(bias)].copy_(torch.tensor([value for _, value in bias]))
        self.tensors["bias_count"][row].fill_(len(bias))
        if draw.penalises:
            counts = torch.from_numpy(self._sampler.counts(prompt))
            known = min(len(counts), self.tensors["counts"].shape[1])
            self.tensors["counts"][row].zero_()
            self.tensors["counts"][row, :known].copy_(counts[:known])


_DRAWN = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def table_views(tables: Tables, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the arrays that no kernel changes, by buffer name."""
    fst, bans, vocab = tables.machine.table, tables.bans, tables.vocab
    return {
        "eos_ids": np.array(eos_ids, np.int32),
        "token_offsets": vocab.offsets,
        "token_bytes": vocab.pool,
        "ban_class": bans.cls,
        "ban_next": bans.trans,
        "ban_accepts": bans.accepts,
        "fst_class": fst.cls,
        "fst_next": fst.trans,
        "fst_final": fst.final,
        "program_offsets": fst.prog_off,
        "program_ops": fst.prog_ops,
        "string_offsets": fst.str_off,
        "string_pool": fst.pool,
        "word_pages": fst.word_pages,
        "word_bits": fst.word_bits,
        "modes": fst.modes,
        "mark_class": fst.mark_class,
        "mark_next": fst.mark_next,
        "mark_actions": fst.mark_actions,
        "marker_rows": fst.marker_rows,
        "redact_class": fst.redact_class,
        "redact_next": fst.redact_next,
        "redact_final": fst.redact_final,
        "accept_offsets": fst.accept_off,
        "accept_rows": fst.accept_rows,
        "redact_rows": fst.redact_rows,
    }


def table_numbers(tables: Tables, sizes: Sizes) -> dict[str, int]:
    """Return the numbers that are passed by value, by buffer name."""
    fst = tables.machine.table
    return {
        "vocab_size": sizes.columns,
        "tokenizer_size": sizes.tokens,
        "eos_id": min(sizes.eos_ids),
        "eos_count": len(sizes.eos_ids),
        "ban_classes": tables.bans.classes,
        "fst_classes": fst.classes,
        "mark_classes": fst.mark_classes,
        "redact_classes": fst.redact_classes,
    }


def _registers(sizes: Sizes, rules: int) -> dict[str, Kind]:
    """Return the arrays that a step changes: those with a row for each slot, and the counters."""
    rows = {
        "logits": sizes.columns,
        "counts": sizes.columns,
        "bias_ids": BIAS_ROOM,
        "bias_values": BIAS_ROOM,
        "front": FRONT_REGISTERS,
        "ring": RING_BYTES,
        "output": OUTPUT_BYTES,
    }
    out: dict[str, Kind] = {
        "rule_events": (torch.int32, (max(rules, 1),)),
        "counters": (torch.int64, (len(COUNTERS),)),
    }
    for name, buffer in BUFFERS.items():
        dtype = _DTYPES[buffer.type.removeprefix("*")]
        if buffer.shape == "B":
            out[name] = (dtype, (sizes.slots,))
        elif name in rows:
            out[name] = (dtype, (sizes.slots, rows[name]))
    return out


def _tensor(view: Any) -> Tensor:
    """Return an array of a table, bit by bit; an empty one has one element, to have an address."""
    if isinstance(view, np.ndarray):
        return torch.from_numpy(view)
    view = memoryview(view)
    dtype = _SIGNED[view.format]
    return torch.frombuffer(bytearray(view), dtype=dtype) if len(view) else torch.zeros(1, dtype=dtype)


def _own_arrays(kernel: Kernel, objects: Mapping[str, bytes]) -> Mapping[str, memoryview]:
    assert kernel.data is not None
    try:
        return read_arrays(objects[kernel.data.sha256], kernel.name).arrays
    except (FormatError, KeyError) as error:
        raise BundleCorruptError(f"has no usable data: {error}", place=kernel.name) from None


def _own_name(kernel: str, buffer: str) -> str:
    return f"{kernel}/{buffer}"
