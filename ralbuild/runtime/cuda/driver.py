"""The door to ``libcuda.so.1``: each call checked, each failure an error that names the call.

Handles are plain integers without finalisers: nothing is unloaded or freed because a Python object
went away, least of all while a graph is captured or replayed. The process's end releases the rest.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any, NewType

from ralbuild.runtime.cuda import abi
from ralbuild.runtime.errors import DriverError, HostUnfitError

LIBRARY = "libcuda.so.1"
MIN_VERSION = 12020
"""What ``cuDriverGetVersion`` of the 535 driver says: CUDA 12.2, the toolkit that made the cubins."""
_NO_JIT = {"CUDA_DISABLE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1", "CUDA_MODULE_LOADING": "LAZY"}
"""Lazy, for torch brings gigabytes of code; what a step needs is loaded when it is run before its capture."""
_FORCES_JIT = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT")
_PLAIN_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a block may have without asking."""
_CUDA_ELF = (b"\x7fELF", 190)

Module = NewType("Module", int)
Function = NewType("Function", int)
Stream = NewType("Stream", int)


class Driver:
    """The driver, and the primary context of one device (the one that torch uses as well).

    The context is current in the thread that made this object; another thread calls `use` first.
    """

    def __init__(
        self, device: int = 0, library: str = LIBRARY, meet: Callable[[str], None] = lambda _: None
    ) -> None:
        """Open the driver with just-in-time compilation off.

        Args:
            device: number of the device among the visible ones.
            library: name or path of the driver library.
            meet: told the device's UUID, as NVML writes it, before the context takes memory of it.

        Raises:
            HostUnfitError: when there is no driver, or one that is too old.
            DriverError: when the driver refuses.
        """
        _forbid_jit()
        self._functions = _link(library)
        self._call("cuInit", 0)
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        if version.value < MIN_VERSION:
            raise HostUnfitError(
                f"needs a driver for CUDA {_spell(MIN_VERSION)} or newer, found {_spell(version.value)}",
                place=library,
                hint="the 535 series is the first",
            )
        number, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(number), device, wanted=f"device {device}")
        self._device = number.value
        self.capability = (
            self._attribute(abi.COMPUTE_CAPABILITY_MAJOR),
            self._attribute(abi.COMPUTE_CAPABILITY_MINOR),
        )
        meet(self._uuid())
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device, wanted=f"device {device}")
        self._context = context.value
        self.use()

    def use(self) -> None:
        """Make the context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def release(self) -> None:
        """Give the context back; nothing of this object can be used afterwards."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def memory(self) -> tuple[int, int]:
        """Return the device's free and total memory in bytes."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def load(self, cubin: bytes, label: str) -> Module:
        """Load a cubin.

        Args:
            label: what a message calls it.

        Raises:
            DriverError: for anything but a cubin (PTX would be compiled here), or as the driver says.
        """
        if (cubin[:4], int.from_bytes(cubin[18:20], "little")) != _CUDA_ELF:
            raise DriverError("is no cubin: only machine code is loaded, nothing is compiled", place=label)
        module = c_void_p()
        self._call("cuModuleLoadDataEx", byref(module), cubin, 0, None, None, wanted=label)
        return Module(_given(module))

    def unload(self, module: Module) -> None:
        """Unload a module that no graph holds."""
        self._call("cuModuleUnload", module)

    def function(self, module: Module, entry: str, shared_bytes: int) -> Function:
        """Return a kernel of a module, with leave to use ``shared_bytes`` of dynamic shared memory."""
        found = c_void_p()
        self._call("cuModuleGetFunction", byref(found), module, entry.encode(), wanted=f"the kernel {entry}")
        function = Function(_given(found))
        if shared_bytes > _PLAIN_SHARED_BYTES:
            wanted = f"{shared_bytes} bytes of shared memory for {entry}"
            attribute = abi.MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, attribute, shared_bytes, wanted=wanted)
        return function

    def binary_version(self, function: Function) -> int:
        """Return the architecture that a kernel's machine code was made for: 80 for ``sm_80``."""
        value = c_int()
        self._call("cuFuncGetAttribute", byref(value), abi.BINARY_VERSION, function)
        return value.value

    def launch(
        self, function: Function, grid: int, threads: int, shared_bytes: int, stream: Stream, block: bytes
    ) -> None:
        """Launch ``grid`` blocks of ``threads``.

        Args:
            block: the parameters, laid out as the cubin declares them. It is passed as one buffer with
                its size, so that the driver itself compares it with the cubin: with an array of
                pointers, one too few would be read from beyond the array's end.
        """
        size = c_size_t(len(block))
        extra = (c_void_p * 5)(
            abi.PARAM_BUFFER_POINTER,
            ctypes.cast(c_char_p(block), c_void_p),
            abi.PARAM_BUFFER_SIZE,
            ctypes.addressof(size),
            None,
        )
        wanted = f"{grid} blocks of {threads} threads, {len(block)} bytes of parameters"
        self._call(
            "cuLaunchKernel", function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, None, extra,
            wanted=wanted,
        )  # fmt: skip

    def synchronize(self, stream: Stream) -> None:
        """Wait for a stream; an error of a kernel on it is raised here."""
        self._call("cuStreamSynchronize", stream)

    def capturing(self, stream: Stream) -> bool:
        """Tell whether what is put on ``stream`` is recorded; a capture that was invalidated is none."""
        status = c_int()
        self._call("cuStreamIsCapturing", stream, byref(status))
        return status.value == abi.CAPTURE_ACTIVE

    def _uuid(self) -> str:
        """Return the device's UUID; an instance of a partitioned GPU has one of its own."""
        found = abi.Uuid()
        self._call("cuDeviceGetUuid_v2", byref(found), self._device)
        return f"GPU-{uuid.UUID(bytes=found.raw)}"

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), attribute, self._device)
        return value.value

    def _call(self, name: str, *arguments: Any, wanted: str = "") -> None:
        status = self._functions[name](*arguments)
        if status != abi.SUCCESS:
            kind, text = self._explain("cuGetErrorName", status), self._explain("cuGetErrorString", status)
            found = f"{name} failed with {kind or 'an unknown error'} ({status})"
            found += f": {text}" if text else ""
            raise DriverError(f"{found}; wanted {wanted}" if wanted else found)

    def _explain(self, name: str, status: int) -> str:
        text = c_char_p()
        if self._functions[name](status, byref(text)) != abi.SUCCESS or text.value is None:
            return ""
        return text.value.decode("ascii", "replace")


def _forbid_jit() -> None:
    """Set what the driver reads when it is initialised; nothing in the image may be compiled."""
    for name in _FORCES_JIT:
        os.environ.pop(name, None)
    os.environ.update(_NO_JIT)


def _link(library: str) -> dict[str, Any]:
    """Return the functions of `abi.SIGNATURES` by exported name."""
    hint = "the container needs the host's driver: docker run --gpus all"
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        raise HostUnfitError(f"cannot be loaded: {error}", place=library, hint=hint) from None
    functions: dict[str, Any] = {}
    for name, arguments in abi.SIGNATURES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise HostUnfitError(f"needs a CUDA driver with {name}", place=library, hint=hint) from None
        function.argtypes, function.restype = arguments, c_int
        functions[name] = function
    return functions


def _given(handle: c_void_p) -> int:
    """Return a handle's number; the driver never gives a null one with success."""
    if not handle.value:
        raise DriverError("the driver reported success and returned no handle")
    return handle.value


def _spell(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
