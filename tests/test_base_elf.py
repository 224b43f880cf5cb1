"""Stripping shared libraries: nothing that a loader reads changes."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ralbuild.image.base.elf import strip_symbols

LIBRARY = next(Path(yaml.__file__).parent.glob("_yaml.*.so"))
"""A real library with a symbol table and debug sections, 2.4 MB of them."""


def segments(data: bytes) -> list[tuple[tuple[int, ...], bytes]]:
    """Every program header and the bytes it covers, read as the ELF specification lays them out.

    The place of the section table, in the file header, is blanked: it lies in a segment, no loader reads it.
    """
    data = data[:40] + bytes(8) + data[48:]
    offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    out = []
    for i in range(count):
        header = struct.unpack_from("<IIQQQQQQ", data, offset + i * size)
        out.append((header, data[header[2] : header[2] + header[5]]))
    return out


def sections(data: bytes) -> list[tuple[int, ...]]:
    """Every section header: name, type, flags, address, offset, size, link, info, alignment, entry size."""
    offset, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size) for i in range(count)]


def section_types(data: bytes) -> list[int]:
    return [section[1] for section in sections(data)]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return shutil.copy(LIBRARY, tmp_path / "copy.so")


def test_segments_stay_and_the_symbol_table_goes(library: Path) -> None:
    before = library.read_bytes()
    saved = strip_symbols(library)
    after = library.read_bytes()
    assert saved == len(before) - len(after) > 1_000_000
    assert segments(after) == segments(before)
    assert 2 in section_types(before)  # SHT_SYMTAB
    assert 2 not in section_types(after)
    assert section_types(after).count(11) == 1  # SHT_DYNSYM


def test_the_result_depends_on_the_content_alone_and_is_final(library: Path, tmp_path: Path) -> None:
    other = shutil.copy(LIBRARY, tmp_path / "other name.so")
    strip_symbols(library)
    strip_symbols(other)
    assert library.read_bytes() == other.read_bytes()
    assert strip_symbols(library) == 0
    assert library.read_bytes() == other.read_bytes()


def test_a_stripped_library_works(tmp_path: Path) -> None:
    shutil.copytree(LIBRARY.parent, tmp_path / "yaml", ignore=shutil.ignore_patterns("__pycache__"))
    assert strip_symbols(tmp_path / "yaml" / LIBRARY.name)
    code = "import yaml, sys; assert yaml.__file__.startswith(sys.path[0]); print(yaml.load('[1, b]', yaml.CSafeLoader))"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[1, 'b']\n"


def test_exactly_the_symbols_their_strings_and_debug_sections_are_saved(library: Path) -> None:
    data = library.read_bytes()
    found = sections(data)
    names = found[struct.unpack_from("<H", data, 62)[0]]  # e_shstrndx
    symbols = {i for i, section in enumerate(found) if section[1] == 2}  # SHT_SYMTAB
    strings = {found[i][6] for i in symbols}  # sh_link
    debug = {i for i, section in enumerate(found) if data[names[4] + section[0] :].startswith(b".debug_")}
    assert (len(symbols), len(strings), len(debug)) == (1, 1, 7)
    size = sum(found[i][5] for i in symbols | strings | debug)
    # What is left moves together; alignment may win or lose a few bytes.
    assert abs(strip_symbols(library) - size) < 64


@pytest.mark.parametrize(
    "data", [b"", b"text", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(200), b"\x7fELF\x02\x01" + bytes(58)]
)
def test_what_is_no_complete_elf_file_stays(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(data)
    assert strip_symbols(path) == 0
    assert path.read_bytes() == data


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), at_headers=st.booleans())
def test_a_damaged_file_never_fails_and_never_loses_a_segment(
    tmp_path: Path, seed: int, count: int, at_headers: bool
) -> None:
    data = bytearray(LIBRARY.read_bytes())
    rng = random.Random(seed)
    table = struct.unpack_from("<Q", data, 40)[0]
    for _ in range(count):
        place = rng.randrange(16, 64) if at_headers else rng.randrange(table, len(data))
        data[place] = rng.randrange(256)
    path = tmp_path / "damaged.so"
    path.write_bytes(data)
    strip_symbols(path)
    if not at_headers:
        assert segments(path.read_bytes()) == segments(bytes(data))


def test_a_file_cut_anywhere_stays(tmp_path: Path) -> None:
    data = LIBRARY.read_bytes()
    for end in (63, 64, 1000, len(data) // 2, len(data) - 1):
        path = tmp_path / "cut.so"
        path.write_bytes(data[:end])
        assert strip_symbols(path) == 0
        assert path.stat().st_size == end
