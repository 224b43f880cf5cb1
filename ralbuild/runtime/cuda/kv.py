"""Keys and values of all slots: memory that is taken once, and rows that never move.

Captured graphs hold addresses. So each slot has a row of its own for as many positions as a text may
have, and one more, the last, that steps of idle slots write to.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ralbuild.contract.decoder_spec import row_positions
from ralbuild.runtime.model.cache import KvShape, Pool, Seat, blank_layers, copy_seat


class FixedPool(Pool):
    """``rows`` rows; a seat takes the lowest that is free, so small graphs see all that runs."""

    def __init__(self, shape: KvShape, positions: int, rows: int) -> None:
        """Take the memory for ``rows`` texts of ``positions``."""
        super().__init__(shape, row_positions(positions))
        self.layers = blank_layers(shape, (rows, 2 * shape.heads, self.capacity, shape.dim))
        self.forget()

    @property
    def trash(self) -> int:
        """The position that no text has."""
        return self.capacity - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.capacity * self.shape.position_bytes

    def forget(self) -> None:
        """Free every row."""
        self._free = list(range(self.rows))
        self.seats = []

    def append(self, seat: Seat) -> int:
        """Give ``seat`` a row."""
        self.seats.append(seat)
        return heapq.heappop(self._free)

    def remove(self, row: int) -> None:
        """Free a row."""
        self.seats = [seat for seat in self.seats if seat.row != row]
        heapq.heappush(self._free, row)

    def clear(self, row: int) -> None:
        """Make a row zero: a masked position counts 0 times what it holds, and 0 times a NaN is NaN."""
        for layer in self.layers:
            layer[row].zero_()


class FixedCache:
    """The pool as the decode loop sees it."""

    def __init__(self, shape: KvShape, positions: int, rows: int) -> None:
        self.max_positions = positions
        self.pool = FixedPool(shape, positions, rows)

    def seat(self, like: Seat | None) -> Seat:
        """Return a seat whose row is empty, or begins as ``like``."""
        seat = Seat(self.pool)
        self.pool.clear(seat.row)
        if like is not None:
            copy_seat(like, seat)
        return seat

    def cost(self, positions: int) -> int:  # noqa: ARG002 - every text takes a whole row
        """Return the bytes that a text takes: a row, however short it is."""
        return self.pool.row_bytes

    def held_bytes(self) -> int:
        """Return the bytes of the rows that are taken."""
        return len(self.pool.seats) * self.pool.row_bytes


class StepView:
    """The cache as the model sees it in a decode step: one new position for each of the first rows.

    Everything that changes from step to step is read from ``positions`` on the device, so the same
    operations are right for every step, and can be captured.
    """

    last = slice(None)

    def __init__(self, pool: FixedPool, positions: Tensor, span: int) -> None:
        """Take the positions of the first rows, [rows]; no text in them has more than ``span``."""
        shape, rows = pool.shape, len(positions)
        self.positions = positions
        self._pool = pool
        self._seen = torch.arange(span, device=shape.place)
        heads = torch.arange(rows * 2 * shape.heads, device=shape.place).view(rows, -1)
        self._places = (heads * pool.capacity + positions[:, None]).view(-1)
        self._masks: dict[int | None, Tensor] = {}

    def store(self, layer: int, pairs: Tensor) -> None:
        """Store [rows, 2 * heads, dim], each row at its position."""
        dim = self._pool.shape.dim
        self._pool.layers[layer].view(-1, dim).index_copy_(0, self._places, pairs.reshape(-1, dim))

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return [rows, query heads, dim] for queries of the same shape; each sees its own text."""
        shape, rows = self._pool.shape, len(query)
        seen = self._pool.layers[layer][:rows, :, : len(self._seen)]
        out = scaled_dot_product_attention(
            # All query heads of one key/value head see the same keys: they stand in for query positions.
            query.reshape(rows, shape.heads, -1, shape.dim),
            seen[:, : shape.heads],
            seen[:, shape.heads :],
            attn_mask=self._mask(window, query),
            scale=scale,
        )
        return out.reshape(rows, -1, shape.dim)

    def _mask(self, window: int | None, query: Tensor) -> Tensor:
        """Return [rows, heads, queries, span], minus infinity where a row may not look; made once a step."""
        if window not in self._masks:
            at = self.positions[:, None, None, None]
            hidden = self._seen > at
            if window is not None:
                hidden |= self._seen <= at - window
            mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
            heads = self._pool.shape.heads
            self._masks[window] = mask.masked_fill_(hidden, -torch.inf).expand(
                -1, heads, query.shape[1] // heads, -1
            )
        return self._masks[window]
