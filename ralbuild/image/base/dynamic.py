"""What an ELF file asks of the dynamic loader: libraries by name, where to look, versions of their symbols.

Read from the dynamic segment, as the loader does; section tables are not looked at. Names of fields
and numbers are those of the ELF-64 specification and the GNU extensions (symbol versions).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ralbuild.image.base.elf import FILE_HEADER, MAGIC, PROGRAM_HEADER

_ET_EXEC, _ET_DYN = 2, 3
_EM_X86_64 = 62
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DYNAMIC_ENTRY = struct.Struct("<QQ")
_VERNEED = struct.Struct("<HHIII")  # version, number of entries, file, first entry, next
_VERNEED_ENTRY = struct.Struct("<IHHII")  # hash, flags, index, name, next
_VERDEF = struct.Struct("<HHHHIII")  # version, flags, index, number of names, hash, first name, next
_VERDEF_NAME = struct.Struct("<II")
_WEAK = 2
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29
_VERDEFS, _VERDEF_COUNT, _VERNEEDS, _VERNEED_COUNT = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_MAX_TABLE = 64 << 20
"""Bytes of a string table that are read; the largest of torch has 20 million."""
_MAX_ENTRIES = 65536


class DamagedElfError(Exception):
    """The file starts as an ELF file for this machine and is none that a loader could read."""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What one file asks for and gives.

    Attributes:
        needed: names of libraries, in order.
        folders: where the file itself says to look, in order; may hold ``$ORIGIN``.
        wanted: versions of symbols that it needs, by library name.
        defined: versions of symbols that it has; empty for a file without any.
    """

    needed: tuple[str, ...]
    folders: tuple[str, ...]
    wanted: dict[str, tuple[str, ...]]
    defined: frozenset[str]


def read_dynamic(path: Path) -> Dynamic | None:
    """Return what the x86-64 program or library ``path`` asks of the loader; None for any other file.

    Raises:
        DamagedElfError: when its headers lead outside the file or make no sense.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        head = os.pread(fd, FILE_HEADER.size, 0)
        if not head.startswith(MAGIC):
            return None
        if len(head) < FILE_HEADER.size:
            raise DamagedElfError("ends within its header")
        fields = FILE_HEADER.unpack(head)
        if fields[1] not in (_ET_EXEC, _ET_DYN) or fields[2] != _EM_X86_64:
            return None
        return _Reader(fd, fields[5], fields[10]).dynamic()
    except (struct.error, UnicodeDecodeError, OverflowError, OSError):
        raise DamagedElfError("its headers lead outside of it") from None
    finally:
        os.close(fd)


class _Reader:
    """One open file; addresses are turned into places of the file by its loaded segments."""

    def __init__(self, fd: int, phoff: int, phnum: int) -> None:
        self._fd = fd
        headers = [*PROGRAM_HEADER.iter_unpack(self._read(phoff, phnum * PROGRAM_HEADER.size))]
        # type, flags, offset, address, physical address, size in the file, size in memory, alignment
        self._loaded = [(h[3], h[2], h[5]) for h in headers if h[0] == _PT_LOAD]
        self._dynamic = next(((h[2], h[5]) for h in headers if h[0] == _PT_DYNAMIC), None)
        self._strings = b""

    def dynamic(self) -> Dynamic:
        tags: dict[int, list[int]] = {}
        if self._dynamic is not None:
            for tag, value in _DYNAMIC_ENTRY.iter_unpack(self._read(*self._dynamic)):
                if tag == 0:
                    break
                tags.setdefault(tag, []).append(value)
        if _STRTAB in tags:
            self._strings = self._read(self._place(tags[_STRTAB][0]), tags.get(_STRSZ, [0])[0])
        paths = tags.get(_RUNPATH) or tags.get(_RPATH) or []
        return Dynamic(
            needed=tuple(map(self._string, tags.get(_NEEDED, []))),
            folders=tuple(part for value in paths for part in self._string(value).split(":") if part),
            wanted=dict(self._wanted(tags)),
            defined=frozenset(self._defined(tags)),
        )

    def _wanted(self, tags: dict[int, list[int]]) -> Iterator[tuple[str, tuple[str, ...]]]:
        for at, fields in self._chain(tags, _VERNEEDS, _VERNEED_COUNT, _VERNEED, 4):
            names = []
            place = at + fields[3]
            for _ in range(fields[1]):
                _, flags, _, name, step = _VERNEED_ENTRY.unpack(self._read(place, _VERNEED_ENTRY.size))
                if not flags & _WEAK:
                    names.append(self._string(name))
                place += step
            yield self._string(fields[2]), tuple(names)

    def _defined(self, tags: dict[int, list[int]]) -> Iterator[str]:
        for at, fields in self._chain(tags, _VERDEFS, _VERDEF_COUNT, _VERDEF, 6):
            name, _ = _VERDEF_NAME.unpack(self._read(at + fields[5], _VERDEF_NAME.size))
            yield self._string(name)

    def _chain(
        self, tags: dict[int, list[int]], table: int, count: int, record: struct.Struct, step: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield place and fields of each record; its field number ``step`` leads to the next."""
        if table not in tags:
            return
        entries = tags.get(count, [0])[0]
        if entries > _MAX_ENTRIES:
            raise struct.error("more symbol versions than a file can have")
        at = self._place(tags[table][0])
        for _ in range(entries):
            fields = record.unpack(self._read(at, record.size))
            yield at, fields
            at += fields[step]

    def _place(self, address: int) -> int:
        for start, offset, size in self._loaded:
            if start <= address < start + size:
                return int(address - start + offset)
        raise struct.error("an address in no segment")

    def _string(self, offset: int) -> str:
        end = self._strings.find(b"\0", offset)
        if offset >= len(self._strings) or end < 0:
            raise struct.error("a name outside of the string table")
        return self._strings[offset:end].decode("utf-8")

    def _read(self, offset: int, size: int) -> bytes:
        if size > _MAX_TABLE:
            raise struct.error("a table larger than any")
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise struct.error("beyond the end of the file")
        return data
