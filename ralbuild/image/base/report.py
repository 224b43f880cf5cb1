"""What the base builder and the local runner tell while they work; the command line decides how it looks."""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """A listener. Its methods return at once and never raise."""

    def step(self, text: str) -> None:
        """Say what begins now, in a few words without a full stop."""

    def note(self, text: str) -> None:
        """Say something that the reader should know afterwards."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the current step is: ``done`` of ``total``, in ``unit`` (``B``, ``files``)."""
