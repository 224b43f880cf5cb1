"""Which line of a kernel's source each line of its PTX comes from.

What ships is compiled without line information. The map comes from a second compile with it, whose text
without the added directives must be the shipped PTX byte for byte; it is kept in the cache and never ships.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Event

from ralbuild.compile.aot import Store, kernel_key
from ralbuild.compile.launch import run_worker
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.toolchain import Toolchain
from ralbuild.contract.codec import FormatError, canonical_json, parse_json, sha256_hex
from ralbuild.errors import CompileError

SCHEMA = "ralbuild.lines/1"
_OUTPUT = "lines.json"
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s")
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')
_KERNEL = "kernel.py"
"""What the worker calls every kernel's file."""


@dataclass(frozen=True, slots=True)
class SourceLines:
    """The map of one kernel for one architecture.

    Attributes:
        lines: line of the PTX to (file, line of it); absent where no source line stands behind it.
        texts: the kernel file's lines.
    """

    filename: str
    lines: Mapping[int, tuple[str, int]]
    texts: tuple[str, ...]

    def place(self, line: int) -> str:
        """Return ``file:line`` of a line of the PTX; empty when it is not known."""
        found = self.lines.get(line)
        return f"{found[0]}:{found[1]}" if found else ""

    def text(self, line: int) -> str:
        """Return the source line behind a line of the PTX, without the blanks around it."""
        file, number = self.lines.get(line, ("", 0))
        return self.texts[number - 1].strip() if file == self.filename and number <= len(self.texts) else ""


def source_lines(spec: KernelSpec, arch: str, ptx: bytes, toolchain: Toolchain, cache: Store) -> SourceLines:
    """Return the map for a PTX, from the cache or by compiling once more.

    Raises:
        CompileError: when the second compile gives another PTX.
    """
    identity = {"schema": SCHEMA, "kernel": kernel_key(spec, arch, toolchain), "ptx": sha256_hex(ptx)}

    def miss() -> Mapping[str, bytes]:
        annotated = run_worker(spec, arch, toolchain, stop=Event(), lines=True).ptx
        found = read_lines(ptx.decode("utf-8", "replace"), annotated.decode("utf-8", "replace"))
        if found is None:
            message = f"{spec.name} for {arch}: compiled with line information it is another PTX"
            raise CompileError(message, place=spec.filename)
        return {_OUTPUT: canonical_json([[at, file, line] for at, (file, line) in sorted(found.items())])}

    key = sha256_hex(canonical_json(identity))
    label = f"source lines of {spec.name} for {arch}"
    outputs = cache.fetch(key, miss, label, lambda outputs: _parse(outputs.get(_OUTPUT, b"")) is not None)
    lines = {
        at: (spec.filename if file == _KERNEL else file, line)
        for at, (file, line) in (_parse(outputs[_OUTPUT]) or {}).items()
    }
    return SourceLines(spec.filename, lines, tuple(spec.source.decode("utf-8", "replace").splitlines()))


def _parse(data: bytes) -> dict[int, tuple[str, int]] | None:
    try:
        return {int(at): (str(file), int(line)) for at, file, line in parse_json(data, _OUTPUT)}
    except (FormatError, TypeError, ValueError):
        return None


def read_lines(ptx: str, annotated: str) -> dict[int, tuple[str, int]] | None:
    """Map the lines of ``ptx`` by the directives of the same text with line information.

    Returns:
        Line of ``ptx`` to (file name, line); None when the texts differ in more than the added directives.
    """
    wanted = ptx.splitlines()
    given = annotated.splitlines()
    files = {number: path.rpartition("/")[2] for number, path in _matches(_FILE, given)}
    found: dict[int, tuple[str, int]] = {}
    place = ("", 0)
    at = 0
    for line in given:
        located = _LOC.match(line)
        if located:
            place = (files.get(located[1], ""), int(located[2]))
        elif at < len(wanted) and line == wanted[at]:
            at += 1
            if place[0] and place[1]:
                found[at] = place
        elif not _is_added(line):
            return None
    return found if at == len(wanted) else None


def _matches(pattern: re.Pattern[str], lines: Iterable[str]) -> list[tuple[str, str]]:
    return [(found[1], found[2]) for line in lines if (found := pattern.match(line))]


_ADDED = re.compile(r"\s*(\$L__\w+:|\.(file|section|b8|b16|b32|b64|loc)\b.*|[{}]|//.*)?\s*(//.*)?")


def _is_added(line: str) -> bool:
    """Tell whether a line is one that line information adds: labels, files and debug sections."""
    return _ADDED.fullmatch(line) is not None
