"""What a step tells the host: a few words and the first bytes of its text, for each slot.

A step is launched before the results of the one before it are read. So each copies its results to
one of two places that are used in turn, and the host waits for the copy, not for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ralbuild.contract.buffers import OUTPUT_BYTES
from ralbuild.runtime.cuda.buffers import Buffers, Sizes
from ralbuild.runtime.cuda.device import Device

HEAD = 64
"""Bytes of a step's text that always come along; the rest is fetched when there is more."""
_WORDS = ("token", "step", "fst_state", "output_len", "ban_events", "draw_event")
_HELD = len(_WORDS)
WORD_BYTES = 4 * (_HELD + 1)
"""Bytes a slot and step beside `HEAD`."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one step did to one slot.

    Attributes:
        token: the drawn id; negative when the slot was idle.
        step: tokens drawn so far.
        state: of the transducer; negative once the text has ended.
        size: bytes decided; ``text`` has them, up to `OUTPUT_BYTES`.
        refused, event: `ban_events` and `draw_event`.
        held: bytes read and not decided.
    """

    token: int
    step: int
    state: int
    size: int
    refused: int
    event: int
    held: int
    text: bytes


class Reports:
    """The two places, and the copies into them."""

    def __init__(self, device: Device, buffers: Buffers, sizes: Sizes) -> None:
        self._device = device
        self._buffers = buffers
        place, slots = device.place, sizes.slots
        columns = _HELD + 1 + HEAD // 4
        self._packed = torch.zeros((slots, columns), dtype=torch.int32, device=place)
        self._whole = [torch.zeros((slots, OUTPUT_BYTES), dtype=torch.uint8, device=place) for _ in range(2)]
        self._host = [device.pinned(slots, columns, dtype=torch.int32) for _ in range(2)]
        self._words = [host.numpy() for host in self._host]  # the same memory
        rules = buffers.tensors["rule_events"].shape[0]
        self._events = [device.pinned(rules, dtype=torch.int32) for _ in range(2)]
        self._counted = bytes(4 * rules)
        self._turn = 0

    def pack(self, slots: int) -> None:
        """Gather the words of a step in one place: part of every graph."""
        found = self._buffers.tensors
        words = [found[name][:slots] for name in _WORDS]
        words.append(found["read_pos"][:slots] - found["pending_pos"][:slots])
        self._packed[:slots, : _HELD + 1].copy_(torch.stack(words, 1))
        self._packed[:slots, _HELD + 1 :].copy_(found["output"].view(torch.int32)[:slots, : HEAD // 4])

    def send(self, slots: int) -> int:
        """Begin to copy the results of the step just launched; return their place."""
        turn = self._turn = 1 - self._turn
        self._whole[turn][:slots].copy_(self._buffers.tensors["output"][:slots])
        self._device.fetch(self._host[turn][:slots], self._packed[:slots])
        self._device.fetch(self._events[turn], self._buffers.tensors["rule_events"])
        return turn

    def line(self, turn: int, row: int) -> Line:
        """Return what a step did to a slot; its copy must be complete."""
        words = self._words[turn][row]
        token, step, state, size, refused, event, held = words[: _HELD + 1].tolist()
        kept = min(size, OUTPUT_BYTES)
        text = words[_HELD + 1 :].tobytes()[:kept]
        if kept > HEAD:
            text = self._whole[turn][row, :kept].cpu().numpy().tobytes()
        return Line(token, step, state, size, refused, event, held, text)

    def events(self, turn: int) -> list[int]:
        """Return a rule's id for each match since the last call, of all texts together."""
        now = self._events[turn].numpy()
        if (data := now.tobytes()) == self._counted:
            return []
        before = torch.frombuffer(bytearray(self._counted), dtype=torch.int32).numpy()
        self._counted = data
        more = (now - before).tolist()
        return [rule for rule, count in enumerate(more) for _ in range(count)]
