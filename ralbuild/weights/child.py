"""Starts workers: one that loads models, and small ones under limits of time and memory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ralbuild.errors import HostError, WeightsError

WALL_SECONDS = 120
"""For a worker that waits instead of working."""


def run_limited(program: str, request: bytes, cpu_seconds: int, memory_bytes: int) -> dict[str, Any] | None:
    """Run a program of this folder in an environment of its own, under limits of the kernel.

    Args:
        program: name of the file.
        request: its standard input.
        cpu_seconds, memory_bytes: what it may take.

    Returns:
        The JSON object that it printed, or None when a limit ended it or it died.

    Raises:
        HostError: when this machine starts no process.
    """
    here = Path(__file__).parent
    bound = [str(here / "bound_worker.py"), str(os.getpid())]
    limits = [str(here / "limited_worker.py"), str(cpu_seconds), str(memory_bytes)]
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-B", *bound, *limits, str(here / program)],
            input=request,
            capture_output=True,
            timeout=WALL_SECONDS,
            check=False,
            cwd="/",
            env=environment,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        return None
    except OSError as error:
        raise HostError(f"cannot be started: {error.strerror}", place=sys.executable) from None
    return answer if isinstance(answer, dict) else None


def run_worker(order: dict[str, Any], extra: str, home: Path) -> dict[str, Any]:
    """Carry out an order of `ralbuild.weights.model_worker` and return its answer.

    Args:
        order: the function's name under ``order``, and its arguments.
        extra: the extra of ralbuild that the worker needs.
        home: an empty folder for what the libraries write on the side.

    Raises:
        HostError: when the extra is not installed, no process can be started, or the disk is full.
        WeightsError: when the libraries refuse the model.
    """
    here = Path(__file__).parent
    kept = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {
        "HOME": str(home),
        "HF_HOME": str(home),
        "TMPDIR": str(home),
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C.UTF-8",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-B",
                str(here / "bound_worker.py"),
                str(os.getpid()),
                str(here / "model_worker.py"),
            ],
            input=json.dumps(order).encode(),
            capture_output=True,
            check=False,
            cwd=home,
            env=environment,
        )
    except OSError as error:
        raise HostError(f"cannot be started: {error.strerror}", place=sys.executable) from None
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1][:300] if lines else f"ended with status {done.returncode}"
    if reason.startswith(("ModuleNotFoundError", "ImportError")):
        raise HostError(reason, hint=f"install the extra: pip install 'ralbuild[{extra}]'")
    if os.strerror(errno.ENOSPC) in reason:
        raise HostError("no space left on device", place=str(order.get("out", home)))
    raise WeightsError(f"transformers cannot use the model: {reason}")
