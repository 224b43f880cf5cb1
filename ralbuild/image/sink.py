"""What every place that an image is written to can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ralbuild.image.assemble import Layer


@dataclass(frozen=True, slots=True)
class SinkResult:
    """What a sink did.

    Attributes:
        written: bytes of blobs that it wrote or sent.
        reused: hex digests of the layers it found there already.
        name: how others can name the image there, with its digest; may be empty.
    """

    written: int
    reused: frozenset[str]
    name: str = ""


class Sink(Protocol):
    """An output that is open: it has checked that there is room, and nobody else writes to it.

    Whoever opened it leaves it with an exception to give up; nothing half-written stays.
    """

    def add(self, layer: Layer) -> None:
        """Take the next of the image's unique layers, or begin to."""

    def finish(self) -> SinkResult:
        """Complete the image: from now on it is there."""
