"""The compile worker: a program of its own, and the only one that imports Triton.

`ralbuild.compile.launch` starts one for each kernel and architecture, with a request on standard
input. The answer goes to the file descriptor named on the command line, never to standard output,
which belongs to whatever the kernel file prints. Nothing the answer says is believed: the gate
reads the object itself.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # this file is run by its path

from ralbuild.compile import sandbox

MODULE = "ral_kernel"
"""Kernel files are imported under this name, wherever they lie: the name can reach the object."""
MAX_REASON = 600


def main() -> None:
    """Read the request, give up privileges, compile, answer."""
    answer_to = int(sys.argv[1])
    request = json.load(sys.stdin.buffer)
    policy = sandbox.Policy(**request["policy"])
    missing = sandbox.enter(policy)
    try:
        answer = _compile(request, Path(policy.private))
    except BaseException as error:  # a kernel file may raise anything
        answer = _failure(error, policy.private)
    answer["missing"] = missing
    body = json.dumps(answer).encode()
    with os.fdopen(answer_to, "wb") as stream:
        stream.write(len(body).to_bytes(8, "little") + body)


def _compile(request: dict[str, Any], private: Path) -> dict[str, Any]:
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(_import(private / "kernel.py"), request["entry"])
    constants = request["constants"]
    order = list(kernel.arg_names)
    signature = request["signature"] | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in order},
        constexprs=constants,
        attrs={
            (order.index(name),): [["tt.divisibility", value]] for name, value in request["align"].items()
        },
    )
    target = GPUTarget("cuda", request["capability"], 32)
    compiled = triton_compile(source, target=target, options={"num_warps": request["num_warps"]})
    launch = compiled.metadata._asdict()
    return {
        "ptx": compiled.asm["ptx"],
        "cubin": base64.b64encode(compiled.asm["cubin"]).decode(),
        "launch": {name: int(launch[name]) for name in request["launch"]},
    }


def _import(path: Path) -> Any:
    module = types.ModuleType(MODULE)
    module.__file__ = str(path)
    sys.modules[MODULE] = module
    exec(compile(path.read_bytes(), path, "exec"), vars(module))  # noqa: S102
    return module


def _failure(error: BaseException, private: str) -> dict[str, Any]:
    """Describe an error by its own words and the line of the kernel file that it points at."""
    line, column, reason = _locate(error, f"{private}/kernel.py")
    reason = reason.split(" Repro command:")[0].replace(f"{private}/", "")
    reason = re.sub(r"tmp/tmp\w+\.ptx", "kernel.ptx", reason)
    return {"line": line, "column": column, "reason": reason[:MAX_REASON]}


def _locate(error: BaseException, path: str) -> tuple[int, int, str]:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    for item in reversed(chain):  # the innermost is where the user's own line is
        node: Any = getattr(item, "node", None)
        if hasattr(node, "lineno"):
            inner = chain[chain.index(item) + 1 :]
            text = getattr(item, "error_message", None) or (str(inner[0]) if inner else "")
            begin = _first_line(getattr(item, "src", ""))
            return begin + node.lineno - 1, node.col_offset + 1, _one_line(text) or type(item).__name__
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno or 0, error.offset or 0, _one_line(f"{error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return (lines[-1] or 0) if lines else 0, 0, _one_line(f"{type(error).__name__}: {error}")


def _first_line(source: str) -> int:
    """Return the line of the kernel file on which a function's source begins."""
    for item in vars(sys.modules[MODULE]).values():
        if getattr(item, "src", None) == source and hasattr(item, "starting_line_number"):
            skipped = next(
                index for index, text in enumerate(item.raw_src) if text.strip().startswith("def ")
            )
            return int(item.starting_line_number) + skipped
    return 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
