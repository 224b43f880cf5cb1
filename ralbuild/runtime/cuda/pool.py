"""Device memory of the patch: one allocation, made before any capture and shared by all graphs.

It has the sizes of the largest bucket. A smaller bucket uses the first rows of the same buffers, so
addresses that were captured stay true, and nothing is allocated while a step is recorded or run.
"""

from __future__ import annotations

from collections.abc import Mapping

from ralbuild.runtime.cuda.driver import Driver, Stream
from ralbuild.runtime.errors import BindingError

ALIGNMENT = 256
"""Bytes: what cuMemAlloc promises for a whole allocation, kept for each buffer."""


class Pool:
    """Named buffers in one piece of device memory."""

    def __init__(self, driver: Driver, sizes: Mapping[str, int]) -> None:
        """Allocate; contents are undefined.

        Args:
            sizes: bytes by name; an empty buffer still gets an address of its own.
        """
        self._driver = driver
        self._sizes = dict(sizes)
        places: dict[str, int] = {}
        self.size = 0
        for name, size in self._sizes.items():
            places[name] = self.size
            self.size += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        base = driver.allocate(max(self.size, 1))
        self.addresses: dict[str, int] = {name: base + place for name, place in places.items()}

    def write(self, name: str, data: bytes, stream: Stream) -> None:
        """Fill the beginning of a buffer, after what is on ``stream``."""
        if len(data) > self._sizes[name]:
            raise BindingError(f"holds {self._sizes[name]} bytes, found {len(data)}", place=name)
        self._driver.write(self.addresses[name], data, stream)

    def read(self, name: str, stream: Stream) -> bytes:
        """Return a whole buffer, once all that is on ``stream`` is done."""
        return self._driver.read(self.addresses[name], self._sizes[name], stream)
