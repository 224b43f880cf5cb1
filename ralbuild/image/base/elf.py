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

MAGIC = b"\x7fELF\x02\x01"  # 64 bit, little endian
FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SHOFF_AT = 40
_SHT_NULL, _SHT_SYMTAB, _SHT_NOBITS = 0, 2, 8
_SHF_ALLOC = 2
_MAX_ALIGN = 4096


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
        return not self.flags & _SHF_ALLOC and self.type not in (_SHT_NULL, _SHT_NOBITS) and self.size > 0

    def packed(self) -> bytes:
        return _SECTION_HEADER.pack(*dataclasses.astuple(self))


def strip_symbols(path: Path) -> int:
    """Shorten the ELF file ``path`` in place; return the bytes saved, 0 when nothing is safe to drop.

    A file whose headers do not describe it, or that keeps sections between its segments, stays as it is.
    """
    with path.open("r+b") as file:
        fd = file.fileno()
        try:
            plan = _plan(fd)
        except struct.error:  # a header that the file is too short for
            return 0
        size = os.fstat(fd).st_size
        if plan is None or plan.end + len(plan.tail) >= size:
            return 0
        os.ftruncate(fd, plan.end)
        os.pwrite(fd, plan.tail, plan.end)
        os.pwrite(fd, struct.pack("<Q", plan.table_at), _SHOFF_AT)
        return size - plan.end - len(plan.tail)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The new file: the old one up to ``end``, then ``tail``, with the section table at ``table_at``."""

    end: int
    tail: bytes
    table_at: int


def _plan(fd: int) -> _Plan | None:
    size = os.fstat(fd).st_size
    head = os.pread(fd, FILE_HEADER.size, 0)
    if not head.startswith(MAGIC):
        return None
    fields = FILE_HEADER.unpack(head)
    phoff, shoff, phnum, shnum, names = fields[5], fields[6], fields[10], fields[12], fields[13]
    sections = [
        _Section(*item)
        for item in _SECTION_HEADER.iter_unpack(_read(fd, shoff, shnum * _SECTION_HEADER.size))
    ]
    dropped = _dropped(fd, sections, names)
    end = _segments_end(fd, phoff, phnum)
    tail = {i: item for i, item in enumerate(sections) if item.in_tail}
    if not dropped or min(shoff, *(item.offset for item in tail.values())) < end or end > size:
        return None
    if any(item.align > _MAX_ALIGN for item in tail.values()):
        return None
    kept = {i: _read(fd, item.offset, item.size) for i, item in tail.items() if i not in dropped}
    text = _tail(sections, kept, dropped, end)
    return _Plan(end, text, end + len(text) - shnum * _SECTION_HEADER.size)


def _read(fd: int, offset: int, size: int) -> bytes:
    if offset + size > os.fstat(fd).st_size:
        raise struct.error("beyond the end of the file")
    return os.pread(fd, size, offset)


def _dropped(fd: int, sections: list[_Section], names_index: int) -> set[int]:
    """Return the numbers of the symbol tables, their strings, and the debug sections."""
    if names_index >= len(sections):
        return set()
    names = _read(fd, sections[names_index].offset, sections[names_index].size)
    found = set()
    for i, item in enumerate(sections):
        if item.type == _SHT_SYMTAB:
            found |= {i, item.link}
        elif item.in_tail and names.startswith((b".debug_", b".zdebug_"), item.name):
            found.add(i)
    return {i for i in found - {names_index} if i < len(sections) and sections[i].in_tail}


def _segments_end(fd: int, offset: int, count: int) -> int:
    """Return the first byte after every segment, loaded or not, and after the program headers."""
    data = _read(fd, offset, count * PROGRAM_HEADER.size)
    ends = [start + size for _, _, start, _, _, size, _, _ in PROGRAM_HEADER.iter_unpack(data)]
    end: int = max([offset + len(data), *ends])
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
