"""Drop what only a debugger reads from a shared library: its full symbol table and debug sections.

Wheels of torch carry about 100 MB of it. The loader needs none: dynamic symbols, relocations and unwind
tables lie in loaded segments, which stay byte for byte where they are. Written by hand because a machine
without binutils has no ``strip``, and because its output would depend on that program's version.
Field names are those of the ELF-64 specification.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bit, little endian
_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SHOFF_AT = 40
_PT_LOAD = 1
_SHT_SYMTAB, _SHT_NOBITS = 2, 8
_SHF_ALLOC = 2


@dataclass(frozen=True, slots=True)
class _Section:
    """One section header."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int

    @property
    def in_tail(self) -> bool:
        """True for bytes of the file that are in no loaded segment."""
        return not self.flags & _SHF_ALLOC and self.type != _SHT_NOBITS and self.size > 0

    def packed(self) -> bytes:
        return _SECTION_HEADER.pack(*dataclasses.astuple(self))


def strip_symbols(path: Path) -> int:
    """Shorten the ELF file ``path`` in place; return the bytes saved, 0 when nothing is safe to drop."""
    with path.open("r+b") as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        head = os.pread(fd, _FILE_HEADER.size, 0)
        if len(head) < _FILE_HEADER.size or not head.startswith(_MAGIC):
            return 0
        fields = _FILE_HEADER.unpack(head)
        phoff, shoff, phnum, shnum, names = fields[5], fields[6], fields[10], fields[12], fields[13]
        sections = _sections(fd, shoff, shnum)
        dropped = _dropped(fd, sections, names)
        end = _loaded_end(fd, phoff, phnum)
        tail = [(i, item) for i, item in enumerate(sections) if item.in_tail]
        if not dropped or any(item.offset < end for _, item in tail) or shoff < end:
            return 0
        kept = {i: os.pread(fd, item.size, item.offset) for i, item in tail if i not in dropped}
        text = _tail(sections, kept, dropped, end)
        table_at = end + len(text) - shnum * _SECTION_HEADER.size
        if end + len(text) >= size:
            return 0
        os.ftruncate(fd, end)
        os.pwrite(fd, text, end)
        os.pwrite(fd, struct.pack("<Q", table_at), _SHOFF_AT)
    return size - end - len(text)


def _sections(fd: int, offset: int, count: int) -> list[_Section]:
    data = os.pread(fd, count * _SECTION_HEADER.size, offset)
    return [_Section(*fields) for fields in _SECTION_HEADER.iter_unpack(data)]


def _dropped(fd: int, sections: list[_Section], names_index: int) -> set[int]:
    """Return the numbers of the symbol tables, their strings, and the debug sections."""
    if names_index >= len(sections):
        return set()
    names = os.pread(fd, sections[names_index].size, sections[names_index].offset)
    found = set()
    for i, item in enumerate(sections):
        if item.type == _SHT_SYMTAB:
            found |= {i, item.link}
        elif item.in_tail and names.startswith((b".debug_", b".zdebug_"), item.name):
            found.add(i)
    return found - {names_index}


def _loaded_end(fd: int, offset: int, count: int) -> int:
    """Return the first byte after every segment, loaded or not, and after the program headers."""
    end = offset + count * _PROGRAM_HEADER.size
    data = os.pread(fd, count * _PROGRAM_HEADER.size, offset)
    for _, _, start, _, _, size, _, _ in _PROGRAM_HEADER.iter_unpack(data):
        end = max(end, start + size)
    return end


def _tail(sections: list[_Section], kept: dict[int, bytes], dropped: set[int], start: int) -> bytes:
    """Return what follows the segments: kept sections, then the section table.

    A dropped section becomes a null entry, so that the numbers by which others refer to each other hold.
    """
    out = bytearray()
    table = bytearray()
    for i, item in enumerate(sections):
        if i in dropped:
            table += bytes(_SECTION_HEADER.size)
            continue
        offset = item.offset
        if i in kept:
            out += bytes(-(start + len(out)) % max(item.align, 1))
            offset = start + len(out)
            out += kept[i]
        table += dataclasses.replace(item, offset=offset).packed()
    out += bytes(-(start + len(out)) % 8)
    return bytes(out + table)
