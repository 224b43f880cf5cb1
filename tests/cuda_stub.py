"""A CUDA driver that checks its caller, and real cubins to load into it.

`tests/stub_libcuda.c` is compiled against the ``cuda.h`` that Triton ships, so NVIDIA's declarations,
not ours, say how each function is called and under which name it is exported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
from collections.abc import Iterator, Mapping
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from compile_support import PINS, compiled, specs, toolchain

from ralbuild.compile.gate import inspect
from ralbuild.contract.bundle import Kernel, KernelObject, ObjectRef, PatchStep
from ralbuild.contract.codec import sha256_hex

SOURCE = Path(__file__).with_name("stub_libcuda.c")
STEPS = ("penalize", "sample", "transduce", "html_enhancer", "feedback")
ARCH = "sm_80"  # that of `compiled`, which other tests share


def header() -> Path:
    return toolchain().triton_root / "backends/nvidia/include/cuda.h"


def require_facts(folder: Path, include: Path, header: str, facts: Mapping[str, object]) -> None:
    """Let a C compiler compare constant expressions with our values, under one of NVIDIA's headers."""
    source = folder / "facts.c"
    checks = "\n".join(f'_Static_assert({name} == {value}, "{name}");' for name, value in facts.items())
    source.write_text(f"#include <stddef.h>\n#include <{header}>\n{checks}\n")
    subprocess.run(["cc", "-fsyntax-only", f"-I{include}", str(source)], check=True)


def build_stub(folder: Path) -> Path:
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{header().parent}"]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


class Stub:
    """The library seen by a test: what was called, what was wrong, and what shall fail."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.stub_log.restype = self._library.stub_faults.restype = ctypes.c_char_p
        self.reset()

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that torch would call, on a device; the door has no need of it."""
        status = getattr(self._library, name)(
            *(c_void_p(item) if isinstance(item, int) else item for item in arguments)
        )
        if status:
            raise RuntimeError(f"CUDA error: {name} failed with {status}")

    def stream(self) -> int:
        found = c_void_p()
        status = self._library.cuStreamCreate(byref(found), 1)
        assert not status
        assert found.value
        return found.value

    @contextlib.contextmanager
    def captured(self, stream: int) -> Iterator[list[int]]:
        """Capture as ``torch.cuda.graph`` does; the list then holds a graph that can be launched."""
        out: list[int] = []
        graph, ready = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", stream, c_int(0))
        try:
            yield out
        except BaseException:
            self._library.cuStreamEndCapture(c_void_p(stream), byref(graph))
            raise
        self.call("cuStreamEndCapture", stream, byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(ready), graph, c_uint64(0))
        self.call("cuGraphDestroy", graph)
        out.append(ready.value or 0)

    def own(self, address: int, size: int) -> None:
        """Let the stub take memory for allocated on the device."""
        self._library.stub_own(c_void_p(address), c_size_t(size))

    def reset(self, sm: int = 80, version: int = 12020) -> None:
        self._library.stub_reset(sm, version)

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """Let a call return an error once, ``after`` calls that succeed."""
        self._library.stub_fail(call.encode(), code, after)

    @property
    def log(self) -> list[str]:
        return self._library.stub_log().decode().splitlines()

    @property
    def faults(self) -> list[str]:
        return self._library.stub_faults().decode().splitlines()

    def calls(self, name: str) -> list[str]:
        return [line for line in self.log if line.split()[0] == name]


@functools.cache
def kernel(name: str, arch: str = ARCH) -> Kernel:
    """A kernel as the builder records it, through the same gate."""
    spec, done = specs()[name], compiled(name, arch)
    found = inspect(spec, arch, done.cubin, done.ptx, PINS)
    cubin, ptx = (ObjectRef(sha256_hex(data), len(data)) for data in (done.cubin, done.ptx))
    shared = done.launch["shared"]
    item = KernelObject(arch, cubin, ptx, found.registers, found.spill_bytes, shared, found.symbols)
    return Kernel(
        name, spec.entry, spec.source_sha256, spec.user, found.num_warps, dict(spec.constants), found.params, (item,)
    )  # fmt: skip


def kernels() -> dict[str, Kernel]:
    return {name: kernel(name) for name in STEPS}


def objects() -> dict[str, bytes]:
    return {kernel(name).objects[0].cubin.sha256: compiled(name).cubin for name in STEPS}


def steps() -> list[PatchStep]:
    return [PatchStep(name, "1" if name == "feedback" else "slots") for name in STEPS]
