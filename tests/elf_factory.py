"""Shared libraries written by hand: as little as a dynamic loader accepts. Numbers are the ELF specification's."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

X86_64, AARCH64 = 62, 183
_HEADERS = 64 + 2 * 56


def elf_hash(name: str) -> int:
    """The hash function of the System V ABI."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


class _Strings:
    def __init__(self) -> None:
        self.data = bytearray(b"\0")

    def add(self, text: str) -> int:
        self.data += text.encode() + b"\0"
        return len(self.data) - len(text.encode()) - 1


def make_library(
    path: Path,
    *,
    needed: Sequence[str] = (),
    runpath: str = "",
    rpath: str = "",
    wanted: Mapping[str, Sequence[str]] | None = None,
    weak: bool = False,
    defined: Sequence[str] = (),
    machine: int = X86_64,
) -> Path:
    """Write a library without code that needs ``needed`` and asks for symbol versions ``wanted`` of them."""
    strings = _Strings()
    tags = [(1, strings.add(name)) for name in needed]
    tags += [(14, strings.add(path.name))]
    tags += [(29, strings.add(runpath))] if runpath else []
    tags += [(15, strings.add(rpath))] if rpath else []
    need = _verneed(strings, wanted or {}, weak=weak)
    defs = _verdef(strings, [path.name, *defined]) if defined else b""
    symbols = bytes(24)  # the null symbol
    hashes = struct.pack("<IIII", 1, 1, 0, 0)
    at = _HEADERS
    blocks = []
    for tag, data in (
        (5, bytes(strings.data)),
        (6, symbols),
        (4, hashes),
        (0x6FFFFFFE, need),
        (0x6FFFFFFC, defs),
    ):
        at += -at % 8
        if data:
            tags.append((tag, at))
            blocks.append((at, data))
            at += len(data)
    tags += [(10, len(strings.data)), (11, 24)]
    tags += [(0x6FFFFFFF, len(wanted or {}))] if need else []
    tags += [(0x6FFFFFFD, len(defined) + 1)] if defs else []
    at += -at % 8
    dynamic = b"".join(struct.pack("<QQ", *item) for item in [*tags, (0, 0)])
    blocks.append((at, dynamic))
    size = at + len(dynamic)
    out = bytearray(size)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    out[:64] = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    out[64:120] = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)
    out[120:176] = struct.pack("<IIQQQQQQ", 2, 6, at, at, at, len(dynamic), len(dynamic), 8)
    for place, data in blocks:
        out[place : place + len(data)] = data
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out)
    path.chmod(0o755)
    return path


def _verneed(strings: _Strings, wanted: Mapping[str, Sequence[str]], *, weak: bool) -> bytes:
    out = b""
    for i, (library, names) in enumerate(wanted.items()):
        step = 0 if i == len(wanted) - 1 else 16 + 16 * len(names)
        out += struct.pack("<HHIII", 1, len(names), strings.add(library), 16, step)
        for k, name in enumerate(names):
            last = k == len(names) - 1
            out += struct.pack("<IHHII", elf_hash(name), 2 * weak, 2, strings.add(name), 0 if last else 16)
    return out


def _verdef(strings: _Strings, names: Sequence[str]) -> bytes:
    out = b""
    for i, name in enumerate(names):
        step = 0 if i == len(names) - 1 else 28
        out += struct.pack("<HHHHIII", 1, int(i == 0), i + 1, 1, elf_hash(name), 20, step)
        out += struct.pack("<II", strings.add(name), 0)
    return out
