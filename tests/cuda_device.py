"""A GPU made of this process's memory: graphs that are frozen as CUDA's are, kernels run from their PTX.

`StubDevice` stands for `ralbuild.runtime.cuda.device.Device`. A capture records every torch operation with
the very tensors that it read and wrote, and every launch with its parameter block. A replay does the
same again and nothing else: what Python decided at the capture is frozen, and memory that was not there
then is not seen. `SimulatedDriver` is the real door on the stub library, which checks each call; a launch
then runs the kernel's PTX over the arrays that its parameters point to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import cuda_stub
import numpy as np
import pytest
import torch
from cuda_stub import Stub
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ralbuild.contract.bundle import Kernel
from ralbuild.runtime.cuda.device import cuda_errors
from ralbuild.runtime.cuda.driver import Driver, Function, Module, Stream
from ralbuild.runtime.cuda.graphs import Graphs
from ralbuild.runtime.cuda.patch import GpuPatch
from ralbuild.runtime.cuda.pool import Pool
from ralbuild.simulate.ptx.model import Module as PtxModule
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options, Session

FORBIDDEN = {
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default, torch.ops.aten.nonzero.default,
    torch.ops.aten.item.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default,
}  # fmt: skip
"""What waits for the device, or copies from memory of Python's: no stream that is captured allows it."""


