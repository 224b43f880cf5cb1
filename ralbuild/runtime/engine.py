"""The decode loop: one thread that reads prompts, steps every running text and hands out what is decided.

A request waits in a bounded queue, gets a slot and a reservation of cache memory, has its prompt read
in chunks beside the steps of the others, and then steps with them until its text ends.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from ralbuild.runtime.errors import ApiError, DriverError
from ralbuild.runtime.lanes import Graph, Lane, Read
from ralbuild.runtime.log import log_event
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.text import TextStream

ALONE, SHARED = 512, 64
"""Prompt tokens read in one go on a CPU: by a text with nobody beside it, and by all that share a pass.

A pass costs about 8 tokens more than its own (SmolLM2, two AVX2 cores): with 64 a tenth is lost, and of
eight questions that come together the mean first token comes a quarter sooner than with 128."""


class Generation:
    """One request inside the engine. ``sink`` is called from the engine's thread, for every piece."""

    def __init__(self, order: Order, sink: Callable[[Piece], None]) -> None:
        self.order = order
        self.sink = sink
        self.cancelled = False
        self.arrived = time.monotonic()
        self.latest_token = 0.0
        self.lane: Lane | None = None
        rules = order.runtime_rules
        self.stream = TextStream(order.stops, rules.open() if rules is not None else None)


