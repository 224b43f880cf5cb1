"""Which tokens the rules let come next, for a whole vocabulary at once."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ralbuild.contract.bans import BANNED, BanSlot, BanTable
from ralbuild.contract.vocab import TokenBytes
from ralbuild.runtime.sampler import Mask

_KEPT = 64
"""Masks that are remembered: one takes a byte a token."""


class LegalTokens:
    """Masks of legal tokens by state of the ban automaton. Used by the decode loop's thread alone."""

    def __init__(self, bans: BanTable, vocab: TokenBytes, size: int, eos_ids: tuple[int, ...]) -> None:
        self._classes = bans.classes
        self._cls = np.frombuffer(bans.cls, np.uint8).astype(np.int64)
        self._trans = np.frombuffer(bans.trans, np.uint32)
        offsets = np.frombuffer(vocab.offsets, np.uint32).astype(np.int64)
        self._begin, self._end = offsets[:size], offsets[1 : size + 1].copy()
        self._pool = np.frombuffer(vocab.pool, np.uint8)
        self._eos = np.array([token for token in eos_ids if token < size], np.int64)
        self._end[self._eos] = self._begin[self._eos]
        self._kept: OrderedDict[tuple[int, bool], Mask] = OrderedDict()

    def mask(self, slot: BanSlot) -> Mask:
        """Return by token id whether the token may come next; do not change the array."""
        key = (slot.state, slot.strict)
        found = self._kept.get(key)
        if found is None:
            found = self._walk(slot.state)
            if slot.strict:
                found &= self._begin < self._end
            found[self._eos] = slot.may_end
            self._kept[key] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found

    def _walk(self, state: int) -> Mask:
        """Walk the bytes of all tokens, one column of bytes at a time; what reaches the sink drops out."""
        legal = np.ones(len(self._begin), bool)
        going = np.flatnonzero(self._begin < self._end)
        at = self._begin[going]
        here: NDArray[np.int64] = np.full(len(going), state, np.int64)
        while len(going):
            here = self._trans[here * self._classes + self._cls[self._pool[at]]].astype(np.int64)
            legal[going[here == BANNED]] = False
            at = at + 1
            on = (here != BANNED) & (at < self._end[going])
            going, at, here = going[on], at[on], here[on]
        return legal
