"""Compiles Python files to bytecode, in the Python of the base itself. Standard library only.

The argument is the tree's root; standard input holds the paths, as the image sees them, one a line. A file
that is not valid for this Python (some are for later ones) gets no bytecode: importing it would fail the
same way.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
import warnings

UNCHECKED_HASH = 0b01
"""PEP 552: the file holds its source's hash and is used without looking at the source: no times, no stat."""


def compile_file(root: str, path: str) -> None:
    """Write the bytecode of ``path`` in the tree ``root``; tracebacks show the path in the image."""
    with open(root + path, "rb") as file:  # noqa: PTH123  pathlib costs start-up in each worker
        source = file.read()
    try:
        code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        return
    parts = [
        importlib.util.MAGIC_NUMBER,
        UNCHECKED_HASH.to_bytes(4, "little"),
        importlib.util.source_hash(source),
        marshal.dumps(code),
    ]
    target = root + importlib.util.cache_from_source(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
    with open(target, "wb") as file:  # noqa: PTH123
        file.write(b"".join(parts))


def main() -> None:
    """Compile every path on standard input."""
    warnings.simplefilter("ignore")
    sys.pycache_prefix = None  # was set to start without any bytecode; from here on it would misplace ours
    for line in sys.stdin.read().splitlines():
        compile_file(sys.argv[1], line)


if __name__ == "__main__":
    main()
