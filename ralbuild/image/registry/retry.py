"""When to try again, and after how long."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ralbuild.errors import ImageError

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be another one next time."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A bounded number of attempts with growing pauses.

    Attributes:
        attempts: in all, the first included.
        first: seconds before the second attempt; doubled with each further one.
        longest: no pause of ours is longer; a registry that asks for more is not waited for either.
        jitter: a number from 0 to 1: each pause is between half of itself and itself, so that many
            uploads that failed together do not come back together.
        clock: seconds since 1970, to understand a ``Retry-After`` that names a date.
    """

    attempts: int = 5
    first: float = 1.0
    longest: float = 120.0
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.time

    def seconds(self, attempt: int, why: str, place: str, headers: Mapping[str, str] | None = None) -> float:
        """Return how long to wait before the attempt after number ``attempt``, counted from 1.

        Args:
            attempt: that just failed.
            why: how, for the message.
            place: which registry or blob.
            headers: of the answer, in lower case: ``Retry-After`` is obeyed.

        Raises:
            ImageError: when that was the last attempt, or the registry asks for too much patience.
        """
        asked = self._asked(headers or {})
        if asked is not None and asked > self.longest:
            raise ImageError(f"{why}; it asks to come back in {asked:.0f} seconds", place=place)
        if attempt >= self.attempts:
            raise ImageError(f"{why}; gave up after {attempt} attempts", place=place)
        own = min(self.longest, self.first * 2 ** (attempt - 1)) * (0.5 + self.jitter() / 2)
        return own if asked is None else asked

    def _asked(self, headers: Mapping[str, str]) -> float | None:
        text = headers.get("retry-after", "").strip()
        if text.isascii() and text.isdecimal():
            return float(text[:9])
        try:
            date = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
        return max(0.0, date.timestamp() - self.clock())
