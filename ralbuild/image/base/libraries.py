"""Does every shared library of a file tree find the libraries it needs, of versions that fit?

The answer of the dynamic loader, without running anything: each program and library is taken as if it
were loaded by itself, so what it needs must be in a folder that it names or in the loader's own. That
is stricter than a run in which another library happened to be loaded before, and it reaches what no
test imports. ``/etc/ld.so.cache`` is not read: a base has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ralbuild.errors import ImageError, Problem
from ralbuild.image.base.dynamic import DamagedElfError, Dynamic, read_dynamic
from ralbuild.image.treepython import LIBRARY_DIRS, inside

_SHOWN = 20
_ORIGINS = ("$ORIGIN", "${ORIGIN}")


@dataclass(frozen=True, slots=True)
class Checked:
    """What was looked at: ELF files, and libraries asked for that the machine under the container brings."""

    files: int
    system: tuple[str, ...]


@dataclass(slots=True)
class _Tree:
    root: Path
    folders: tuple[str, ...]
    system: frozenset[str]
    seen: dict[Path, Dynamic | None] = field(default_factory=dict)
    damaged: dict[Path, str] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)

    def read(self, path: Path) -> Dynamic | None:
        """Return what `read_dynamic` says of ``path``; None too for a damaged file, which is told once."""
        if path not in self.seen:
            try:
                self.seen[path] = read_dynamic(path)
            except DamagedElfError as error:
                self.seen[path] = None
                self.damaged[path] = str(error)
        return self.seen[path]


def check_libraries(
    root: Path, *, system: frozenset[str] = frozenset(), extra: Sequence[str] = ()
) -> Checked:
    """Refuse a tree in which a library is not found, or lacks a symbol version that is asked of it.

    Args:
        root: the file tree of an image.
        system: library names that need not be there.
        extra: folders of ``LD_LIBRARY_PATH`` in the image; the loader looks there before its own.

    Raises:
        ImageError: naming each file and what it lacks.
    """
    tree = _Tree(root, (*extra, *LIBRARY_DIRS), system)
    problems: list[Problem] = []
    files = 0
    for path in _regular_files(root):
        place = path.relative_to(root).as_posix()
        dynamic = tree.read(path)
        if dynamic is not None:
            files += 1
            problems += [Problem(fault, place) for fault in _faults(tree, PurePosixPath(place), dynamic)]
        elif path in tree.damaged:
            problems.append(Problem(f"is a damaged ELF file: {tree.damaged[path]}", place))
    if problems:
        left = len(problems) - _SHOWN
        more = [Problem(f"and {left} more", "base")] if left > 0 else []
        raise ImageError.of(problems[:_SHOWN] + more)
    return Checked(files, tuple(sorted(tree.outside)))


def _regular_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            path = Path(folder, name)
            if not path.is_symlink() and path.is_file():
                yield path


def _faults(tree: _Tree, place: PurePosixPath, dynamic: Dynamic) -> Iterator[str]:
    """Yield what the file at ``place`` lacks."""
    folders = (*_own_folders(place, dynamic), *tree.folders)
    for name in dynamic.needed:
        found = _find(tree, name, folders)
        if found is None:
            if name in tree.system:
                tree.outside.add(name)
            else:
                yield f"needs {name}, which is in no folder that it looks in"
            continue
        given = found.defined
        missing = [version for version in dynamic.wanted.get(name, ()) if version not in given]
        if given and missing:  # a library without versions satisfies any, says the loader
            yield f"needs {', '.join(missing)} of {name}, which the one in the base does not have"


def _own_folders(place: PurePosixPath, dynamic: Dynamic) -> Iterator[str]:
    origin = str(place.parent)
    for text in dynamic.folders:
        folder = text
        for word in _ORIGINS:
            folder = folder.replace(word, f"/{origin}")
        if folder.startswith("/"):  # a relative one would depend on the folder a program is started in
            yield folder


def _find(tree: _Tree, name: str, folders: Iterable[str]) -> Dynamic | None:
    """Return the first library ``name`` that the loader would take, or None."""
    places = [name] if "/" in name else [f"{folder}/{name}" for folder in folders]
    for text in places:
        path = inside(tree.root, text)
        if path.is_file():
            found = tree.read(path)
            if found is not None:  # the loader passes over libraries of other machines
                return found
    return None
