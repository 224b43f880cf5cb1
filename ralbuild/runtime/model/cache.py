"""Keys and values of every text that is being decoded, with a position per text.

Rows live in pools: one tensor per layer and capacity (64, 128, 256, ... positions). A row moves to
the next pool when its text outgrows it, and the rows of a pool are always 0..n-1, so one step
attends over plain views and its cost follows the text lengths. Memory is taken when a row needs it
and given back when a pool is empty: 128 slots of 4096 positions cost nothing at start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BUCKET = 64
"""The smallest capacity, in positions."""
SPARE = 4
"""A full pool grows by a row for every so many that it has."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position costs: layers, key/value heads, elements a head, element type."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values for one position."""
        return 2 * self.layers * self.heads * self.dim * int(self.dtype.itemsize)


def capacity_for(positions: int, most: int) -> int:
    """Return the smallest capacity (a power of two times `BUCKET`, or ``most``) for ``positions``."""
    capacity = BUCKET
    while capacity < positions:
        capacity *= 2
    return min(capacity, max(most, positions))


class Pool:
    """Rows of one capacity: ``layers[n]`` is [rows, 2 * heads, capacity, dim], keys before values."""

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.seats: list[Seat] = []
        self.layers: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Rows that memory is held for."""
        return self.layers[0].shape[0] if self.layers else 0

    def append(self, seat: Seat) -> int:
        """Give ``seat`` the next row."""
        row = len(self.seats)
        if row == self.rows:
            self._resize(row + max(1, row // SPARE))
        self.seats.append(seat)
        return row

    def remove(self, row: int) -> None:
        """Free a row; the last one moves into its place."""
        last = self.seats.pop()
        if last.row != row:
            for tensor in self.layers:
                tensor[row, :, : last.length] = tensor[last.row, :, : last.length]
            self.seats[row] = last
            last.row = row
        if not self.seats:
            self.layers = []

    def _resize(self, rows: int) -> None:
        used = len(self.seats)
        size = (rows, 2 * self.shape.heads, self.capacity, self.shape.dim)
        # Zeros, for attention multiplies masked positions by 0, and 0 times a leftover NaN is NaN.
        grown = [torch.zeros(size, dtype=self.shape.dtype) for _ in range(self.shape.layers)]
        for new, old in zip(grown, self.layers, strict=False):
            new[:used] = old
        self.layers = grown


class Seat:
    """One text's place in the cache: its pool, its row there, and how many positions are filled."""

    __slots__ = ("length", "pool", "row")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.length = 0
        self.row = pool.append(self)


class SlotCache:
    """All pools. A prompt is read in a pool of its own and joins the others when it is complete."""

    def __init__(self, shape: KvShape, max_positions: int) -> None:
        self.shape = shape
        self.max_positions = max_positions
        self._pools: dict[int, Pool] = {}

    def stage(self, positions: int) -> Seat:
        """Return a seat outside the batch for a prompt of ``positions`` tokens."""
        return Seat(Pool(self.shape, capacity_for(positions, self.max_positions)))

    def join(self, staged: Seat) -> Seat:
        """Move a staged seat into the batch and return its seat there."""
        return self._move(staged, staged.pool.capacity)

    def make_room(self, seat: Seat) -> Seat:
        """Return ``seat``, or its successor with more capacity when it is full."""
        if seat.length < seat.pool.capacity:
            return seat
        moved = self._move(seat, capacity_for(seat.length + 1, self.max_positions))
        self.leave(seat)
        return moved

    def leave(self, seat: Seat) -> None:
        """Free a seat."""
        seat.pool.remove(seat.row)

    def held_bytes(self) -> int:
        """Return the bytes that the pools hold now."""
        return sum(pool.rows * pool.capacity for pool in self._pools.values()) * self.shape.position_bytes

    def cost(self, positions: int) -> int:
        """Return the most bytes that a text of ``positions`` can make the pools hold."""
        row = capacity_for(positions, self.max_positions) * self.shape.position_bytes
        return row + row // SPARE

    def _move(self, seat: Seat, capacity: int) -> Seat:
        pool = self._pools.setdefault(capacity, Pool(self.shape, capacity))
        moved = Seat(pool)
        moved.length = seat.length
        for new, old in zip(pool.layers, seat.pool.layers, strict=True):
            new[moved.row, :, : seat.length] = old[seat.row, :, : seat.length]
        return moved


class PromptView:
    """The cache as the model sees it while one prompt is read, chunk by chunk."""

    def __init__(self, seat: Seat, count: int) -> None:
        self._seat = seat
        self._begin = seat.length
        self._end = seat.length + count
        self._masks: dict[int | None, Tensor | None] = {}

    def get_seq_length(self, *_: Any) -> int:
        """Return the filled positions; transformers asks for it."""
        return self._begin

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store [batch, heads, count, dim] each, as transformers calls it; attention gets this view."""
        self.store(layer, torch.cat((keys, values), 1).transpose(1, 2))
        return self, layer

    def store(self, layer: int, pairs: Tensor) -> None:
        """Store [1, count, 2 * heads, dim]."""
        place = self._seat.pool.layers[layer][self._seat.row]
        place[:, self._begin : self._end] = pairs[0].transpose(0, 1)

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return [1, count, query heads, dim] for queries [1, query heads, count, dim]."""
        pool, row = self._seat.pool, self._seat.row
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        mask = self._masks[window]
        seen = pool.layers[layer][row : row + 1, :, : self._end]
        out = scaled_dot_product_attention(
            query,
            seen[:, : pool.shape.heads],
            seen[:, pool.shape.heads :],
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=scale,
            enable_gqa=query.shape[1] != pool.shape.heads,
        )
        return out.transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor | None:
        if self._begin == 0 and (window is None or window >= self._end):
            return None
        at = torch.arange(self._begin, self._end)[:, None]
        seen = torch.arange(self._end)[None, :]
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
        return mask


class _Group:
    """The rows of one pool in one step: queries ``begin`` to ``end`` of the batch."""

    __slots__ = ("begin", "end", "longest", "masks", "places", "pool", "positions")

    def __init__(self, pool: Pool, begin: int) -> None:
        lengths = [seat.length for seat in pool.seats]
        self.pool = pool
        self.begin = begin
        self.end = begin + len(lengths)
        self.positions = torch.tensor(lengths)
        self.longest = max(lengths) + 1
        # Where each head's new vector goes when a layer is seen as one list of vectors.
        heads = torch.arange(len(lengths) * 2 * pool.shape.heads).view(len(lengths), -1)
        self.places = (heads * pool.capacity + self.positions[:, None]).view(-1)
        self.masks: dict[int | None, Tensor | None] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return [rows, 1, 1, longest], minus infinity where a row may not look; None when all see all."""
        if window not in self.masks:
            at = self.positions[:, None, None, None]
            seen = torch.arange(self.longest)[None, None, None, :]
            hidden = seen > at
            if window is not None:
                hidden |= seen <= at - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask if bool(hidden.any()) else None
        return self.masks[window]


class StepView:
    """The cache as the model sees it in one decode step: one new position for every seat."""

    def __init__(self, pools: list[Pool]) -> None:
        self._groups: list[_Group] = []
        for pool in pools:
            self._groups.append(_Group(pool, self._groups[-1].end if self._groups else 0))

    @property
    def positions(self) -> Tensor:
        """The position of every row's new token, [batch, 1]."""
        return torch.cat([group.positions for group in self._groups])[:, None]

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: positions are given to the model explicitly."""
        return 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store [batch, heads, count, dim] each, as transformers calls it; attention gets this view."""
        self.store(layer, torch.cat((keys, values), 1).transpose(1, 2))
        return self, layer

    def store(self, layer: int, pairs: Tensor) -> None:
        """Store [batch, 1, 2 * heads, dim], each row at its own position."""
        for group in self._groups:
            dim = group.pool.shape.dim
            vectors = group.pool.layers[layer].view(-1, dim)
            vectors.index_copy_(0, group.places, pairs[group.begin : group.end].reshape(-1, dim))

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return [batch, 1, query heads, dim] for queries [batch, query heads, 1, dim]."""
        outs = []
        for group in self._groups:
            shape, count = group.pool.shape, group.end - group.begin
            seen = group.pool.layers[layer][:count, :, : group.longest]
            out = scaled_dot_product_attention(
                # All query heads of one key/value head see the same keys: they stand in for query positions.
                query[group.begin : group.end].reshape(count, shape.heads, -1, shape.dim),
                seen[:, : shape.heads],
                seen[:, shape.heads :],
                attn_mask=group.mask(window, query.dtype),
                scale=scale,
            )
            outs.append(out.reshape(count, 1, -1, shape.dim))
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def step_pools(seats: list[Seat]) -> list[Pool]:
    """Return the pools of ``seats``, smallest capacity first; together they hold exactly these seats."""
    return sorted({id(seat.pool): seat.pool for seat in seats}.values(), key=lambda pool: pool.capacity)
