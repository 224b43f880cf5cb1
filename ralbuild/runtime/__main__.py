"""``python -m ralbuild.runtime``: take the port, start the worker, serve, drain, end with a meaning.

What is imported here delays the first answer of `/health`, and then the start of the worker.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

from ralbuild.runtime.errors import StartError
from ralbuild.runtime.listening import describe, listening
from ralbuild.runtime.porter import Porter

TYPE_CHECKING = False
if TYPE_CHECKING:  # without `typing`
    import socket

    from ralbuild.runtime.exposition import ServerMetrics
    from ralbuild.runtime.rule_file import RuleFile
    from ralbuild.runtime.settings import Settings
    from ralbuild.runtime.workers import WorkerProcess

_QUIET = {
    # Nothing may reach for a network or write a cache, whatever a library would like to do.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}

_USUAL = {
    # Threads that spin while they wait slow every other process on the host: another colour of a release.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN keeps a compiled product, half a MiB, for every number of rows that ever came: 1,024 of them.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
"""What a container's environment may say otherwise."""


def main() -> int:
    """Run the service; return its exit status (docs/runtime.md has the table)."""
    # Imports make many objects and no garbage: collecting between them costs a third of the start.
    gc.disable()
    os.environ.update(_QUIET)
    for name, value in _USUAL.items():
        os.environ.setdefault(name, value)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Until the server takes over; process 1 would ignore a signal without a handler.
        signal.signal(number, lambda *_: os._exit(0))
    try:
        with listening(os.environ) as listener:
            return _serve(listener)
    except StartError as error:
        return _refuse(error)


def _serve(listener: socket.socket) -> int:
    porter = Porter(listener)
    from ralbuild.runtime.workers import WorkerProcess

    # The worker imports torch while this process imports its server.
    worker = WorkerProcess()
    try:
        return _supervise(listener, porter, worker)
    finally:
        worker.end()


def _supervise(listener: socket.socket, porter: Porter, worker: WorkerProcess) -> int:
    from ralbuild.runtime.log import log_event, use_json
    from ralbuild.runtime.settings import read_settings

    settings = read_settings(os.environ)
    use_json(settings.log_json)
    log_event("listening", **describe(listener))
    from ralbuild.runtime.app import Api
    from ralbuild.runtime.exposition import ServerMetrics
    from ralbuild.runtime.keys import KeyFile
    from ralbuild.runtime.lifecycle import Lifecycle
    from ralbuild.runtime.serve import Server
    from ralbuild.runtime.supervisor import Supervisor

    lifecycle, metrics = Lifecycle(), ServerMetrics(compat=settings.compat)
    keys = KeyFile(settings.keys_file, "RAL_API_KEYS_FILE") if settings.keys_file else None
    admin = KeyFile(settings.admin_file, "RAL_ADMIN_TOKEN_FILE") if settings.admin_file else None
    rules = _open_rules(settings, metrics) if settings.runtime_rules else None
    supervisor = Supervisor(worker, lifecycle, metrics, settings.idle_unload, rules)
    api = Api(lifecycle, metrics, supervisor, keys=keys, admin=admin)
    server = Server(api, settings.drain_seconds, porter.leave)
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


def _open_rules(settings: Settings, metrics: ServerMetrics) -> RuleFile:
    from pathlib import Path

    from ralbuild.runtime.exposition import RuntimeRuleMetrics
    from ralbuild.runtime.rule_file import RuleFile

    file, key = Path(settings.runtime_rules), Path(settings.runtime_rules_key)
    return RuleFile(file, key, RuntimeRuleMetrics(metrics.registry), settings.runtime_rules_least)


def _refuse(error: StartError) -> int:
    from ralbuild.runtime.log import log_event, use_json

    use_json(os.environ.get("RAL_LOG") == "json")  # it may not have been read yet
    log_event("refused", exit=error.exit_code, error=type(error).__name__, reason=error)
    return error.exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # There is nothing to save, so do not wait for threads.
    os._exit(status)
