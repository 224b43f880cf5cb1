"""``python -m ralbuild.runtime.worker FD``: the process that owns the model; `supervisor` starts and ends it.

It prepares prompts in a few threads, decodes in another, and talks over one inherited socket. When
that socket ends, so does the process: there is nothing to save.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ralbuild import __version__
from ralbuild.runtime.errors import ApiError, StartError
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.log import log_event, use_json
from ralbuild.runtime.orders import Piece
from ralbuild.runtime.settings import PREPARE_THREADS, Settings, read_settings
from ralbuild.runtime.wire import Frames, Message, pack, pack_error, pack_piece

if TYPE_CHECKING:  # torch comes with it
    from ralbuild.runtime.engine import Generation
    from ralbuild.runtime.runtime_rules import RuleSet
    from ralbuild.runtime.service import Service

Say = Callable[[Message], None]
_READ = 1 << 18
_LOOK_SECONDS = 0.5
"""How often the main thread looks whether the decode loop lives."""


class _Job:
    """One request in this process. The lock orders `accepted` before the first piece."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()
        self.cancelled = False
        self.preparing: Future[None] | None = None
        self.generations: list[Generation] = []
        self.open = 0
        """Choices whose text has not ended."""


class Desk:
    """Does what the supervisor asks with one service; `handle` is called by one thread."""

    def __init__(self, service: Service, say: Say) -> None:
        # More threads would only delay the decode loop: they share one interpreter.
        self._threads = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="rules")
        self._rules: Future[RuleSet] | None = None
        """Rules of the serving side for what is asked from now on; they may still be built."""
        self._service = service
        self._say = say
        self._jobs: dict[int, _Job] = {}

    def handle(self, message: Message, body: bytes) -> None:
        """Begin one piece of work; answers are said later, by other threads."""
        match message["do"]:
            case "ask":
                job = self._jobs[message["job"]] = _Job(message["job"])
                job.preparing = self._threads.submit(self._prepare, job, message, body, self._rules)
            case "cancel":
                self._cancel(message["job"])
            case "series":
                self._say({"say": "series", "series": self._service.metrics.series()})
            case "rules":
                # What is asked after this waits for these rules; everything else goes on.
                self._rules = self._builder.submit(self._service.build_rules, body)

    def _cancel(self, number: int) -> None:
        job = self._jobs.pop(number, None)
        if job is None:  # it ended while the message was on its way
            return
        self._service.metrics.cancelled.inc()
        with job.lock:
            job.cancelled = True
            for generation in job.generations:
                self._service.engine.cancel(generation)
        if job.preparing is not None:
            job.preparing.cancel()

    def _prepare(self, job: _Job, message: Message, body: bytes, rules: Future[RuleSet] | None) -> None:
        try:
            # Waiting here holds up only what was asked later, and that would wait for the same rules.
            self._begin(job, message, body, rules.result() if rules is not None else None)
        except ApiError as error:
            self._refuse(job, error)
        except Exception as error:
            trace = traceback.format_exc()
            log_event("request failed", id=message["id"], error=type(error).__name__, trace=trace)
            reason = "the server failed to answer; its log has the reason"
            self._refuse(job, ApiError(500, "internal_error", reason))

    def _begin(self, job: _Job, message: Message, body: bytes, rules: RuleSet | None) -> None:
        accepted, orders = self._service.accept(message, body, rules)
        with job.lock:
            if job.cancelled:
                return
            try:
                for choice, order in enumerate(orders):
                    job.generations.append(self._service.submit(order, self._sink(job, choice)))
                    job.open += 1
            except ApiError:
                for generation in job.generations:
                    self._service.engine.cancel(generation)
                job.cancelled = True  # the first choices may have spoken already
                raise
            self._say({"say": "accepted", "job": job.number, **accepted})

    def _sink(self, job: _Job, choice: int) -> Callable[[Piece], None]:
        def put(piece: Piece) -> None:
            with job.lock:
                if job.cancelled:
                    return
                if piece.finish or piece.error:
                    job.open -= 1
                    if not job.open:
                        self._jobs.pop(job.number, None)
                        job.generations.clear()  # they know this job: no work for the collector
                said = pack_piece(piece)
                self._say({"say": "piece", "job": job.number, "choice": choice, "piece": said})

        return put

    def _refuse(self, job: _Job, error: ApiError) -> None:
        self._jobs.pop(job.number, None)
        self._say({"say": "error", "job": job.number, "error": pack_error(error)})


class _Line:
    """The socket to the supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.desk: Desk | None = None
        """Set before the supervisor hears that this worker is ready; it asks nothing earlier."""

    def say(self, message: Message) -> None:
        """Send one message; any thread may. The supervisor always reads, so this does not block for long."""
        frame = pack(message)
        with self._lock:
            self._connection.sendall(frame)

    def listen(self) -> None:
        """Hand messages to the desk until the supervisor is gone or says so; then end the process."""
        frames = Frames()
        try:
            while data := self._connection.recv(_READ):
                for message, body in frames.feed(data):
                    assert self.desk is not None
                    self.desk.handle(message, body)
        except OSError:  # the supervisor was killed
            pass
        except Exception:
            log_event("worker failed", trace=traceback.format_exc())
        finally:
            os._exit(0)


def main(arguments: list[str]) -> int:
    """Load, say so, work; return the exit status. A refusal was said to the supervisor, which logs it."""
    gc.disable()  # imports make many objects and no garbage
    # The supervisor decides when to end; Ctrl-C in a terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = _Line(socket.socket(fileno=int(arguments[0])))
    threading.Thread(target=line.listen, name="listen", daemon=True).start()
    try:
        settings = read_settings(os.environ)
        use_json(settings.log_json)
        service = _load(line, settings)
    except StartError as error:
        if error.passing:
            log_event("start failed", error=type(error).__name__, reason=error)
            return error.exit_code
        said = {"error": type(error).__name__, "message": error.message}
        line.say({"say": "refused", **said, "place": error.place, "hint": error.hint})
        return error.exit_code
    line.desk = Desk(service, line.say)
    gc.freeze()
    gc.enable()
    line.say({"say": "ready", "info": service.info(), "idle_unload": service.bundle.engine.idle_unload})
    while service.engine.alive:
        service.engine.join(_LOOK_SECONDS)
    failure = service.engine.failure
    log_event("the decode loop has ended", reason=failure or "a bug")
    return failure.exit_code if failure is not None else 1


def _load(line: _Line, settings: Settings) -> Service:
    from ralbuild.runtime.boot import boot
    from ralbuild.runtime.metrics import Metrics

    def tell(stage: str, percent: int) -> None:
        line.say({"say": "stage", "stage": stage, "percent": percent})

    def meet(uuid: str) -> None:
        from ralbuild.runtime.gpu_memory import used_bytes

        line.say({"say": "device", "uuid": uuid, "used": used_bytes(uuid)})

    return boot(settings, Lifecycle(tell), Metrics(__version__), meet)


def run(arguments: list[str]) -> Any:
    """Run `main` and end the process at once; a bug's trace is logged in one line."""
    try:
        status = main(arguments)
    except OSError as error:
        log_event("worker lost its supervisor", reason=error)
        status = 1
    except BaseException:
        log_event("worker failed", trace=traceback.format_exc())
        status = 1
    os._exit(status)


if __name__ == "__main__":
    run(sys.argv[1:])
