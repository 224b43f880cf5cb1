"""The decode loop's buffers as arrays, by the names of `ralbuild.contract.buffers`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ralbuild.contract.bans import BanTable
from ralbuild.contract.buffers import BIAS_ROOM, COUNTERS, FRONT_REGISTERS, OUTPUT_BYTES, RING_BYTES
from ralbuild.contract.bundle import Kernel
from ralbuild.contract.transducer import TransducerTable
from ralbuild.contract.vocab import TokenBytes
from ralbuild.simulate.faults import PtxError
from ralbuild.simulate.lanes import Array
from ralbuild.simulate.session import Argument


@dataclass(frozen=True, slots=True)
class Tables:
    """What a bundle's kernels read: rules, bans, the bytes of every token, ids that end a text."""

    transducer: TransducerTable
    bans: BanTable
    vocab: TokenBytes
    eos_ids: tuple[int, ...]


def table_buffers(tables: Tables) -> dict[str, Argument]:
    """Return the buffers that no kernel changes. Unsigned words are bound as signed, of the same bits."""
    fst, bans, vocab = tables.transducer, tables.bans, tables.vocab
    return {
        "tokenizer_size": len(vocab),
        "eos_id": tables.eos_ids[0],
        "eos_ids": np.array(tables.eos_ids, np.int32),
        "eos_count": len(tables.eos_ids),
        "token_offsets": _words(vocab.offsets),
        "token_bytes": _bytes(vocab.pool),
        "ban_class": _bytes(bans.cls),
        "ban_next": _words(bans.trans),
        "ban_classes": bans.classes,
        "ban_accepts": _bytes(bans.accepts),
        "fst_class": _bytes(fst.cls),
        "fst_next": _words(fst.trans),
        "fst_final": _words(fst.final),
        "fst_classes": fst.classes,
        "program_offsets": _words(fst.prog_off),
        "program_ops": _words(fst.prog_ops),
        "string_offsets": _words(fst.str_off),
        "string_pool": _bytes(fst.pool),
        "word_pages": _bytes(fst.word_pages),
        "word_bits": _bytes(fst.word_bits),
        "modes": _words(fst.modes),
        "mark_class": _bytes(fst.mark_class),
        "mark_next": _words(fst.mark_next),
        "mark_actions": _words(fst.mark_actions),
        "marker_rows": _words(fst.marker_rows),
        "mark_classes": fst.mark_classes,
        "redact_class": _bytes(fst.redact_class),
        "redact_next": _words(fst.redact_next),
        "redact_final": _words(fst.redact_final),
        "accept_offsets": _words(fst.accept_off),
        "accept_rows": _words(fst.accept_rows),
        "redact_rows": _words(fst.redact_rows),
        "redact_classes": fst.redact_classes,
    }


def slot_buffers(tables: Tables, slots: int, columns: int) -> dict[str, Argument]:
    """Return the buffers of ``slots`` idle slots and logits rows of ``columns``."""
    whole = np.zeros(slots, np.int32)
    return {
        "logits": np.zeros((slots, columns), np.float32),
        "vocab_size": columns,
        "temperature": np.zeros(slots, np.float32),
        "top_k": whole.copy(),
        "top_p": np.ones(slots, np.float32),
        "min_p": np.zeros(slots, np.float32),
        "repetition_penalty": np.ones(slots, np.float32),
        "presence_penalty": np.zeros(slots, np.float32),
        "frequency_penalty": np.zeros(slots, np.float32),
        "counts": np.zeros((slots, columns), np.int16),
        "bias_ids": np.zeros((slots, BIAS_ROOM), np.int32),
        "bias_values": np.zeros((slots, BIAS_ROOM), np.float32),
        "bias_count": whole.copy(),
        "seed": np.zeros(slots, np.int64),
        "step": whole.copy(),
        "token": np.full(slots, -1, np.int32),
        "ban_state": whole.copy(),
        "ban_strict": whole.copy(),
        "ban_events": whole.copy(),
        "draw_event": whole.copy(),
        "fst_state": np.full(slots, -1, np.int32),
        "front": np.zeros((slots, FRONT_REGISTERS), np.int32),
        "ring": np.zeros((slots, RING_BYTES), np.uint8),
        "read_pos": whole.copy(),
        "pending_pos": whole.copy(),
        "output": np.zeros((slots, OUTPUT_BYTES), np.uint8),
        "output_len": whole.copy(),
        "slots": slots,
        "max_steps": np.full(slots, 1 << 20, np.int32),
        "done": whole.copy(),
        "input_id": np.zeros(slots, np.int64),
        "position": np.zeros(slots, np.int64),
        "counters": np.zeros(len(COUNTERS), np.int64),
        "rule_events": np.zeros(max(1, tables.transducer.rules), np.int32),
    }


def arguments(kernel: Kernel, buffers: dict[str, Argument]) -> dict[str, Argument]:
    """Return a kernel's arguments in launch order, bound as the bundle says; hidden pointers are left out.

    Raises:
        PtxError: when the bundle binds a parameter to a buffer that is not given.
    """
    out: dict[str, Argument] = {}
    for param in kernel.params:
        if param.hidden:
            continue
        if param.buffer not in buffers:
            raise PtxError(f"parameter {param.name!r} is bound to the unknown buffer {param.buffer!r}", 1)
        out[param.name] = buffers[param.buffer]
    return out


def _words(view: memoryview) -> Array:
    return np.frombuffer(view, np.uint32).view(np.int32).copy() if len(view) else np.zeros(1, np.int32)


def _bytes(data: bytes | memoryview) -> Array:
    """Return bytes as an array; an empty pool still needs an address."""
    return np.frombuffer(data, np.uint8).copy() if len(data) else np.zeros(1, np.uint8)
