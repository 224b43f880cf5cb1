"""The decode graph of the CPU target: the model's forward pass, then the folded steps, run eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ralbuild.runtime.model.cache import KvShape, PromptView, Seat, SlotCache, StepView, step_pools
from ralbuild.runtime.model.weights import LoadedModel
from ralbuild.runtime.sampler import Logits
from ralbuild.runtime.steps import Patch, PatchSlot


@dataclass(slots=True)
class Lane:
    """One text in the graph: its place in the cache and its state in the folded step."""

    seat: Seat
    slot: PatchSlot


class DecodeGraph:
    """Everything that one decode step runs. Not safe for threads: the engine's thread owns it."""

    def __init__(self, model: LoadedModel, patch: Patch, max_positions: int) -> None:
        self._logits = model.logits
        self.patch = patch
        self.cache = SlotCache(model.shape, max_positions)

    @property
    def shape(self) -> KvShape:
        """What a cached position costs."""
        return self.cache.shape

    def open(self, slot: PatchSlot, positions: int) -> Lane:
        """Return a lane for a prompt of ``positions`` tokens; it decodes after `read` saw all of them."""
        return Lane(self.cache.stage(positions), slot)

    def read(self, lane: Lane, tokens: Sequence[int], *, last: bool) -> None:
        """Read a chunk of the prompt; after the ``last`` one the lane has its first token and may step."""
        view = PromptView(lane.seat, len(tokens))
        begin = lane.seat.length
        positions = torch.arange(begin, begin + len(tokens))[None, :]
        logits = self._forward(torch.tensor([list(tokens)]), positions, view)
        lane.seat.length += len(tokens)
        if last:
            lane.seat = self.cache.join(lane.seat)
            self.patch.run(logits, [lane.slot])

    def step(self, lanes: Sequence[Lane]) -> None:
        """Give every lane its next token. ``lanes`` are all lanes that have joined, in any order."""
        for lane in lanes:
            lane.seat = self.cache.make_room(lane.seat)
        pools = step_pools([lane.seat for lane in lanes])
        owner = {id(lane.seat): lane for lane in lanes}
        ordered = [owner[id(seat)] for pool in pools for seat in pool.seats]
        view = StepView(pools)
        tokens = torch.tensor([[lane.slot.token] for lane in ordered])
        logits = self._forward(tokens, view.positions, view)
        for lane in ordered:
            lane.seat.length += 1
        self.patch.run(logits, [lane.slot for lane in ordered])

    def reset(self) -> None:
        """Forget all lanes, after a step that failed half-way."""
        self.cache = SlotCache(self.cache.shape, self.cache.max_positions)

    def close(self, lane: Lane) -> None:
        """Free the lane's place in the cache."""
        self.cache.leave(lane.seat)

    def _forward(self, tokens: Tensor, positions: Tensor, view: Any) -> Logits:
        with torch.inference_mode():
            logits: Logits = self._logits(tokens, positions, view).numpy()
        return logits
