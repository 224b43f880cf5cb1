"""Decode graphs: one for each number of slots and span of positions, captured once, replayed for ever.

The order is the point. A module loaded, memory allocated by the driver or a kernel first launched while
a stream is captured ends the capture, or worse, is not noticed. So everything is loaded before, `warm`
runs every step once, and only then does `capture` record, the largest first: what the smaller ones need
is then in the pool already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ralbuild.runtime.cuda.device import Device, Replay
from ralbuild.runtime.cuda.driver import Driver
from ralbuild.runtime.cuda.patch import buckets
from ralbuild.runtime.errors import BindingError, CaptureFailedError

Step = Callable[[int, int], None]
"""Puts a whole decode step on the stream, for so many slots whose texts have at most so many positions."""
_SHORTEST, _GROWTH = 256, 4
_RESTART = "the worker must be restarted: a failed capture keeps memory until the process ends"


def spans(positions: int) -> tuple[int, ...]:
    """Return how many positions graphs look at, ascending: 256, 1024, .. and ``positions``.

    A step costs what its span costs, however short the texts are: the shape is frozen in the graph.
    """
    out, span = [], _SHORTEST
    while span < positions:
        out.append(span)
        span *= _GROWTH
    return (*out, positions)


class Graphs:
    """The captured steps."""

    def __init__(self, device: Device, driver: Driver, max_slots: int, positions: int) -> None:
        self._device = device
        self._driver = driver
        self._buckets = buckets(max_slots)
        self._spans = spans(positions)
        self._replays: dict[tuple[int, int], Replay] = {}
        self._warm = False
        self._failed = False

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Slots and span of every graph, in the order of their captures."""
        return tuple((slots, span) for slots in reversed(self._buckets) for span in reversed(self._spans))

    def warm(self, step: Step) -> None:
        """Run every shape of the step once, eagerly, and wait.

        All slots must be idle: then nothing that matters changes. What torch, cuBLAS and the driver do at
        first use (handles, workspaces, choice of kernels) is behind us when a capture begins.
        """
        self._refuse_failed()
        for slots, span in self.shapes:
            step(slots, span)
        self._driver.synchronize(self._device.stream)
        self._warm = True

    def capture(self, step: Step, progress: Callable[[int, int], None]) -> None:
        """Record every shape.

        Args:
            step: what `warm` ran.
            progress: told how many are done, of how many.

        Raises:
            CaptureFailedError: when one fails. No graph is left, and this process cannot try again: what
                the failed capture held is only freed by its end.
        """
        self._refuse_failed()
        if not self._warm or self._replays:
            raise BindingError("needs a step that is warm, and captures it once", place="capture")
        for number, (slots, span) in enumerate(self.shapes):
            try:
                self._replays[slots, span] = self._device.capture(partial(self._record, step, slots, span))
            except Exception as error:
                self._failed = True
                self._replays.clear()
                message = (
                    f"the decode graph for {slots} slots and {span} positions cannot be captured: {error}"
                )
                raise CaptureFailedError(message, hint=_RESTART) from error
            progress(number + 1, len(self.shapes))

    def replay(self, slots: int, positions: int) -> int:
        """Put a decode step on the stream, for at least ``slots`` slots and ``positions``; return its slots.

        Does not wait. The step reads what the step before it left on the device, so the next one can be put
        there before the results of this one are read.
        """
        self._refuse_failed()
        bucket = next((size for size in self._buckets if size >= slots), 0)
        span = next((size for size in self._spans if size >= positions), 0)
        if slots < 1 or (bucket, span) not in self._replays:
            what = f"needs a graph for {slots} slots and {positions} positions"
            raise BindingError(f"{what}, found {len(self._replays)} graphs for less", place="replay")
        self._replays[bucket, span]()
        return bucket

    def _record(self, step: Step, slots: int, span: int) -> None:
        # A launch that went to another stream would run once, now, and be missing in every step.
        if not self._driver.capturing(self._device.stream):
            raise BindingError("needs a capture of the stream that kernels are launched on", place="graph")
        step(slots, span)
        if not self._driver.capturing(self._device.stream):
            raise BindingError("the step has ended the capture", place="graph")

    def _refuse_failed(self) -> None:
        if self._failed:
            raise CaptureFailedError("a capture failed before", hint=_RESTART)
