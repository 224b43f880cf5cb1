"""Reads a cubin: what the ELF file says of its toolkit, architecture, kernels and registers.

The layout is undocumented; it was established on the output of ptxas 12.0 to 13.4 (attribute numbers
as in the public `cuobjdump -elf` listings). Every read is checked against the file's length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ralbuild.errors import CompileError

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_CUDA_MACHINE = 190
_SYMBOL_TABLE = 2
_NO_FILE_BYTES = (0, 8)  # section kinds NULL and NOBITS
_FUNCTION, _GLOBAL = 2, 1
_ARCH_SPECIFIC = 0x800

# Attributes of the .nv.info sections, by EIATTR number.
_FRAME_SIZE, _REQUIRED_THREADS, _PARAMETER, _PARAMETER_BYTES, _REGISTERS = 0x11, 0x10, 0x17, 0x19, 0x2F


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """One kernel of a cubin.

    Attributes:
        name: entry name.
        params: (offset, size) of each parameter, in order, in bytes.
        param_bytes: size of the whole parameter block.
        threads: threads a block must have, as (x, y, z); None when any number will do.
        registers: per thread.
        frame_bytes: local memory per thread; for a Triton kernel, spilled registers.
    """

    name: str
    params: tuple[tuple[int, int], ...]
    param_bytes: int
    threads: tuple[int, int, int] | None
    registers: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A parsed cubin.

    Attributes:
        elf_abi: ABI version of the ELF header: 7 for CUDA 12, 8 for CUDA 13.
        toolkit: ``e_version``: 122 for CUDA 12.2 (with ABI 7).
        sm: architecture, such as 80.
        arch_specific: True for an ``sm_90a`` object, which runs on no other architecture.
        kernels: sorted by name.
        symbols: global functions, sorted.
    """

    elf_abi: int
    toolkit: int
    sm: int
    arch_specific: bool
    kernels: tuple[CubinKernel, ...]
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    data: bytes
    link: int


def read_cubin(data: bytes, place: str) -> Cubin:
    """Parse a cubin.

    Raises:
        CompileError: at ``place``, for anything that is not a whole cubin.
    """
    try:
        return _read(data)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise CompileError(f"is not a readable cubin: {error}", place=place) from None


def _read(data: bytes) -> Cubin:
    head = _ELF_HEADER.unpack_from(data)
    ident, machine, version, flags = head[0], head[2], head[3], head[7]
    if ident[:6] != b"\x7fELF\x02\x01" or machine != _CUDA_MACHINE:
        raise ValueError("no 64-bit CUDA ELF header")
    if head[5] + head[9] * head[10] > len(data):
        raise ValueError("the program headers end after the file")
    sections = _sections(data, offset=head[6], count=head[12], names=head[13])
    functions = _functions(sections)
    return Cubin(
        elf_abi=ident[8],
        toolkit=version,
        sm=flags & 0xFF,
        arch_specific=bool(flags & _ARCH_SPECIFIC),
        kernels=tuple(_kernels(sections, functions)),
        symbols=tuple(sorted(name for name, is_global in functions.values() if is_global)),
    )


def _sections(data: bytes, offset: int, count: int, names: int) -> list[_Section]:
    rows = [_SECTION.unpack_from(data, offset + index * _SECTION.size) for index in range(count)]
    if sum(row[5] for row in rows if row[1] not in _NO_FILE_BYTES) > len(data):
        raise ValueError("the sections are larger than the file")
    table = _body(data, rows[names])
    return [_Section(_name(table, row[0]), row[1], _body(data, row), row[6]) for row in rows]


def _body(data: bytes, row: tuple[int, ...]) -> bytes:
    kind, offset, size = row[1], row[4], row[5]
    if kind in _NO_FILE_BYTES:
        return b""
    if offset + size > len(data):
        raise ValueError("a section ends after the file")
    return data[offset : offset + size]


def _name(table: bytes, offset: int) -> str:
    end = table.index(b"\0", offset)
    return table[offset:end].decode("ascii")


def _functions(sections: list[_Section]) -> dict[int, tuple[str, bool]]:
    """Return the function symbols by number: name, and whether it is global."""
    found: dict[int, tuple[str, bool]] = {}
    for section in sections:
        if section.kind == _SYMBOL_TABLE:
            names = sections[section.link].data
            for index, (name, info, *_) in enumerate(_SYMBOL.iter_unpack(section.data)):
                if info & 0xF == _FUNCTION:
                    found[index] = (_name(names, name), info >> 4 == _GLOBAL)
    return found


def _kernels(sections: list[_Section], functions: dict[int, tuple[str, bool]]) -> Iterator[CubinKernel]:
    common = [section.data for section in sections if section.name == ".nv.info"]
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for number, value in (item for data in common for item in _attributes(data)):
        if number in (_REGISTERS, _FRAME_SIZE):
            symbol, amount = struct.unpack("<II", value)
            name = functions.get(symbol, ("", False))[0]
            (registers if number == _REGISTERS else frames)[name] = amount
    own = {
        section.name.removeprefix(".nv.info."): section.data
        for section in sections
        if section.name.startswith(".nv.info.")
    }
    for name in sorted(own):
        yield _kernel(name, own[name], registers.get(name, 0), frames.get(name, 0))


def _kernel(name: str, info: bytes, registers: int, frame_bytes: int) -> CubinKernel:
    params: dict[int, tuple[int, int]] = {}
    param_bytes = 0
    threads: tuple[int, int, int] | None = None
    for number, value in _attributes(info):
        if number == _PARAMETER:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            params[ordinal] = (offset, packed >> 18)
        elif number == _PARAMETER_BYTES:
            (param_bytes,) = struct.unpack("<H", value)
        elif number == _REQUIRED_THREADS:
            threads = struct.unpack("<3I", value)
    if sorted(params) != list(range(len(params))):
        raise ValueError(f"the parameters of {name!r} are not numbered from 0")
    ordered = tuple(params[ordinal] for ordinal in range(len(params)))
    return CubinKernel(name, ordered, param_bytes, threads, registers, frame_bytes)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Walk an attribute list: a format byte, a number byte, then a value whose size the format gives."""
    at = 0
    while at < len(info):
        form, number, size = struct.unpack_from("<BBH", info, at)
        if form == 4:
            value = info[at + 4 : at + 4 + size]
            if len(value) != size:
                raise ValueError("an attribute ends after its section")
            at += 4 + size
        elif form in (1, 2, 3):  # none, byte and half-word values lie in the size field
            value = info[at + 2 : at + 4]
            at += 4
        else:
            raise ValueError(f"unknown attribute form {form}")
        yield number, value
