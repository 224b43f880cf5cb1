"""A CUDA driver that checks its caller, and real cubins to load into it.

`tests/stub_libcuda.c` is compiled against the ``cuda.h`` that Triton ships, so NVIDIA's declarations,
not ours, say how each function is called and under which name it is exported.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_support import PINS, compiled, specs, toolchain

from ralbuild.compile.gate import inspect
from ralbuild.contract.bundle import Kernel, KernelObject, ObjectRef, PatchStep
from ralbuild.contract.codec import sha256_hex
from ralbuild.runtime.cuda.driver import Driver, Stream
from ralbuild.runtime.cuda.patch import GpuPatch
from ralbuild.runtime.cuda.pool import Pool

SOURCE = Path(__file__).with_name("stub_libcuda.c")
STEPS = ("penalize", "sample", "transduce", "html_enhancer", "feedback")
ARCH = "sm_80"  # that of `compiled`, which other tests share
BUFFER_BYTES = 4096


def header() -> Path:
    return toolchain().triton_root / "backends/nvidia/include/cuda.h"


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
def kernel(name: str) -> Kernel:
    """A kernel as the builder records it, through the same gate."""
    spec, done = specs()[name], compiled(name)
    found = inspect(spec, ARCH, done.cubin, done.ptx, PINS)
    cubin, ptx = (ObjectRef(sha256_hex(data), len(data)) for data in (done.cubin, done.ptx))
    shared = done.launch["shared"]
    item = KernelObject(ARCH, cubin, ptx, found.registers, found.spill_bytes, shared, found.symbols)
    return Kernel(
        name, spec.entry, spec.source_sha256, spec.user, found.num_warps, dict(spec.constants), found.params, (item,)
    )  # fmt: skip


def kernels() -> dict[str, Kernel]:
    return {name: kernel(name) for name in STEPS}


def objects() -> dict[str, bytes]:
    return {kernel(name).objects[0].cubin.sha256: compiled(name).cubin for name in STEPS}


def steps() -> list[PatchStep]:
    return [PatchStep(name, "1" if name == "feedback" else "slots") for name in STEPS]


@dataclass
class Rig:
    """A driver on the stub with every buffer that the kernels name."""

    stub: Stub
    driver: Driver
    stream: Stream
    pool: Pool
    values: dict[str, int]

    def load(self, **changed: Any) -> GpuPatch:
        named: Mapping[str, Kernel] = {**kernels(), **changed.pop("kernels", {})}
        given: dict[str, Any] = {
            "values": self.values,
            "max_slots": 6,
            "patch": steps(),
            "objects": objects(),
        }
        return GpuPatch.load(self.driver, self.stream, kernels=list(named.values()), **{**given, **changed})


def rig(stub: Stub) -> Rig:
    driver = Driver(library=stub.path)
    params = [param for item in kernels().values() for param in item.params if not param.hidden]
    pointers = sorted({param.buffer for param in params if param.type.startswith("*")})
    pool = Pool(driver, dict.fromkeys(pointers, BUFFER_BYTES))
    numbers = {param.buffer: 48 for param in params if not param.type.startswith("*")}
    return Rig(stub, driver, driver.stream(), pool, {**numbers, **pool.addresses})
