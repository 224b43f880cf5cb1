"""Where the service is between start and end: what `/ready` says and what a drain changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ralbuild.runtime.errors import ApiError, StartError

STAGES = {"check": 0, "import": 5, "load": 60, "capture": 80, "self-test": 90, "ready": 100}
"""Stage to percent done when it begins; the weights follow a measured start on two cores. `capture` is a
GPU's alone."""
UNLOADED, RESTARTING = "unloaded", "restarting"
"""Stages without a worker: it was ended on purpose, or it died."""


class Lifecycle:
    """One in the worker, which walks through `STAGES`, and one in the supervisor, which follows it.

    Every attribute is written by one thread and read by others as a whole, so no lock is needed.

    Attributes:
        wakeable: True from an unload until the model is ready again: requests wait for it instead of
            being refused, so the service counts as ready.
    """

    def __init__(self, tell: Callable[[str, int], None] | None = None) -> None:
        self.stage = "check"
        self.percent = 0
        self.wakeable = False
        self.draining = False
        self.failure: StartError | None = None
        self.seconds: dict[str, float] = {}
        """Seconds from construction, or from `restart`, until each stage began."""
        self._tell = tell
        self._begin = time.monotonic()

    @property
    def ready(self) -> bool:
        """True while requests are served, at once or after a wake."""
        return (self.stage == "ready" or self.wakeable) and not self.draining

    def enter(self, stage: str) -> None:
        """Begin a stage of `STAGES`."""
        self.seconds[stage] = time.monotonic() - self._begin
        self.move(stage, STAGES[stage])

    def move(self, stage: str, percent: int) -> None:
        """Set stage and percentage, and tell whoever follows."""
        if self._tell is not None and (stage, percent) != (self.stage, self.percent):
            self._tell(stage, percent)
        self.percent = percent
        self.stage = stage

    def restart(self) -> None:
        """Begin again: a new worker starts."""
        self.seconds = {}
        self._begin = time.monotonic()
        self.enter("check")

    def progress(self, done: int, total: int) -> None:
        """Move the percentage within the present stage."""
        following = [percent for percent in STAGES.values() if percent > STAGES[self.stage]]
        span = min(following, default=100) - STAGES[self.stage]
        self.move(self.stage, STAGES[self.stage] + span * done // max(total, 1))

    def report(self) -> dict[str, Any]:
        """Return the body of `/ready`."""
        stage = "draining" if self.draining else self.stage
        return {"stage": stage, "percent": self.percent} | ({"wakeable": True} if self.wakeable else {})

    def require_ready(self) -> None:
        """Raise the ApiError (503) that a request gets while starting, restarting or draining."""
        if self.draining:
            raise ApiError(503, "draining", "this server is shutting down", retry_after=1)
        if not self.ready:
            message = f"the model is loading: {self.stage}, {self.percent} percent"
            raise ApiError(503, "model_loading", message, retry_after=2)
