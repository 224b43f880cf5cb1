"""``python -m ralbuild.runtime``: take the port, start the worker, serve, drain, end with a meaning."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from ralbuild.runtime.errors import StartError
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.listening import bind, unbind
from ralbuild.runtime.log import log_event, use_json
from ralbuild.runtime.settings import Settings, read_settings
from ralbuild.runtime.workers import WorkerProcess

_QUIET = {
    # Nothing may reach for a network or write a cache, whatever a library would like to do.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    """Run the service; return its exit status (docs/runtime.md has the table)."""
    # Imports make many objects and no garbage: collecting between them costs a third of the start.
    gc.disable()
    os.environ.update(_QUIET)
    # Threads that spin while they wait slow every other process on the host: another colour of a release.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for number in (signal.SIGTERM, signal.SIGINT):
        # Until the server takes over; process 1 would ignore a signal without a handler.
        signal.signal(number, lambda *_: os._exit(0))
    try:
        settings = read_settings(os.environ)
        use_json(settings.log_json)
        listener = bind(settings)
        try:
            return _serve(settings, listener)
        finally:
            unbind(settings)
    except StartError as error:
        return _refuse(error)


def _serve(settings: Settings, listener: socket.socket) -> int:
    lifecycle = Lifecycle()
    # The worker imports torch while this process imports its server.
    worker = WorkerProcess()
    try:
        return _supervise(settings, listener, lifecycle, worker)
    finally:
        worker.end()


def _supervise(
    settings: Settings, listener: socket.socket, lifecycle: Lifecycle, worker: WorkerProcess
) -> int:
    from ralbuild.runtime.app import Api
    from ralbuild.runtime.exposition import ServerMetrics
    from ralbuild.runtime.keys import KeyFile
    from ralbuild.runtime.serve import Server
    from ralbuild.runtime.supervisor import Supervisor

    keys = KeyFile(settings.keys_file, "RAL_API_KEYS_FILE") if settings.keys_file else None
    admin = KeyFile(settings.admin_file, "RAL_ADMIN_TOKEN_FILE") if settings.admin_file else None
    metrics = ServerMetrics(compat=settings.compat)
    supervisor = Supervisor(worker, lifecycle, metrics, settings.idle_unload)
    server = Server(Api(lifecycle, metrics, supervisor, keys=keys, admin=admin), settings.drain_seconds)
    if settings.socket_path:
        log_event("listening", socket=settings.socket_path)
    else:
        host, port = listener.getsockname()[:2]
        log_event("listening", host=host, port=port)
    gc.freeze()
    gc.enable()
    try:
        server.run(sockets=[listener])
    finally:
        supervisor.close()
    if lifecycle.failure is not None:
        return _refuse(lifecycle.failure)
    log_event("stopped")
    return 0


def _refuse(error: StartError) -> int:
    log_event("refused", exit=error.exit_code, error=type(error).__name__, reason=error)
    return error.exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # There is nothing to save, so do not wait for threads.
    os._exit(status)
