"""Runs a user's kernel in Triton's interpreter: a program of its own, where print and pdb work.

`ralbuild.debug.kernel` starts it with TRITON_INTERPRET=1 and a request file; the answer goes to the file
descriptor named on the command line. It gives up the same rights as the compile worker first, but keeps
the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this file is run by its path

from ralbuild.compile import sandbox


class HostTensor:
    """A NumPy array with what the interpreter asks of a tensor; no torch is needed."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.dtype = f"torch.{array.dtype.name}"

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> HostTensor:
        """Return itself: an array is its own storage."""
        return self

    def cpu(self) -> HostTensor:
        """Return itself: it is on the CPU."""
        return self

    def new_empty(self, *_: Any, **__: Any) -> HostTensor:
        """Return a tensor to be `set_`; the same memory, so that every store is seen."""
        return self

    def set_(self, *_: Any) -> None:
        """Keep the memory."""

    def copy_(self, _: HostTensor) -> None:
        """Copy nothing: host and device are one memory."""

    def storage_offset(self) -> int:
        """Return 0: a tensor begins where its memory does."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(self.array.shape)

    def stride(self) -> tuple[int, ...]:
        """Return the strides in elements."""
        return tuple(step // self.array.itemsize for step in self.array.strides)


def main() -> None:
    """Read the request, give up privileges, launch once per step, answer with the buffers after each."""
    answer_to, folder = int(sys.argv[1]), Path(sys.argv[2])
    request = json.loads((folder / "request.json").read_text())
    missing = sandbox.enter(sandbox.Policy(**request["policy"]))
    answer: dict[str, Any]
    try:
        answer = {"steps": _run(request, folder)}
    except SystemExit:
        answer = {"stopped": True, "steps": []}
    except BaseException as error:  # a kernel file may raise anything
        answer = _failure(error, str(folder / "kernel.py"))
    answer["missing"] = missing
    with os.fdopen(answer_to, "wb") as stream:
        stream.write(json.dumps(answer).encode())


def _run(request: dict[str, Any], folder: Path) -> list[dict[str, list[Any]]]:
    path = folder / "kernel.py"
    module = types.ModuleType("ral_kernel")
    module.__file__ = str(path)
    sys.modules["ral_kernel"] = module
    exec(compile(path.read_bytes(), path, "exec"), vars(module))  # noqa: S102
    kernel = getattr(module, request["entry"])
    out = []
    for step in request["steps"]:
        arrays = {name: np.array(values, np.dtype(kind)) for name, (kind, values) in step.items()}
        given = {
            name: HostTensor(arrays[name]) if pointer else arrays[name].item()
            for name, pointer in request["pointers"].items()
        }
        kernel[(request["grid"],)](**given, **request["constants"])
        sys.stdout.flush()
        out.append({name: arrays[name].tolist() for name, pointer in request["pointers"].items() if pointer})
    return out


def _failure(error: BaseException, path: str) -> dict[str, Any]:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    frames = [
        frame.lineno
        for item in chain
        for frame in traceback.extract_tb(item.__traceback__)
        if frame.filename == path and frame.lineno
    ]
    inner = chain[-1]
    reason = " ".join(f"{type(inner).__name__}: {inner}".split())
    return {"line": frames[-1] if frames else 0, "reason": reason[:600]}


if __name__ == "__main__":
    main()
