"""The decode graph of the CPU target: the model's forward pass, then the folded steps, run eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ralbuild.runtime.lanes import Read
from ralbuild.runtime.model.cache import BatchView, KvShape, Seat, SlotCache, step_pools
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
        self._prefix: tuple[int, ...] = ()
        self._prefix_seat: Seat | None = None

    @property
    def shape(self) -> KvShape:
        """What a cached position costs."""
        return self.cache.shape

    @property
    def kept_bytes(self) -> int:
        """Bytes of keys and values that `keep` holds; they live as long as the graph."""
        seat = self._prefix_seat
        return seat.pool.rows * seat.pool.capacity * self.shape.position_bytes if seat is not None else 0

    def keep(self, prefix: Sequence[int]) -> None:
        """Read what many prompts begin with, once and for all: `open` gives it to those that do.

        It is always read alone, so a text does not depend on what was asked before it.
        """
        if 0 < len(prefix) < self.cache.max_positions:
            seat = self.cache.stage(len(prefix))
            self._forward(prefix, BatchView([(seat, len(prefix))], ()))
            seat.length = len(prefix)
            self._prefix, self._prefix_seat = tuple(prefix), seat

    def open(self, slot: PatchSlot, prompt: Sequence[int]) -> Lane:
        """Return a lane for a prompt. `advance` has to read it from its position ``seat.length`` on."""
        size = len(self._prefix)
        known = len(prompt) > size and tuple(prompt[:size]) == self._prefix
        return Lane(self.cache.stage(len(prompt), self._prefix_seat if known else None), slot)

    def advance(self, reads: Sequence[Read[Lane]], lanes: Sequence[Lane]) -> list[Lane]:
        """Run the model once: read parts of prompts, and give every lane that has joined its next token.

        Args:
            reads: lanes that have not joined; those whose prompt ends here join and get their first token.
            lanes: all lanes that have joined, in any order.

        Returns:
            The lanes that have a new token: all but those whose prompts go on.
        """
        for lane in lanes:
            lane.seat = self.cache.make_room(lane.seat)
        pools = step_pools([lane.seat for lane in lanes])
        owner = {id(lane.seat): lane for lane in lanes}
        ordered = [owner[id(seat)] for pool in pools for seat in pool.seats]
        view = BatchView([(read.lane.seat, len(read.tokens)) for read in reads], pools)
        tokens = [token for read in reads for token in read.tokens]
        logits = self._forward([*tokens, *(lane.slot.token for lane in ordered)], view)
        for lane in ordered:
            lane.seat.length += 1
        for read in reads:
            read.lane.seat.length += len(read.tokens)
            if read.last:
                read.lane.seat = self.cache.join(read.lane.seat)
        drawing = [number for number, read in enumerate(reads) if read.last]
        slots = [reads[number].lane.slot for number in drawing] + [lane.slot for lane in ordered]
        if len(drawing) < len(reads):
            logits = logits[[*drawing, *range(len(reads), len(logits))]]
        if slots:
            self.patch.run(logits, slots)
        return [*(reads[number].lane for number in drawing), *lanes]

    def reset(self) -> None:
        """Forget all lanes, after a step that failed half-way."""
        self.cache = SlotCache(self.cache.shape, self.cache.max_positions)

    def close(self, lane: Lane) -> None:
        """Free the lane's place in the cache."""
        self.cache.leave(lane.seat)

    def _forward(self, tokens: Sequence[int], view: BatchView) -> Logits:
        with torch.inference_mode():
            logits: Logits = self._logits(torch.tensor(tokens), view).numpy()
        return logits
