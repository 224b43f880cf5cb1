"""A user's kernel stepped over a text on the CPU: one launch per token, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ralbuild.compile.sandbox import Policy
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.user_source import user_spec
from ralbuild.config.load import UserKernel
from ralbuild.contract.arrays import read_arrays
from ralbuild.contract.transducer import read_transducer
from ralbuild.debug.rules import Rules
from ralbuild.debug.trace import trace
from ralbuild.errors import CompileError, HostError, UsageError
from ralbuild.simulate.buffers import Tables, slot_buffers, table_buffers

MAX_LAUNCHES = 2000
"""Tokens of one run: the interpreter is slow."""
MAX_ANSWER_BYTES = 512 << 20
_WORKER = Path(__file__).with_name("kernel_worker.py")
_DTYPES = {
    "i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "fp16": "float16", "fp32": "float32", "fp64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch changed: buffer name to the flat indices and the old and new values there."""

    token: int | None
    data: bytes
    changes: Mapping[str, tuple[tuple[int, Any, Any], ...]]

    def plain(self) -> dict[str, object]:
        """Return the launch as JSON holds it."""
        return {
            "token": self.token,
            "text": self.data.decode("utf-8", "replace"),
            "changes": {
                name: [{"at": at, "before": before, "after": after} for at, before, after in items]
                for name, items in self.changes.items()
                if items
            },
        }


def find_kernel(rules: Rules, name: str, max_seq_len: int) -> KernelSpec:
    """Return the user kernel called ``name`` in the config.

    Raises:
        UsageError: when there is none; lists those there are.
        CompileError: when its signature is wrong.
    """
    kernels: dict[str, UserKernel] = {kernel.name: kernel for kernel in rules.loaded.kernels}
    kernel = kernels.get(name)
    if kernel is None:
        hint = f"user kernels of this config: {', '.join(sorted(kernels)) or 'none'}"
        raise UsageError(f"no user kernel is named {name!r}", place="--kernel", hint=hint)
    return user_spec(
        name=kernel.name,
        source=kernel.source,
        filename=str(kernel.path),
        settings=kernel.settings,
        max_seq_len=max_seq_len,
        encode=rules.encode,
        place=kernel.place,
    )


def run_kernel(
    spec: KernelSpec, rules: Rules, route: str, text: str, note: Callable[[str], None]
) -> Iterator[Launch]:
    """Launch the kernel once per token of ``text``, with the buffers as they are after `transduce`.

    What the kernel prints goes to standard error, and standard input is the kernel's: pdb works. ``note``
    is told which protections the host does not give.

    Raises:
        CompileError: with file:line of the kernel, when it fails.
        UsageError: when the text is too long for the interpreter.
    """
    steps = list(_steps(spec, rules, route, text))
    if len(steps) > MAX_LAUNCHES:
        raise UsageError(f"needs at most {MAX_LAUNCHES} tokens, found {len(steps)}", place="--text")
    after = _interpret(spec, [arrays for _, _, arrays in steps], note)
    for (token, data, before), found in zip(steps, after, strict=False):
        yield Launch(token, data, {name: _changes(before[name], values) for name, values in found.items()})


def _steps(
    spec: KernelSpec, rules: Rules, route: str, text: str
) -> Iterator[tuple[int | None, bytes, dict[str, np.ndarray[Any, Any]]]]:
    """Yield each token with its parameters' arrays; a slot's text goes through the reference executor."""
    tables = Tables(read_transducer(rules.folded.transducer, "transducer"), rules.bans, rules.vocab, (0,))
    buffers = table_buffers(tables) | slot_buffers(tables, 1, max(1, len(rules.vocab)))
    own = read_arrays(spec.data, "data").arrays if spec.data is not None else {}
    kept = {name: np.array(view) for name, view in own.items()}
    for number, step in enumerate(trace(rules, route, text)):
        if step.refused or step.index < 0:
            continue
        row = np.zeros_like(buffers["output"])
        emitted = np.frombuffer(step.emitted[: row.size], np.uint8)
        row.reshape(-1)[: emitted.size] = emitted
        now = {
            "token": np.array([step.token if step.token is not None else -1]),
            "step": np.array([number]),
            "fst_state": np.array([step.after]),
            "output": row,
            "output_len": np.array([len(step.emitted)]),
        }
        every = {**buffers, **now, **kept}
        yield (
            step.token,
            step.data,
            {
                name: np.array(every[buffer]).astype(_DTYPES[spec.signature[name].removeprefix("*")])
                for name, buffer in spec.buffers.items()
            },
        )


