"""Keys and values of every text that is being decoded, with a position per text.

Rows live in pools: one tensor per layer and capacity (64, 128, 256, ... positions). A row moves to
the next pool when its text outgrows it, and the rows of a pool are always 0..n-1, so one step
attends over plain views and its cost follows the text lengths. Memory is taken when a row needs it
and given back when a pool is empty: 128 slots of 4096 positions cost nothing at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_KNOWS_GROUPS = torch.__version__ >= "2.5"
"""Attention takes fewer key heads than query heads; the base for CUDA has an earlier torch."""
CPU = torch.device("cpu")
BUCKET = 64
"""The smallest capacity, in positions."""
SPARE = 4
"""A full pool grows by a row for every so many that it has."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position costs: layers, key/value heads, elements a head, element type; and where it lies."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    place: torch.device = CPU

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
        grown = blank_layers(self.shape, size)
        for new, old in zip(grown, self.layers, strict=False):
            new[:used] = old
        self.layers = grown


def blank_layers(shape: KvShape, size: tuple[int, ...]) -> list[Tensor]:
    """Return a tensor of zeros for each layer."""
    return [torch.zeros(size, dtype=shape.dtype, device=shape.place) for _ in range(shape.layers)]


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

    def stage(self, positions: int, like: Seat | None = None) -> Seat:
        """Return a seat outside the batch for a prompt of ``positions`` tokens that begins as ``like``."""
        seat = Seat(Pool(self.shape, capacity_for(positions, self.max_positions)))
        if like is not None:
            copy_seat(like, seat)
        return seat

    def join(self, staged: Seat) -> Seat:
        """Move a staged seat into the batch and return its seat there."""
        moved = self._move(staged, staged.pool.capacity)
        self.leave(staged)  # seat and pool know each other: their memory would wait for the collector
        return moved

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
        copy_seat(seat, moved)
        return moved


def copy_seat(source: Seat, target: Seat) -> None:
    """Let ``target`` begin with all that ``source`` holds."""
    target.length = source.length
    for new, old in zip(target.pool.layers, source.pool.layers, strict=True):
        new[target.row, :, : source.length] = old[source.row, :, : source.length]


