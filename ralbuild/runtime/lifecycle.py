"""Where the process is between start and end: what `/ready` says and what a drain changes."""

from __future__ import annotations

import time
from typing import Any

from ralbuild.runtime.errors import ApiError, StartError

STAGES = {"check": 0, "import": 5, "load": 60, "self-test": 90, "ready": 100}
"""Stage to percent done when it begins; the weights follow a measured start on two cores."""


class Lifecycle:
    """Shared by the boot thread, the server and the signal handler.

    Every attribute is written by one thread and read by others as a whole, so no lock is needed.
    """

    def __init__(self) -> None:
        self.stage = "check"
        self.percent = 0
        self.draining = False
        self.failure: StartError | None = None
        self.seconds: dict[str, float] = {}
        """Seconds from construction until each stage began."""
        self._begin = time.monotonic()

    @property
    def ready(self) -> bool:
        """True while requests are served."""
        return self.stage == "ready" and not self.draining

    def enter(self, stage: str) -> None:
        """Begin a stage of `STAGES`."""
        self.seconds[stage] = time.monotonic() - self._begin
        self.percent = STAGES[stage]
        self.stage = stage

    def progress(self, done: int, total: int) -> None:
        """Move the percentage within the present stage."""
        following = [percent for percent in STAGES.values() if percent > STAGES[self.stage]]
        span = min(following, default=100) - STAGES[self.stage]
        self.percent = STAGES[self.stage] + span * done // max(total, 1)

    def report(self) -> dict[str, Any]:
        """Return the body of `/ready`."""
        return {"stage": "draining" if self.draining else self.stage, "percent": self.percent}

    def require_ready(self) -> None:
        """Raise the ApiError (503) that a request gets while loading or draining."""
        if self.draining:
            raise ApiError(503, "draining", "this server is shutting down", retry_after=1)
        if self.stage != "ready":
            message = f"the model is loading: {self.stage}, {self.percent} percent"
            raise ApiError(503, "model_loading", message, retry_after=2)
