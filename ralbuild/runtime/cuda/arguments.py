"""A kernel's parameters as the bytes that its cubin expects."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from ralbuild.contract.bundle import Kernel, Param
from ralbuild.runtime.errors import BindingError

_FLOATS = {"fp32": "<f", "fp64": "<d"}


def parameter_block(kernel: Kernel, values: Mapping[str, int | float]) -> bytes:
    """Return the parameter block of a launch.

    Args:
        kernel: its ``params`` have the offsets and sizes of the cubin, which the build's gate compared.
        values: by buffer name: the address of a buffer in device memory, or a number. Triton's hidden
            pointers are null: the build refuses a kernel that needs scratch memory.

    Raises:
        BindingError: naming the parameter, what it needs and what it got.
    """
    last = kernel.params[-1]
    block = bytearray(last.offset + last.size)
    for param in kernel.params:
        if not param.hidden:
            place = f"{kernel.name}: {param.name}"
            if param.buffer not in values:
                raise BindingError(f"needs a value for {param.buffer!r}, found none", place=place)
            encoded = _encode(param, values[param.buffer], place)
            block[param.offset : param.offset + param.size] = encoded
    return bytes(block)


def _encode(param: Param, value: int | float, place: str) -> bytes:
    """Return ``param.size`` bytes, little-endian as the device is."""
    if param.type in _FLOATS:
        try:
            return struct.pack(_FLOATS[param.type], value)
        except OverflowError:
            raise BindingError(
                f"needs a number that {param.type} holds, found {value}", place=place
            ) from None
    if not isinstance(value, int):
        raise BindingError(f"needs a whole number, found {value!r}", place=place)
    pointer = param.type.startswith("*")
    bits = 8 * param.size
    signed = param.type.startswith("i")
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (int(pointer), (1 << bits) - 1)
    if not least <= value <= most:
        raise BindingError(f"needs {'an address' if pointer else param.type}, found {value}", place=place)
    if value % param.align:
        what = f"the address 0x{value:x}" if pointer else value
        raise BindingError(
            f"needs a multiple of {param.align}, as it was compiled; found {what}", place=place
        )
    return value.to_bytes(param.size, "little", signed=signed)
