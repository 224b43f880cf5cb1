"""``python -m ralbuild.runtime``: listen at once, load in a thread, serve, drain, end with a meaning."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback

from ralbuild import __version__
from ralbuild.runtime.errors import StartError
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.log import log_event
from ralbuild.runtime.settings import Settings, read_settings

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
    try:
        return _serve(read_settings(os.environ))
    except StartError as error:
        return _refuse(error)


def _serve(settings: Settings) -> int:
    from ralbuild.runtime.app import Api
    from ralbuild.runtime.metrics import Metrics
    from ralbuild.runtime.serve import Server, bind

    lifecycle = Lifecycle()
    listener = bind(settings.host, settings.port)
    metrics = Metrics(__version__)
    api = Api(lifecycle, metrics)
    server = Server(api, settings.drain_seconds)
    host, port = listener.getsockname()[:2]
    log_event("listening", host=host, port=port)

    def load() -> None:
        from ralbuild.runtime.boot import boot

        try:
            api.service = boot(settings, lifecycle, metrics)
        except StartError as error:
            lifecycle.failure = error
            return
        except BaseException as error:
            # Not a refusal but a bug: the trace is for whoever reports it.
            log_event("start failed", trace=traceback.format_exc())
            lifecycle.failure = StartError(f"{type(error).__name__}: {error}")
            return
        gc.freeze()
        gc.enable()
        lifecycle.enter("ready")
        for stage, seconds in lifecycle.seconds.items():
            metrics.start_seconds.labels(stage).set(seconds)
        log_event(
            "ready", **{stage.replace("-", "_"): seconds for stage, seconds in lifecycle.seconds.items()}
        )

    threading.Thread(target=load, name="boot", daemon=True).start()
    server.run(sockets=[listener])
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
    # The boot thread may still be importing; there is nothing to save, so do not wait for it.
    os._exit(status)