class Engine:
    """Owns the decode graph. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        graph: Graph[Any, Any],
        eos: frozenset[int],
        metrics: Metrics,
        *,
        slots: int,
        queue: int,
        kv_bytes: int,
        reads: tuple[int, int] = (ALONE, SHARED),
    ) -> None:
        """Take a graph.

        Args:
            eos: ids that end a text.
            slots: texts that run or are read at once.
            queue: requests that may wait beside them.
            kv_bytes: what the cache may hold for texts.
            reads: prompt tokens read in one go, by a text with nobody beside it and by all that share a step.
        """
        self._graph = graph
        self._eos = eos
        self._metrics = metrics
        self._slots = slots
        self._queue = queue
        self._kv_bytes = kv_bytes
        self._reads = reads
        self._reserved = 0
        self._waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._wake = threading.Condition()
        self._stopping = False
        self.failure: DriverError | None = None
        """Why the loop has ended by itself: only another process can use the device again."""
        self._thread = threading.Thread(target=self._loop, name="decode", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the present step; what still runs is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most ``seconds``."""
        self._thread.join(seconds)

    @property
    def busy(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._reading) + len(self._running)

    def submit(self, order: Order, sink: Callable[[Piece], None]) -> Generation:
        """Queue a request.

        Raises:
            ApiError: 429 when as many requests wait as may wait.
        """
        generation = Generation(order, sink)
        with self._wake:
            free = self._slots - self._taken()
            if len(self._waiting) >= self._queue + free:
                self._metrics.rejected.labels("queue_full").inc()
                message = f"{len(self._waiting)} requests are waiting already"
                raise ApiError(429, "queue_full", message, retry_after=1)
            self._waiting.append(generation)
            self._observe()
            self._wake.notify()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Stop generating for a request whose client is gone, at the latest after the present step."""
        with self._wake:
            generation.cancelled = True
            self._wake.notify()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self.busy)
                if self._stopping:
                    return
            self._turn()

    def _turn(self) -> None:
        try:
            with self._wake:
                self._drop_cancelled()
                self._admit()
                self._observe()
            if self._taken():
                self._step()
            held = sum(_lane(item).slot.held + item.stream.held for item in self._running)
            self._metrics.held_bytes.set(held)
        except Exception as error:
            log_event("step failed", error=type(error).__name__, trace=traceback.format_exc())
            self._metrics.failures.inc()
            if isinstance(error, DriverError):
                self.failure, self._stopping = error, True
            self._fail_all()

    def _fail_all(self) -> None:
        """End the requests of a failed step; the next ones get a clean cache, if this process can go on."""
        failed = [*self._reading, *self._running]
        with self._wake:
            self._reading.clear()
            self._running.clear()
            self._reserved = 0
            if self.failure is None:
                self._graph.reset()
            self._observe()
        for generation in failed:
            drawn = generation.lane.slot.step if generation.lane is not None else 0
            generation.sink(Piece("", drawn, error="the decode step failed"))

    def _drop_cancelled(self) -> None:
        for generation in [*self._reading, *self._running]:
            if generation.cancelled:
                self._release(generation)
        self._waiting = deque(generation for generation in self._waiting if not generation.cancelled)

    def _admit(self) -> None:
        """Give slots to the first in the queue. Nobody overtakes: a large request is not starved."""
        while self._waiting and self._taken() < self._slots:
            cost = self._cost(self._waiting[0].order)
            if self._reserved + cost > self._kv_bytes and self._taken():
                return
            generation = self._waiting.popleft()
            self._reading.append(generation)
            self._reserved += cost
            order = generation.order
            slot = self._graph.patch.open(order.profile, order.draw, order.prompt, order.max_tokens)
            generation.lane = self._graph.open(slot, order.prompt)
            self._metrics.prompt_tokens.inc(len(order.prompt))

    def _step(self) -> None:
        """Run the model once, over the next tokens of waiting prompts and one of every running text."""
        begin = time.monotonic()
        running = list(self._running)
        reads = self._next_reads()
        lanes = [_lane(generation) for generation in running]
        drawn = self._graph.advance([read for _, read in reads], lanes)
        for generation, read in reads:
            if read.last:
                self._reading.remove(generation)
                self._running.append(generation)
        owners = {id(_lane(generation)): generation for generation in self._running}
        delivered = [owners[id(lane)] for lane in drawn]
        self._clock(delivered)
        for generation in delivered:
            self._deliver(generation)
        if running:
            self._metrics.step.observe(time.monotonic() - begin)

    def _clock(self, delivered: list[Generation]) -> None:
        """Note when tokens came: the first of a text since it arrived, the others since the one before."""
        now = time.monotonic()
        for generation in delivered:
            if generation.latest_token:
                self._metrics.between_tokens.observe(now - generation.latest_token)
            else:
                self._metrics.first_token.observe(now - generation.arrived)
            generation.latest_token = now

    def _next_reads(self) -> list[tuple[Generation, Read[Any]]]:
        """Return what is read of the prompts now.

        The one that waits longest gets half of the budget, or more when there is no use for it; the shortest
        of the others comes next, then more that fit whole: part of a prompt answers nobody. So a short prompt
        does not wait for a long one, and none is starved.
        """
        if not self._reading:
            return []
        left = {generation: _unread(generation) for generation in self._reading}
        first, *others = self._reading
        alone, shared = self._reads
        budget = shared if self._running or others else alone
        shares = {first: min(left[first], budget if not others else budget // 2)}
        for generation in sorted(others, key=left.__getitem__):
            room = budget - sum(shares.values())
            if left[generation] > room and len(shares) > 1:
                break
            shares[generation] = min(left[generation], room)
        shares[first] += min(left[first] - shares[first], budget - sum(shares.values()))
        reads = []
        for generation, share in shares.items():
            lane, prompt = _lane(generation), generation.order.prompt
            tokens = prompt[lane.seat.length : lane.seat.length + share]
            reads.append((generation, Read(lane, tokens, last=share == left[generation])))
        return reads

    def _deliver(self, generation: Generation) -> None:
        """Hand out what the last step decided, and end the text when it has ended."""
        slot, stream, patch = _lane(generation).slot, generation.stream, self._graph.patch
        self._metrics.generated_tokens.inc()
        self._metrics.count_rules(slot)
        text = stream.push(slot.output)
        finish = ""
        if slot.token in self._eos or stream.stopped or slot.stopped:
            finish = "stop"
        elif slot.step >= slot.limit:
            finish = "length"
        ended = slot.token in self._eos
        logprobs = (slot.logprob,) if slot.logprob is not None and not ended else ()
        if not finish:
            if text or logprobs:
                generation.sink(Piece(text, slot.step, logprobs=logprobs))
            return
        text += stream.end(*patch.finish(slot, cut=stream.stopped))
        self._metrics.count_rules(slot)
        self._end(generation, Piece(text, slot.step, finish=finish, logprobs=logprobs))

    def _end(self, generation: Generation, piece: Piece) -> None:
        with self._wake:
            self._release(generation)
            self._observe()
        generation.sink(piece)

    def _release(self, generation: Generation) -> None:
        group = self._running if generation in self._running else self._reading
        group.remove(generation)
        self._graph.close(_lane(generation))
        self._reserved -= self._cost(generation.order)
        generation.lane = None

    def _taken(self) -> int:
        return len(self._reading) + len(self._running)

    def _cost(self, order: Order) -> int:
        return self._graph.cache.cost(len(order.prompt) + order.max_tokens)

    def _observe(self) -> None:
        self._metrics.waiting.set(len(self._waiting))
        self._metrics.running.set(self._taken())
        self._metrics.kv_bytes.set(self._graph.cache.held_bytes())


def _lane(generation: Generation) -> Lane:
    lane = generation.lane
    assert lane is not None  # set when it was admitted
    return lane


def _unread(generation: Generation) -> int:
    return len(generation.order.prompt) - _lane(generation).seat.length
