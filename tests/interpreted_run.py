"""Runs a user kernel as the runtime does, in a process of its own: Triton must be imported for its interpreter.

Reads a pickle of cases and prints one of what became of them; one process for all, for its imports are slow.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from ralbuild.contract.bundle import Kernel
from ralbuild.runtime.errors import PatchUnsupportedError
from ralbuild.runtime.interpreted import UserKernelError, UserStep
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.steps import PatchSlot

MANIFEST: Any = SimpleNamespace(tokenizer_size=400, eos_token_ids=(2,))
VOCAB: Any = [bytes([number % 256]) for number in range(400)]


Case = tuple[Kernel, dict[str, bytes], np.ndarray, list[dict[str, Any]]]
"""Kernel, the bundle's objects, logits, and the fields of each slot."""
Result = tuple[np.ndarray, list[dict[str, Any]], str]
"""Logits and slots after the step, and the error's text; empty for none."""


def run_apart(cases: list[Case]) -> list[Result]:
    """Run one step of each case."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=pickle.dumps(cases),
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    results: list[Result] = pickle.loads(done.stdout)
    return results


def _run(case: Case) -> Result:
    kernel, objects, logits, fields = case
    nothing: Any = None
    slots = [PatchSlot(Draw(), nothing, nothing, **values) for values in fields]
    said = ""
    try:
        UserStep(kernel, objects, MANIFEST, VOCAB).run(logits, slots)
    except (UserKernelError, PatchUnsupportedError) as error:
        said = str(error)
    return logits, [{"token": slot.token, "output": slot.output} for slot in slots], said


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps([_run(case) for case in pickle.load(sys.stdin.buffer)]))
