"""Refuses every compiled kernel that is not exactly what was asked for.

The worker is not trusted, and Triton's choice of assembler depends on its environment; so the
object itself is read. A cubin of a newer toolkit loads on the build machine's driver and fails on
the one it is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ralbuild.compile.cubin import Cubin, CubinKernel, read_cubin
from ralbuild.compile.spec import KernelSpec, type_align, type_size
from ralbuild.contract.bundle import Param
from ralbuild.errors import CompileError, Problem
from ralbuild.pins import CubinPins

HIDDEN_PARAMS = ("global_scratch", "profile_scratch")
"""Pointers that Triton 3.5 and later add after the user's parameters."""
MAX_PARAM_BYTES = 4096
MAX_SHARED_BYTES = 227 * 1024

_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.MULTILINE)
_TARGET = re.compile(r"^\.target (\S+)$", re.MULTILINE)
_ENTRY = re.compile(r"^\.visible \.entry ([A-Za-z_$][\w$]*)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the gate learned from an object that passed.

    Attributes:
        params: in launch order, hidden ones last, with the cubin's offsets and sizes.
        num_warps: warps per block.
        registers, spill_bytes: per thread.
        symbols: global functions, sorted.
    """

    params: tuple[Param, ...]
    num_warps: int
    registers: int
    spill_bytes: int
    symbols: tuple[str, ...]


def inspect(spec: KernelSpec, arch: str, cubin: bytes, ptx: bytes, pins: CubinPins) -> Inspected:
    """Check one compiled kernel against its spec and the pins.

    Raises:
        CompileError: naming everything that is wrong with it.
    """
    place = f"{spec.filename}: {spec.name} {arch}"
    parsed = read_cubin(cubin, place)
    kernel = next((item for item in parsed.kernels if item.name == spec.entry), None)
    messages = [*_target_problems(parsed, arch, pins), *_ptx_problems(ptx, spec, arch, pins)]
    if kernel is None or len(parsed.kernels) != 1:
        names = ", ".join(item.name for item in parsed.kernels) or "none"
        messages.append(f"needs the one kernel {spec.entry!r}, found {names}")
    else:
        messages += _launch_problems(kernel, spec)
    if messages or kernel is None:
        hint = "the pinned toolchain must be the one that compiles; run `ralbuild doctor`"
        raise CompileError.of([Problem(message, place, hint) for message in messages])
    return Inspected(
        params=tuple(_params(spec)),
        num_warps=spec.num_warps,
        registers=kernel.registers,
        spill_bytes=kernel.frame_bytes,
        symbols=parsed.symbols,
    )


def _target_problems(cubin: Cubin, arch: str, pins: CubinPins) -> Iterator[str]:
    """Compare the ELF header: sm_90 code is compiled as sm_90a, as Triton always does."""
    if cubin.elf_abi != pins.elf_abi:
        yield f"needs ELF ABI {pins.elf_abi}, found {cubin.elf_abi}"
    if cubin.toolkit != pins.toolkit:
        yield f"needs CUDA toolkit {pins.toolkit}, found {cubin.toolkit}"
    found = f"sm_{cubin.sm}{'a' if cubin.arch_specific else ''}"
    if found != _object_arch(arch):
        yield f"needs an object for {_object_arch(arch)}, found {found}"


def _object_arch(arch: str) -> str:
    return f"{arch}a" if int(arch.removeprefix("sm_")) >= 90 else arch


def _ptx_problems(ptx: bytes, spec: KernelSpec, arch: str, pins: CubinPins) -> Iterator[str]:
    text = ptx.decode("utf-8", "replace")
    version, target = _VERSION.search(text), _TARGET.search(text)
    if version is None or target is None:
        yield "the PTX states no version or target"
        return
    if (int(version[1]), int(version[2])) > pins.ptx_max:
        most = ".".join(str(number) for number in pins.ptx_max)
        yield f"needs PTX {most} or older, found {version[1]}.{version[2]}"
    if target[1] != _object_arch(arch):
        yield f"needs PTX for {_object_arch(arch)}, found {target[1]}"
    if _ENTRY.findall(text) != [spec.entry]:
        yield f"needs PTX with the one entry {spec.entry!r}, found {_ENTRY.findall(text)}"


def _launch_problems(kernel: CubinKernel, spec: KernelSpec) -> Iterator[str]:
    params = list(_params(spec))
    wanted = tuple((param.offset, param.size) for param in params)
    if kernel.params != wanted:
        yield (
            f"needs {len(spec.signature)} parameters and {len(HIDDEN_PARAMS)} hidden ones at "
            f"(offset, size) {wanted}, found {kernel.params}"
        )
    elif kernel.param_bytes != wanted[-1][0] + wanted[-1][1] or kernel.param_bytes > MAX_PARAM_BYTES:
        yield f"has a parameter block of {kernel.param_bytes} bytes that its parameters do not fill"
    if kernel.threads != (32 * spec.num_warps, 1, 1):
        yield f"needs blocks of {32 * spec.num_warps} threads, found {kernel.threads}"


def _params(spec: KernelSpec) -> Iterator[Param]:
    """Lay the parameters out as CUDA does: each at a multiple of its own size."""
    end = 0
    visible = [(name, kind, False) for name, kind in spec.signature.items()]
    for name, kind, hidden in [*visible, *((name, "*i8", True) for name in HIDDEN_PARAMS)]:
        size = type_size(kind)
        offset = -(-end // size) * size
        end = offset + size
        align = max(spec.align.get(name, 1), type_align(kind))
        buffer = "" if hidden else spec.buffers[name]
        yield Param(name, kind, buffer, offset, size, align, hidden)
