"""Starts the worker that loads models, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ralbuild.errors import HostError, WeightsError


def run_worker(order: dict[str, Any], extra: str) -> dict[str, Any]:
    """Carry out an order of `ralbuild.weights.model_worker` and return its answer.

    Args:
        order: the function's name under ``order``, and its arguments.
        extra: the extra of ralbuild that the worker needs.

    Raises:
        HostError: when the extra is not installed.
        WeightsError: when the libraries refuse the model.
    """
    worker = Path(__file__).with_name("model_worker.py")
    with tempfile.TemporaryDirectory(prefix="ralbuild-worker-") as home:
        kept = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {
            "HOME": home,
            "HF_HOME": home,
            "TMPDIR": home,
            "HF_HUB_OFFLINE": "1",
            "LC_ALL": "C.UTF-8",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            [sys.executable, "-I", "-B", str(worker)],
            input=json.dumps(order).encode(),
            capture_output=True,
            check=False,
            cwd=home,
            env=environment,
        )
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1][:300] if lines else f"ended with status {done.returncode}"
    if reason.startswith(("ModuleNotFoundError", "ImportError")):
        raise HostError(reason, hint=f"install the extra: pip install 'ralbuild[{extra}]'")
    raise WeightsError(f"transformers cannot use the model: {reason}")
