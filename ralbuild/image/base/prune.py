"""Which files of a wheel a server never needs. Conservative: whole subsystems stay unless listed here.

tests/test_base_tree.py imports every model family of transformers, and the server's packages, from a
base without these files.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

_ANY_WHEEL = (
    "*.a",
    "*.pyi",
    "*.pxd",
    "*.pyx",
    "*.h",
    "*.hpp",
    "*.cuh",
    "*.cmake",
    "*/__pycache__/*",
    "*.pyc",
    "*/py.typed",
    "*.dist-info/RECORD",  # lists files that are pruned here; the wheel's own sha256 is in base.json
    "*.dist-info/direct_url.json",
    "*.dist-info/REQUESTED",
)
_BY_WHEEL = {
    "mpmath": ("mpmath/tests/*",),
    "nvidia-cublas-cu12": ("*/libnvblas.so.*",),  # for programs that call a BLAS of the CPU
    "nvidia-cuda-cupti-cu12": (
        "*/libcheckpoint.so",
        "*/libnvperf_*.so",
        "*/libpcsamplingutil.so",
    ),  # profilers
    # torch is linked to NVRTC, so its library stays; without its builtins it refuses to compile anything.
    "nvidia-cuda-nvrtc-cu12": ("*/libnvrtc-builtins.so*",),
    "nvidia-cufft-cu12": ("*/libcufftw.so.*",),  # FFTW's interface
    "nvidia-cusolver-cu12": ("*/libcusolverMg.so.*",),  # several GPUs at one matrix
    "nvidia-nvjitlink-cu12": ("*/res/*",),
    "numpy": (
        "numpy/*/tests/*",
        "numpy/tests/*",
        "numpy/_core/include/*",
        "numpy/_core/lib/*",
        "numpy/distutils/*",
        "numpy/f2py/*",
        "numpy/random/_examples/*",
        "numpy/random/lib/*",
    ),
    "regex": ("regex/tests/*",),
    "sympy": ("isympy.py", "sympy/*/tests/*", "sympy/*/benchmarks/*", "sympy/benchmarks/*"),
    "torch": (
        "torch/bin/*",
        "torch/include/*",
        "torch/share/*",
        "torch/test/*",
        "torch/lib/libaoti_custom_ops.so",
        "torch/lib/libbackend_with_compiler.so",
        "torch/lib/libjitbackend_test.so",
        "torch/lib/libshm/*",
        "torch/lib/libshm_windows/*",
        "torch/lib/libtorchbind_test.so",
        "torchgen/packaged/*",
    ),
    "triton": (
        "triton/FileCheck",
        "triton/_C/libproton.so",
        "triton/backends/*/include/*",
        "triton/backends/*/lib/*",
        "triton/backends/nvidia/bin/*",
        "triton/instrumentation/*",
        "triton/plugins/*",
        "triton/profiler/*",
    ),
    "transformers": ("transformers/models/*/modular_*.py",),  # what modeling_*.py is generated from
}
_NVIDIA = ("nvidia/__init__.py", "nvidia/*/include/*")
"""Every wheel of NVIDIA's brings the first; without it the folder is a namespace, and nothing imports it."""
_KEPT = ("torch/bin/torch_shm_manager",)
"""Tensors shared between processes need it; without it `import torch` fails on some paths."""


def keeps(wheel: str) -> Callable[[str], bool]:
    """Return a function that tells whether a file of ``wheel`` (normalised name) goes into the base.

    It takes the path below the packages folder. Patterns are those of `fnmatch`: ``*`` matches slashes.
    """
    shared = _NVIDIA if wheel.startswith("nvidia-") else ()
    patterns = (*_ANY_WHEEL, *shared, *_BY_WHEEL.get(wheel, ()))

    def keep(path: str) -> bool:
        return path in _KEPT or not any(fnmatchcase(path, pattern) for pattern in patterns)

    return keep