class Recording(TorchDispatchMode):
    """The operations of a step, in order."""

    current: ClassVar[Recording | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORBIDDEN:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {func}")
        out = func(*args, **(kwargs or {}))
        self.steps.append(partial(_again, func, args, kwargs or {}, out))
        return out


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class StubDevice:
    """What `graphs`, `decode` and `report` ask of a device."""

    stub: ClassVar[Stub]

    def __init__(self, stub: Stub | None = None) -> None:
        self.stub = stub or type(self).stub
        self.place = torch.device("cpu")
        self.stream = Stream(self.stub.stream())
        self._sent: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._marks = 0
        self.trace: list[str] = []
        """What the host did, in order: ``launch`` a graph, ``wait`` for a copy."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        with cuda_errors(), torch.no_grad():
            yield

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        recording = Recording()
        with self.stub.captured(self.stream) as graph:
            Recording.current = recording
            try:
                with recording:
                    body()
            finally:
                Recording.current = None
        return partial(self._replay, recording, graph[0])

    def _replay(self, recording: Recording, graph: int) -> None:
        self.trace.append("launch")
        self.stub.call("cuGraphLaunch", graph, self.stream)
        for step in recording.steps:
            step()

    def pinned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def fetch(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """The copy is under way: until it is waited for, the host sees garbage."""
        self._sent.append((self._marks, host, source.clone()))
        host.fill_(float("nan") if host.is_floating_point() else -123456789)

    def mark(self) -> Callable[[], None]:
        self._marks += 1
        return partial(self._wait, self._marks)

    def _wait(self, mark: int) -> None:
        self.trace.append("wait")
        while self._sent and self._sent[0][0] < mark:
            _, host, data = self._sent.pop(0)
            host.copy_(data)


KERNELS: dict[str, tuple[Kernel, PtxModule]] = {}
"""What is run for an entry: the bundle's record of the kernel, and its PTX."""


def know(kernel: Kernel, ptx: bytes) -> None:
    """Let launches of a kernel run this PTX."""
    KERNELS[kernel.entry] = kernel, parse_module(ptx.decode())


class SimulatedDriver(Driver):
    """The door on the stub library; kernels that are known run."""

    stub: ClassVar[Stub]

    def __init__(self, meet: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(library=self.stub.path, meet=meet)
        self._entries: dict[int, str] = {}
        self._sessions: dict[tuple[str, int, bytes], Session] = {}

    def function(self, module: Module, entry: str, shared_bytes: int) -> Function:
        found = super().function(module, entry, shared_bytes)
        self._entries[found] = entry
        return found

    def launch(
        self, function: Function, grid: int, threads: int, shared_bytes: int, stream: Stream, block: bytes
    ) -> None:
        super().launch(function, grid, threads, shared_bytes, stream, block)
        run = partial(self._run, self._entries[function], grid, shared_bytes, block)
        if Recording.current is not None:
            Recording.current.steps.append(run)
        else:
            run()

    def _run(self, entry: str, grid: int, shared_bytes: int, block: bytes) -> None:
        key = (entry, grid, block)
        if key not in self._sessions:
            kernel, module = KERNELS[entry]
            values = {
                param.name: _argument(param.type, block[param.offset : param.offset + param.size])
                for param in kernel.params
                if not param.hidden
            }
            options = Options(shared=shared_bytes)
            self._sessions[key] = Session(module, entry, (grid, 1, 1), values, options)
        self._sessions[key].launch()


ARRAYS: dict[int, np.ndarray] = {}
"""Device arrays by address."""


class WatchedPool(Pool):
    """A pool whose memory the stub knows as allocated, and the simulator by address."""

    stub: ClassVar[Stub]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for name, tensor in self.tensors.items():
            ARRAYS[self.addresses[name]] = tensor.numpy()
        first = min(self.addresses.values())
        self.stub.own(first, self.size)


def _argument(kind: str, data: bytes) -> Any:
    if kind.startswith("*"):
        return ARRAYS[int.from_bytes(data, "little")]
    return (
        float(np.frombuffer(data, np.float32)[0])
        if kind == "fp32"
        else int.from_bytes(data, "little", signed=True)
    )


@contextlib.contextmanager
def on_device(stub: Stub) -> Iterator[None]:
    """Let `boot` find this device; afterwards the stub must have nothing to complain of."""
    stub.reset()
    ARRAYS.clear()
    KERNELS.clear()
    with pytest.MonkeyPatch.context() as patched:
        for kind in (SimulatedDriver, StubDevice, WatchedPool):
            patched.setattr(kind, "stub", stub, raising=False)
        for name in (
            "CUDA_DISABLE_PTX_JIT",
            "CUDA_CACHE_DISABLE",
            "CUDA_MODULE_LOADING",
            "CUDA_FORCE_PTX_JIT",
        ):
            patched.setenv(name, "unset")
        patched.setattr("ralbuild.runtime.cuda.driver.Driver", SimulatedDriver)
        patched.setattr("ralbuild.runtime.cuda.device.Device", StubDevice)
        patched.setattr("ralbuild.runtime.cuda.buffers.Pool", WatchedPool)
        yield
    assert stub.faults == []


BUFFER_BYTES = 4096
MOST = 6


@dataclass
class Rig:
    """A driver and a device on the stub, with every buffer that the kernels name; kernels are not run."""

    stub: Stub
    driver: Driver
    device: StubDevice
    pool: Pool
    values: dict[str, int]

    @property
    def stream(self) -> Stream:
        return self.device.stream

    @property
    def graphs(self) -> Graphs:
        return Graphs(self.device, self.driver, MOST, 200)

    def load(self, **changed: Any) -> GpuPatch:
        named = {**cuda_stub.kernels(), **changed.pop("kernels", {})}
        given: dict[str, Any] = {
            "values": self.values, "max_slots": MOST, "patch": cuda_stub.steps(), "objects": cuda_stub.objects(),
        }  # fmt: skip
        return GpuPatch.load(self.driver, self.stream, kernels=list(named.values()), **{**given, **changed})

    def ready(self, model: Callable[[GpuPatch, int], None] = lambda _patch, _slots: None) -> Graphs:
        """Load, warm and capture; ``model`` comes before the patch in each step."""
        patch, graphs = self.load(), self.graphs

        def step(slots: int, _span: int) -> None:
            model(patch, slots)
            patch.launch(slots)

        graphs.warm(lambda slots, _: patch.launch(slots))
        graphs.capture(step, lambda _done, _total: None)
        return graphs


def rig(stub: Stub) -> Rig:
    driver = Driver(library=stub.path)
    params = [param for item in cuda_stub.kernels().values() for param in item.params if not param.hidden]
    pointers = sorted({param.buffer for param in params if param.type.startswith("*")})
    pool = Pool(dict.fromkeys(pointers, (torch.uint8, (BUFFER_BYTES,))), torch.device("cpu"))
    stub.own(min(pool.addresses.values()), pool.size)
    numbers = {param.buffer: 48 for param in params if not param.type.startswith("*")}
    return Rig(stub, driver, StubDevice(stub), pool, {**numbers, **pool.addresses})
