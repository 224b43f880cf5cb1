"""A shorter import of torch, for processes that compute and never trace."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

META_KERNELS = "torch._meta_registrations"
"""Shape rules of several thousand operations for tensors without memory: a fifth of torch's import. Our
decoder makes no such tensor; transformers' models do."""


def import_torch() -> None:
    """Import torch without `META_KERNELS`, unless it is imported already."""
    if "torch" in sys.modules:
        return
    sys.modules[META_KERNELS] = ModuleType(META_KERNELS)
    try:
        importlib.import_module("torch")
    finally:
        # Whoever imports it by name gets the real one.
        del sys.modules[META_KERNELS]
