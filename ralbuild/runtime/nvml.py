"""The door to ``libnvidia-ml.so.1``: what a GPU's memory holds, as the driver counts it.

It comes with the driver, is asked from any process, and takes no memory of a device. Names, structures and
numbers are those of ``nvml.h`` of CUDA 12.2; tests/test_runtime_nvml.py compares them with the header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any, Final

LIBRARY = "libnvidia-ml.so.1"

SUCCESS: Final = 0
INSUFFICIENT_SIZE: Final = 7
"""``nvmlReturn_t``."""

NOT_AVAILABLE: Final = (1 << 64) - 1
"""``NVML_VALUE_NOT_AVAILABLE`` in a field of 64 bits: the driver does not say it."""

_MOST_TRIES = 5
_ROOM = 16
"""Processes asked for beyond those that were there a moment ago."""


class MemoryV1(ctypes.Structure):
    """``nvmlMemory_t``."""

    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class MemoryV2(ctypes.Structure):
    """``nvmlMemory_v2_t``."""

    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class ProcessV1(ctypes.Structure):
    """``nvmlProcessInfo_v1_t``."""

    _fields_ = (("pid", c_uint), ("usedGpuMemory", c_ulonglong))


class ProcessV2(ctypes.Structure):
    """``nvmlProcessInfo_v2_t``, which version 3 of the function fills too."""

    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


MEMORY_V2: Final = ctypes.sizeof(MemoryV2) | 2 << 24
"""``nvmlMemory_v2``: the version that the caller writes."""

_PROCESSES: Mapping[str, Any] = {
    "nvmlDeviceGetComputeRunningProcesses_v3": ProcessV2,
    "nvmlDeviceGetComputeRunningProcesses_v2": ProcessV2,
    "nvmlDeviceGetComputeRunningProcesses": ProcessV1,
}
"""Newest first; the last one has another structure."""

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "nvmlInit_v2": (),
    "nvmlShutdown": (),
    "nvmlErrorString": (c_int,),
    "nvmlDeviceGetHandleByUUID": (c_char_p, POINTER(c_void_p)),
    "nvmlDeviceGetMemoryInfo": (c_void_p, POINTER(MemoryV1)),
    "nvmlDeviceGetMemoryInfo_v2": (c_void_p, POINTER(MemoryV2)),
    **{name: (c_void_p, POINTER(c_uint), POINTER(kind)) for name, kind in _PROCESSES.items()},
}
"""Exported name to argument types; every function but ``nvmlErrorString`` returns an ``nvmlReturn_t``."""

_LATER = ("nvmlDeviceGetMemoryInfo_v2", *list(_PROCESSES)[:-1])
"""Functions that an older library lacks."""


class NvmlError(Exception):
    """The library is missing, or refused a call; the message says which."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device. ``reserved`` is the driver's own share; an old library counts it as used: 0 then."""

    total: int
    reserved: int
    free: int
    used: int


class Nvml:
    """The library, initialised. One thread at a time."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Open the library.

        Raises:
            NvmlError: when it is missing, too old, or finds no driver.
        """
        try:
            loaded = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"cannot be loaded: {error}") from None
        self._functions: dict[str, Any] = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(loaded, name, None)
            if function is not None:
                function.argtypes = arguments
                function.restype = c_char_p if name == "nvmlErrorString" else c_int
                self._functions[name] = function
            elif name not in _LATER:
                raise NvmlError(f"needs an NVIDIA driver with {name}")
        self._call("nvmlInit_v2")

    def close(self) -> None:
        """Give the library back."""
        self._call("nvmlShutdown")

    def memory(self, uuid: str) -> DeviceMemory:
        """Return what a device holds.

        Args:
            uuid: as the driver writes it, ``GPU-...`` or ``MIG-...``.

        Raises:
            NvmlError: for an unknown device, or as the driver says.
        """
        handle = self._handle(uuid)
        if "nvmlDeviceGetMemoryInfo_v2" in self._functions:
            found = MemoryV2(version=MEMORY_V2)
            self._call("nvmlDeviceGetMemoryInfo_v2", handle, byref(found))
            return DeviceMemory(found.total, found.reserved, found.free, found.used)
        old = MemoryV1()
        self._call("nvmlDeviceGetMemoryInfo", handle, byref(old))
        return DeviceMemory(old.total, 0, old.free, old.used)

    def processes(self, uuid: str) -> dict[int, int]:
        """Return the bytes of each compute process on a device, by number as the host counts processes.

        Those whose bytes the driver does not say are left out. Raises as `memory`.
        """
        handle = self._handle(uuid)
        name = next(name for name in _PROCESSES if name in self._functions)
        room = 0
        for _ in range(_MOST_TRIES):
            count, rows = c_uint(room), (_PROCESSES[name] * max(room, 1))()
            status = self._functions[name](handle, byref(count), rows)
            if status == SUCCESS:
                found = rows[: min(count.value, room)]
                return {row.pid: row.usedGpuMemory for row in found if row.usedGpuMemory != NOT_AVAILABLE}
            if status != INSUFFICIENT_SIZE:
                raise NvmlError(f"{name} failed: {self._explain(status)}")
            room = count.value + _ROOM  # more may come before the next call
        raise NvmlError(f"{name} asked for more room {_MOST_TRIES} times")

    def _handle(self, uuid: str) -> c_void_p:
        # Asked each time: a device may be lost and come back under another handle.
        handle = c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(handle), wanted=uuid)
        return handle

    def _call(self, name: str, *arguments: Any, wanted: str = "") -> None:
        status = self._functions[name](*arguments)
        if status != SUCCESS:
            place = f" for {wanted}" if wanted else ""
            raise NvmlError(f"{name}{place} failed: {self._explain(status)}")

    def _explain(self, status: int) -> str:
        text = self._functions["nvmlErrorString"](status)
        return f"{text.decode('ascii', 'replace') if text else 'unknown error'} ({status})"