def _changes(before: np.ndarray[Any, Any], values: list[Any]) -> tuple[tuple[int, Any, Any], ...]:
    old, new = before.reshape(-1), np.array(values, before.dtype).reshape(-1)
    return tuple((int(at), old[at].item(), new[at].item()) for at in np.flatnonzero(old != new))


def _interpret(
    spec: KernelSpec, steps: list[dict[str, np.ndarray[Any, Any]]], note: Callable[[str], None]
) -> list[dict[str, list[Any]]]:
    """Run the worker and return each pointer parameter's elements after each launch."""
    private = Path(tempfile.mkdtemp(prefix="ralbuild-debug-"))
    try:
        (private / "kernel.py").write_bytes(spec.source)
        (private / "tmp").mkdir()
        request = {
            "entry": spec.entry,
            "constants": dict(spec.constants),
            "pointers": {name: kind.startswith("*") for name, kind in spec.signature.items()},
            "grid": 1,
            "steps": [
                {name: (array.dtype.name, array.tolist()) for name, array in step.items()} for step in steps
            ],
            "policy": asdict(_policy(private)),
        }
        (private / "request.json").write_text(json.dumps(request))
        return _answer(spec, _talk(private), private, note)
    except OSError as error:
        raise HostError(f"cannot run the interpreter: {error.strerror}", place=error.filename or "") from None
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _policy(private: Path) -> Policy:
    readable = {sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2])}
    readable |= {"/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/terminfo", "/dev/tty"}
    found = sorted(path for path in readable if Path(path).exists())
    return Policy(str(private), tuple(found), 3600, 256 << 20, 8 << 30, 64 + 4 * (os.cpu_count() or 1))


def _talk(private: Path) -> bytes:
    """Start the worker on our terminal and read its whole answer."""
    answers, answer_to = os.pipe()
    environment = {
        "HOME": str(private),
        "TMPDIR": str(private / "tmp"),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TERM": os.environ.get("TERM", "dumb"),
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(private / "tmp"),
    }
    command = [sys.executable, "-I", "-B", str(_WORKER), str(answer_to), str(private)]
    try:
        worker = subprocess.Popen(
            command, cwd=private, env=environment, pass_fds=(answer_to,), stdout=sys.stderr.fileno()
        )
    except OSError:
        os.close(answers)
        raise
    finally:
        os.close(answer_to)
    try:
        with os.fdopen(answers, "rb") as stream:
            return stream.read(MAX_ANSWER_BYTES)
    finally:
        worker.kill()
        worker.wait()


def _answer(
    spec: KernelSpec, body: bytes, private: Path, note: Callable[[str], None]
) -> list[dict[str, list[Any]]]:
    try:
        answer = json.loads(body)
        if answer["missing"]:
            note(f"the interpreter ran without: {', '.join(map(str, answer['missing']))}")
        if "reason" in answer:
            place = f"{spec.filename}:{answer['line']}" if answer["line"] else spec.filename
            reason = str(answer["reason"]).replace(f"{private}/", "")
            raise CompileError(f"fails in the interpreter: {reason}", place=place)
        return [
            {name: step[name] for name, kind in spec.signature.items() if kind.startswith("*")}
            for step in answer["steps"]
        ]
    except (ValueError, KeyError, TypeError):
        raise CompileError("the interpreter ended without an answer", place=spec.filename) from None