class _Chunk:
    """The next ``count`` positions of one prompt: rows ``begin`` to ``end`` of the batch."""

    __slots__ = ("_first", "_last", "_masks", "_seat", "begin", "end", "positions")

    def __init__(self, seat: Seat, begin: int, count: int) -> None:
        self._seat = seat
        self._first, self._last = seat.length, seat.length + count
        self._masks: dict[int | None, Tensor | None] = {}
        self.begin, self.end = begin, begin + count
        self.positions = torch.arange(self._first, self._last, device=seat.pool.shape.place)

    def store(self, layer: int, pairs: Tensor) -> None:
        place = self._seat.pool.layers[layer][self._seat.row]
        place[:, self._first : self._last] = pairs.transpose(0, 1)

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        pool, row = self._seat.pool, self._seat.row
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        mask = self._masks[window]
        seen = pool.layers[layer][row : row + 1, :, : self._last]
        keys, values = seen[:, : pool.shape.heads], seen[:, pool.shape.heads :]
        grouped = {"enable_gqa": True} if query.shape[1] != pool.shape.heads else {}
        if grouped and not _KNOWS_GROUPS:
            keys, values = (
                side.repeat_interleave(query.shape[1] // pool.shape.heads, 1) for side in (keys, values)
            )
            grouped = {}
        out = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and len(query) > 1,
            scale=scale,
            **grouped,
        )
        return out[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Tensor | None:
        if self._first == 0 and (window is None or window >= self._last):
            return None
        at = self.positions[:, None]
        seen = torch.arange(self._last, device=at.device)[None, :]
        mask = seen <= at
        if window is not None:
            mask &= seen > at - window
        return mask


class _Group:
    """All rows of one pool, with one new position each: rows ``begin`` to ``end`` of the batch."""

    __slots__ = ("_masks", "_places", "_pool", "begin", "end", "longest", "positions")

    def __init__(self, pool: Pool, begin: int) -> None:
        lengths = [seat.length for seat in pool.seats]
        self._pool = pool
        self.begin = begin
        self.end = begin + len(lengths)
        self.positions = torch.tensor(lengths)
        self.longest = max(lengths) + 1
        # Where each head's new vector goes when a layer is seen as one list of vectors.
        heads = torch.arange(len(lengths) * 2 * pool.shape.heads).view(len(lengths), -1)
        self._places = (heads * pool.capacity + self.positions[:, None]).view(-1)
        self._masks: dict[int | None, Tensor | None] = {}

    def store(self, layer: int, pairs: Tensor) -> None:
        dim = self._pool.shape.dim
        vectors = self._pool.layers[layer].view(-1, dim)
        vectors.index_copy_(0, self._places, pairs.reshape(-1, dim))

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        shape, count = self._pool.shape, len(query)
        seen = self._pool.layers[layer][:count, :, : self.longest]
        out = scaled_dot_product_attention(
            # All query heads of one key/value head see the same keys: they stand in for query positions.
            query.reshape(count, shape.heads, -1, shape.dim),
            seen[:, : shape.heads],
            seen[:, shape.heads :],
            attn_mask=self._mask(window, query.dtype),
            scale=scale,
        )
        return out.reshape(count, -1, shape.dim)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return [rows, 1, 1, longest], minus infinity where a row may not look; None when all see all."""
        if window not in self._masks:
            at = self.positions[:, None, None, None]
            seen = torch.arange(self.longest)[None, None, None, :]
            hidden = seen > at
            if window is not None:
                hidden |= seen <= at - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask if bool(hidden.any()) else None
        return self._masks[window]


class View(Protocol):
    """The cache as a model sees it in one forward pass: what our decoder asks of it."""

    @property
    def last(self) -> Any:
        """Index of the rows whose logits are wanted."""

    @property
    def positions(self) -> Tensor:
        """The position of every row, [rows]."""

    def store(self, layer: int, pairs: Tensor) -> None:
        """Store [rows, 2 * heads, dim], keys before values, each row at its own text and position."""

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return [rows, query heads, dim] for queries of the same shape; each sees its own text."""


class BatchView:
    """The cache as the model sees it in one forward pass over rows of many texts.

    First come the chunks of prompts, then one new position for every seat of ``pools``.
    """

    def __init__(self, chunks: Sequence[tuple[Seat, int]], pools: Sequence[Pool]) -> None:
        """Take the seats of prompts with how many positions each reads now, and whole pools that step."""
        self._parts: list[_Chunk | _Group] = []
        for seat, count in chunks:
            self._parts.append(_Chunk(seat, self._rows(), count))
        self.last = [part.end - 1 for part in self._parts]
        """The last row of every text: where its logits are."""
        for pool in pools:
            self._parts.append(_Group(pool, self._rows()))
            self.last.extend(range(self._parts[-1].begin, self._parts[-1].end))

    def _rows(self) -> int:
        return self._parts[-1].end if self._parts else 0

    @property
    def positions(self) -> Tensor:
        """The position of every row, [rows]."""
        return torch.cat([part.positions for part in self._parts])

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: transformers asks for it, but positions are given to the model explicitly."""
        return 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store [1, heads, rows, dim] each, as transformers calls it; attention gets this view."""
        self.store(layer, torch.cat((keys, values), 1)[0].transpose(0, 1))
        return self, layer

    def store(self, layer: int, pairs: Tensor) -> None:
        """Store [rows, 2 * heads, dim], each row at its own text and position."""
        for part in self._parts:
            part.store(layer, pairs[part.begin : part.end])

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return [rows, query heads, dim] for queries of the same shape; each sees its own text."""
        outs = [part.attend(layer, query[part.begin : part.end], scale, window) for part in self._parts]
        return torch.cat(outs) if len(outs) > 1 else outs[0]


def step_pools(seats: list[Seat]) -> list[Pool]:
    """Return the pools of ``seats``, smallest capacity first; together they hold exactly these seats."""
    return sorted({id(seat.pool): seat.pool for seat in seats}.values(), key=lambda pool: pool.capacity)
