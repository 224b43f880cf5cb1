"""The Python of an unpacked image, run in place by the tree's own dynamic loader with its own libraries.

No root, no mount, no chroot. The machine's C library and Python are not used, so what runs is what the
image holds; only the kernel and, for absolute paths, the file system are the machine's.
"""

from __future__ import annotations

import os
from pathlib import Path

from ralbuild.contract.places import PYTHON
from ralbuild.errors import ImageError

_LOADER = "lib64/ld-linux-x86-64.so.2"
LIBRARY_DIRS = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64", "lib", "usr/lib")
"""Where Debian's dynamic loader looks."""
_MAX_LINKS = 40


def python_command(tree: Path) -> list[str]:
    """Return the command that starts the Python of ``tree``, without arguments.

    Raises:
        ImageError: when the tree lacks the loader or the Python.
    """
    loader, python = inside(tree, _LOADER), inside(tree, PYTHON)
    for path, what in ((loader, "x86-64 dynamic loader"), (python, PYTHON)):
        if not path.is_file():
            raise ImageError(f"the image has no {what}", place=str(tree))
    folders = dict.fromkeys(str(inside(tree, name)) for name in LIBRARY_DIRS)
    # The machine's loader cache must not answer for a library that the image lacks.
    return [str(loader), "--inhibit-cache", "--library-path", ":".join(folders), str(python)]


def python_home(tree: Path) -> str:
    """Return the value of PYTHONHOME for the tree's Python."""
    return str(inside(tree, PYTHON).parent.parent)


def inside(tree: Path, path: str) -> Path:
    """Return where ``path`` of the image lies, with links followed as if ``tree`` were the root.

    The result is below ``tree`` whatever the links say; it may not exist.

    Raises:
        ImageError: for a loop of links.
    """
    todo = [part for part in reversed(path.split("/")) if part]
    place: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            del place[-1:]
        elif part != ".":
            place.append(part)
            here = tree.joinpath(*place)
            if here.is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    raise ImageError("a loop of symbolic links", place=path)
                target = os.readlink(here)  # noqa: PTH115  Path would drop a trailing slash and dots
                place = [] if target.startswith("/") else place[:-1]
                todo += [name for name in reversed(target.split("/")) if name]
    return tree.joinpath(*place)
