"""Starts one compile worker, waits for its answer, and cleans up whatever it left."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ralbuild.compile.sandbox import Policy
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.toolchain import Toolchain
from ralbuild.errors import CompileError

TIMEOUT_SECONDS = 300.0
MAX_ANSWER_BYTES = 64 << 20
LAUNCH_FACTS = ("shared", "num_ctas", "num_warps", "global_scratch_size", "profile_scratch_size")
"""Fields of Triton's launch metadata that are asked for."""

_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a worker answered; checked by nobody yet.

    Attributes:
        cubin, ptx: the objects.
        launch: the values of `LAUNCH_FACTS`.
        missing: protections that the worker ran without.
    """

    cubin: bytes
    ptx: bytes
    launch: Mapping[str, int]
    missing: tuple[str, ...]


def run_worker(
    spec: KernelSpec,
    arch: str,
    toolchain: Toolchain,
    *,
    stop: threading.Event,
    timeout: float = TIMEOUT_SECONDS,
    lines: bool = False,
) -> Compiled:
    """Compile one kernel for one architecture in a fresh, locked-in process.

    Args:
        stop: when set, the worker is killed and the call raises.
        timeout: seconds of wall-clock time that the worker may take.
        lines: with line information; what ships has none.

    Raises:
        CompileError: with file:line of the kernel file where Triton gives one.
    """
    private = Path(tempfile.mkdtemp(prefix="ralbuild-compile-"))
    try:
        (private / "kernel.py").write_bytes(spec.source)
        for name in ("cache", "tmp"):
            (private / name).mkdir()
        request = json.dumps(_request(spec, arch, toolchain, private)).encode()
        with tempfile.TemporaryFile() as printed:
            worker = _start(_environment(private, toolchain, lines), private, printed)
            try:
                answer = worker.talk(request, stop, time.monotonic() + timeout)
                return _read_answer(answer, spec, arch)
            except _NoAnswerError as error:
                message = f"{spec.name} for {arch}: the compile worker {error}{_last_words(printed)}"
                raise CompileError(message, place=spec.filename) from None
            finally:
                worker.kill()
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _request(spec: KernelSpec, arch: str, toolchain: Toolchain, private: Path) -> dict[str, Any]:
    readable = {sys.prefix, sys.base_prefix, str(toolchain.triton_root), str(toolchain.ptxas.parent)}
    readable |= {"/usr", "/lib", "/lib64", "/etc/ld.so.cache"}
    policy = Policy(
        private=str(private),
        readable=tuple(sorted(readable)),
        cpu_seconds=600,
        file_bytes=256 << 20,
        memory_bytes=8 << 30,
        processes=64 + 4 * (os.cpu_count() or 1),
    )
    return {
        "entry": spec.entry,
        "signature": dict(spec.signature),
        "constants": dict(spec.constants),
        "align": dict(spec.align),
        "num_warps": spec.num_warps,
        "capability": int(arch.removeprefix("sm_")),
        "launch": LAUNCH_FACTS,
        "policy": asdict(policy),
    }


def _environment(private: Path, toolchain: Toolchain, lines: bool) -> dict[str, str]:
    """The whole environment: nothing of the caller's can change the result."""
    return {
        "HOME": str(private),
        "TMPDIR": str(private / "tmp"),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TRITON_CACHE_DIR": str(private / "cache"),
        "TRITON_HOME": str(private),
        "TRITON_PTXAS_PATH": str(toolchain.ptxas),
        "TRITON_PTXAS_BLACKWELL_PATH": str(toolchain.ptxas),
        "TRITON_DISABLE_LINE_INFO": "0" if lines else "1",
    }


class _NoAnswerError(Exception):
    """The worker gave no whole answer; the text says what became of it."""


@dataclass(frozen=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    answers: int

    def talk(self, request: bytes, stop: threading.Event, deadline: float) -> dict[str, Any]:
        """Send the request and wait for the answer: 8 bytes of length, then JSON."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request)
            self.process.stdin.close()
        size = int.from_bytes(self._take(8, stop, deadline), "little")
        if size > MAX_ANSWER_BYTES:
            raise _NoAnswerError("gave no usable answer")
        try:
            answer = json.loads(self._take(size, stop, deadline))
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _NoAnswerError("gave no usable answer")
        return answer

    def _take(self, size: int, stop: threading.Event, deadline: float) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            if stop.is_set():
                raise _NoAnswerError("was stopped")
            if time.monotonic() > deadline:
                raise _NoAnswerError("took too long")
            if select.select([self.answers], [], [], 0.1)[0]:
                part = os.read(self.answers, size - len(taken))
                if not part:
                    raise _NoAnswerError(self._fate())
                taken += part
        return bytes(taken)

    def _fate(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its answer and went on"
        number = -code if code < 0 else code - 128
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
        return f"ended with status {code} and no answer"

    def kill(self) -> None:
        """End the worker and its group, and wait for it, so that nobody still writes to its folder.

        The process namespace, where there is one, ends with its first process: no child survives.
        """
        deadline = time.monotonic() + 5
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.005)
        self.process.wait()
        os.close(self.answers)


def _start(environment: dict[str, str], private: Path, printed: IO[bytes]) -> _Worker:
    """Start a worker; what it prints goes to ``printed``, which the file size limit bounds."""
    answers, answer_to = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_WORKER), str(answer_to)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=private,
            env=environment,
            pass_fds=(answer_to,),
            start_new_session=True,
        )
    except OSError:
        os.close(answers)
        raise
    finally:
        os.close(answer_to)
    return _Worker(process, answers)


def _last_words(printed: IO[bytes]) -> str:
    """Return the last line that the worker printed, for a death that nothing else explains."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - 2000))
    lines = printed.read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; it printed {last[-300:]!r}" if last else ""


def _read_answer(answer: dict[str, Any], spec: KernelSpec, arch: str) -> Compiled:
    """Turn an answer into objects, or into the error that it reports."""
    if "reason" in answer:
        line, column = answer.get("line"), answer.get("column")
        place = spec.filename
        if isinstance(line, int) and line > 0:
            place += f":{line}:{column}" if isinstance(column, int) and column > 0 else f":{line}"
        raise CompileError(f"cannot be compiled for {arch}: {str(answer['reason'])[:600]}", place=place)
    try:
        return Compiled(
            cubin=base64.b64decode(answer["cubin"], validate=True),
            ptx=answer["ptx"].encode(),
            launch={name: int(answer["launch"][name]) for name in LAUNCH_FACTS},
            missing=tuple(str(name) for name in answer["missing"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _NoAnswerError(f"gave no usable answer ({type(error).__name__})") from None
