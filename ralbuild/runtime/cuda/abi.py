"""What of the CUDA driver's binary interface is used: exported names, argument types, numbers.

Names are those that ``cuda.h`` of CUDA 12.2 maps its functions to (``cuMemAlloc`` is exported as
``cuMemAlloc_v2``); the unversioned ones are older functions with other arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any, Final

SUCCESS: Final = 0

COMPUTE_CAPABILITY_MAJOR: Final = 75
COMPUTE_CAPABILITY_MINOR: Final = 76
"""``CUdevice_attribute``."""

BINARY_VERSION: Final = 6
MAX_DYNAMIC_SHARED_SIZE_BYTES: Final = 8
"""``CUfunction_attribute``."""

CAPTURE_ACTIVE: Final = 1
"""``CUstreamCaptureStatus``."""

PARAM_BUFFER_POINTER: Final = 1
PARAM_BUFFER_SIZE: Final = 2
"""Keys of ``cuLaunchKernel``'s last argument; 0 ends the list."""

_HANDLE = c_void_p

Uuid = c_char * 16
"""``CUuuid``."""

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuModuleLoadDataEx": (POINTER(_HANDLE), c_void_p, c_uint, POINTER(c_int), POINTER(c_void_p)),
    "cuModuleUnload": (_HANDLE,),
    "cuModuleGetFunction": (POINTER(_HANDLE), _HANDLE, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, _HANDLE),
    "cuFuncSetAttribute": (_HANDLE, c_int, c_int),
    "cuLaunchKernel": (_HANDLE, *(c_uint,) * 7, _HANDLE, POINTER(c_void_p), POINTER(c_void_p)),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamIsCapturing": (_HANDLE, POINTER(c_int)),
}
"""Exported name to argument types; every function returns a ``CUresult``."""
