"""Keeps one worker: starts it, follows its start, replaces it when it dies, ends it to release memory.

The supervisor's process owns the port and every client's connection, so that a worker may end at any
time: its requests get an error in OpenAI's shape, and the next ones wait or are told when to come back.
Everything here runs on the event loop of that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ralbuild.runtime import errors
from ralbuild.runtime.errors import ApiError, StartError, WorkerLostError
from ralbuild.runtime.exposition import ServerMetrics
from ralbuild.runtime.lifecycle import RESTARTING, UNLOADED, Lifecycle
from ralbuild.runtime.log import log_event
from ralbuild.runtime.memory import own_resident
from ralbuild.runtime.tickets import Ticket
from ralbuild.runtime.wire import Frames, Message, pack
from ralbuild.runtime.workers import Deaths, WorkerProcess, reap_orphans

if TYPE_CHECKING:  # ctypes comes with the first, the contract with the second; few servers have either
    from ralbuild.runtime.gpu_memory import GpuMemory
    from ralbuild.runtime.rule_file import RuleFile

MAX_PENDING = 64
"""Requests in preparation, or waiting for the model to wake; a body has up to 4 MiB."""
_REAP_SECONDS = 5.0
_READ = 1 << 18
_SERIES_SECONDS = 1.0
_LOST = ApiError(503, "worker_lost", "the process that ran this request has ended; try again", retry_after=1)


class Supervisor:
    """The one worker of a service, or its absence."""

    def __init__(
        self,
        worker: WorkerProcess,
        lifecycle: Lifecycle,
        metrics: ServerMetrics,
        idle_unload: int | None,
        rule_file: RuleFile | None = None,
    ) -> None:
        self.rule_file = rule_file
        """What every worker is told to apply after the image's rules; None for nothing."""
        self.info: dict[str, Any] = {}
        """What the worker said about itself when it was first ready; empty before."""
        self._worker: WorkerProcess | None = worker
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._idle_setting = idle_unload
        self._idle_unload = 0
        self._writer: asyncio.StreamWriter | None = None
        """Set while a worker is ready."""
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._series: asyncio.Future[None] | None = None
        self._unloading = False
        self._asked_to_wake = 0.0
        self._released = 0
        self._last_used = time.monotonic()
        self._last_ready = 0.0
        self._deaths = Deaths()
        self._baseline = 0
        self._gpu: GpuMemory | None = None
        """The device of the workers, once one has said which."""
        self._gpu_now: Mapping[str, int] = {}
        self._gpu_reading: asyncio.Future[Mapping[str, int]] | None = None
        self._gpu_released = self._gpu_rest = 0
        """Bytes that the last unload released, and those in use on the device after it."""
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Follow the worker from now on; call once, on the running loop."""
        self._baseline = own_resident()
        self._lifecycle.enter("check")
        self._tasks = [asyncio.ensure_future(self._keep())]
        if self.rule_file is not None:
            self._tasks.append(asyncio.ensure_future(self.rule_file.watch(self._tell_rules)))
        if os.getpid() == 1:
            self._tasks.append(asyncio.ensure_future(self._reap()))

    def close(self) -> None:
        """End the worker for good; requests that still run get an error first (`abandon`)."""
        for task in self._tasks:
            task.cancel()
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    # -- requests

    def require_room(self) -> None:
        """Raise the ApiError of a request that cannot be taken now: 503, or 429 when too many wait."""
        self._lifecycle.require_ready()
        waiting = self.pending
        if waiting >= MAX_PENDING:
            message = f"{waiting} requests are being prepared already"
            raise ApiError(429, "queue_full", message, retry_after=1)

    @property
    def pending(self) -> int:
        """Requests that the worker has neither accepted nor refused."""
        return sum(ticket.pending for ticket in self._tickets.values())

    def ask(self, fields: Mapping[str, Any], body: bytes) -> Ticket:
        """Hand a request to the worker, or hold it until one is ready; raises as `require_room` does."""
        self.require_room()
        number = next(self._numbers)
        ticket = Ticket(number, {"do": "ask", "job": number, **fields}, body)
        self._tickets[number] = ticket
        if self._writer is not None and not self._unloading:
            self._writer.write(ticket.frame)
            ticket.frame = b""
        else:
            self._want()
        return ticket

    def drop(self, ticket: Ticket, *, ended: bool) -> None:
        """Forget a request; one that has not ended is cancelled within a step."""
        if self._tickets.pop(ticket.number, None) is None:
            return
        self._last_used = time.monotonic()
        self._changed.set()
        if self._writer is not None and not ticket.frame and not ended:
            self._writer.write(pack({"do": "cancel", "job": ticket.number}))

    def abandon(self, error: ApiError) -> None:
        """Fail every request that is open."""
        for ticket in list(self._tickets.values()):
            ticket.fail(error)
            self.drop(ticket, ended=False)

    # -- memory

    async def unload(self) -> int:
        """End the worker once nothing runs in it; return the bytes that this released, a GPU's among them.

        Requests that come meanwhile wait, and wake the next worker.

        Raises:
            ApiError: 503 while a worker starts.
        """
        if self._lifecycle.stage == UNLOADED:
            return self._released + self._gpu_released
        if self._writer is None or self._unloading:
            message = f"the model is in stage {self._lifecycle.stage}"
            raise ApiError(503, "model_loading", message, retry_after=2)
        self._unloading = self._lifecycle.wakeable = True
        self._changed.set()
        while self._unloading:  # `_watch_idle` ends the worker once nothing runs, then `_keep` rests
            await self._change()
        return self._released + self._gpu_released

    async def load(self) -> None:
        """Wake the worker and wait until it is ready; raises ApiError 503 when it does not get there."""
        if self._writer is None or self._unloading:
            self._want()
        while self._writer is None or self._unloading:
            if self._lifecycle.failure is not None or self._lifecycle.stage == RESTARTING:
                raise _LOST
            await self._change()

    def measure(self) -> None:
        """Set the gauges of memory and of what was released and is not in use again."""
        found = (
            self._worker.resident() if self._worker is not None else {"anonymous": 0, "file": 0, "shared": 0}
        )
        for kind, size in found.items():
            self._metrics.memory.labels(f"worker_{kind}").set(size)
        self._metrics.memory.labels("supervisor").set(own_resident())
        self._metrics.memory.labels("supervisor_baseline").set(self._baseline)
        zeroed = 0
        if self._writer is None:
            taken = max(self._gpu_now.get("used", 0) - self._gpu_rest, 0)
            zeroed = max(self._released - sum(found.values()), 0) + max(self._gpu_released - taken, 0)
        self._metrics.zeroed.set(zeroed)
        self._metrics.held.set(self.pending)
        self._metrics.loaded.set(self._writer is not None)
        self._metrics.ready.set(self._lifecycle.ready)

    async def refresh(self) -> None:
        """Fetch the worker's series; keeps the last ones when it does not answer in time."""
        await self._measure_gpu()
        self.measure()
        if self._writer is None:
            return
        if self._series is None or self._series.done():
            self._series = asyncio.get_running_loop().create_future()
            self._writer.write(pack({"do": "series"}))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._series), _SERIES_SECONDS)

    async def _measure_gpu(self) -> Mapping[str, int]:
        """Set the gauges of the device's memory; there are none while its driver does not answer."""
        if self._gpu is None:
            return {}
        if self._gpu_reading is None or self._gpu_reading.done():
            process = self._worker.pid if self._worker is not None else None
            self._gpu_reading = _in_daemon(partial(self._gpu.read, process))
        try:
            found = await asyncio.wait_for(asyncio.shield(self._gpu_reading), _SERIES_SECONDS)
        except TimeoutError:
            found = {}
        self._gpu_now = found
        self._metrics.gpu_memory.clear()
        for kind, size in found.items():
            self._metrics.gpu_memory.labels(self._gpu.uuid, kind).set(size)
        return found

    async def _compare_gpu(self) -> None:
        """Note what the end of a worker released on its device."""
        if self._gpu is None:
            return
        loaded = self._gpu_now.get("used", -1)
        now = (await self._measure_gpu()).get("used", -1)
        self._gpu_rest = max(now, 0)
        self._gpu_released = max(loaded - now, 0) if now >= 0 else 0
        log_event("gpu released", device=self._gpu.uuid, before=self._gpu.before, loaded=loaded, now=now)

    # -- the worker's life

    async def _keep(self) -> None:
        try:
            while True:
                assert self._worker is not None
                status = await self._attend(self._worker)
                self._worker = None
                if self._lifecycle.failure is not None:
                    return
                if self._unloading:
                    await self._rest()
                else:
                    await self._recover(status)
                self._lifecycle.restart()
                self._worker = WorkerProcess()
        except StartError as error:
            self._lifecycle.failure = error
        except OSError as error:
            self._lifecycle.failure = WorkerLostError(f"cannot be started: {error}", place="worker")
        except Exception as error:
            # A bug. Without a keeper nothing would ever be served again: end with the trace instead.
            log_event("supervisor failed", trace=traceback.format_exc())
            self._lifecycle.failure = StartError(f"{type(error).__name__}: {error}")
        finally:
            self.abandon(_LOST)
            self._changed.set()

    async def _reap(self) -> None:
        """Process 1 of a container inherits what a worker leaves behind: its template processes."""
        while True:
            await asyncio.sleep(_REAP_SECONDS)
            reap_orphans(self._worker)

    async def _attend(self, worker: WorkerProcess) -> int:
        """Read what one worker says until it ends; return its exit status."""
        reader, writer = await asyncio.open_unix_connection(sock=worker.connection)
        frames = Frames()
        watch = asyncio.ensure_future(self._watch_idle(worker, writer))
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_READ):
                    for message, _ in frames.feed(data):
                        self._hear(message, writer)
        finally:
            watch.cancel()
            self._writer = None
            writer.close()
        self._metrics.worker.retire()
        return await asyncio.to_thread(worker.wait, 5.0)

    async def _watch_idle(self, worker: WorkerProcess, writer: asyncio.StreamWriter) -> None:
        """End the worker when an unload was asked for, or after the idle time, as soon as nothing runs."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change(), 1.0)
            idle = not self._tickets and time.monotonic() - self._last_used >= self._idle_unload
            if self._writer is not None and self._idle_unload and idle:
                self._unloading = self._lifecycle.wakeable = True
            running = any(not ticket.frame for ticket in self._tickets.values())
            if self._unloading and self._writer is not None and not running:
                await self.refresh()
                self._writer = None
                self._released = sum(worker.resident().values())
                writer.close()  # the worker ends itself when its line ends
                return

    async def _rest(self) -> None:
        """The worker was ended on purpose: wait until somebody needs it."""
        await self._compare_gpu()
        self._lifecycle.move(UNLOADED, 0)
        self._unloading = False
        self._metrics.unloads.inc()
        log_event("unloaded", released=self._released, resident=own_resident(), baseline=self._baseline)
        self._changed.set()
        await self._wanted.wait()
        log_event("waking")

    async def _recover(self, status: int) -> None:
        """The worker died: fail its requests and wait before the next.

        Raises:
            StartError: when it cannot work, or died too often.
        """
        served = self._lifecycle.stage == "ready"
        self._lifecycle.wakeable = False
        how = f"signal {-status}" if status < 0 else f"status {status}"
        log_event("worker died", how=how, stage=self._lifecycle.stage, in_flight=len(self._tickets))
        if status >= 0 and not served and status not in errors.PASSING:
            raise StartError(f"the worker ended with {how} while it started; its trace is above")
        self._lifecycle.move(RESTARTING, 0)
        self.abandon(_LOST)
        lived = time.monotonic() - self._last_ready if served else 0.0
        await asyncio.sleep(self._deaths.pause(lived, how))
        self._metrics.restarts.inc()

    def _hear(self, message: Message, writer: asyncio.StreamWriter) -> None:
        match message["say"]:
            case "piece" | "accepted" | "error":
                ticket = self._tickets.get(message["job"])
                if ticket is not None:  # else its client is gone
                    ticket.pending = False
                    ticket.put(message)
            case "series":
                self._metrics.worker.update(message["series"])
                if self._series is not None and not self._series.done():
                    self._series.set_result(None)
            case "stage":
                if message["stage"] != self._lifecycle.stage:
                    self._lifecycle.enter(message["stage"])
                self._lifecycle.move(message["stage"], message["percent"])
            case "device":
                from ralbuild.runtime.gpu_memory import GpuMemory

                if self._gpu is None or self._gpu.uuid != message["uuid"]:
                    self._gpu = GpuMemory(message["uuid"], message["used"])
            case "refused":
                kind: type[StartError] = getattr(errors, message["error"])
                self._lifecycle.failure = kind(
                    message["message"], place=message["place"], hint=message["hint"]
                )
            case "ready":
                self._open(message, writer)

    def _open(self, message: Message, writer: asyncio.StreamWriter) -> None:
        """The worker is ready: send what waits."""
        self.info = message["info"]
        self._idle_unload = message["idle_unload"] if self._idle_setting is None else self._idle_setting
        self._writer = writer
        self._last_used = self._last_ready = time.monotonic()
        self._wanted.clear()
        woken = self._lifecycle.wakeable
        self._lifecycle.enter("ready")
        self._lifecycle.wakeable = False
        if woken:
            self._metrics.wake.observe(time.monotonic() - self._asked_to_wake)
        for stage, seconds in self._lifecycle.seconds.items():
            self._metrics.start_seconds.labels(stage).set(seconds)
        stages = {stage.replace("-", "_"): seconds for stage, seconds in self._lifecycle.seconds.items()}
        log_event("ready", **stages)
        self._tell_rules()  # before the first request
        for ticket in self._tickets.values():
            writer.write(ticket.frame)
            ticket.frame = b""
        self._changed.set()

    def _tell_rules(self) -> None:
        """Say what is in force from now on; a worker that still loads hears it when it is ready."""
        if self.rule_file is not None and self._writer is not None:
            self._writer.write(pack({"do": "rules"}, self.rule_file.current.payload))

    def _want(self) -> None:
        if not self._wanted.is_set():
            self._asked_to_wake = time.monotonic()
            self._wanted.set()

    async def _change(self) -> None:
        """Wait until something changed that somebody may wait for."""
        self._changed.clear()
        await self._changed.wait()


def _in_daemon(work: Callable[[], Mapping[str, int]]) -> asyncio.Future[Mapping[str, int]]:
    """Run ``work`` in a thread that the process's end does not wait for: a driver may hang."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Mapping[str, int]] = loop.create_future()

    def run() -> None:
        found = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(future.set_result, found)

    threading.Thread(target=run, name="nvml", daemon=True).start()
    return future
