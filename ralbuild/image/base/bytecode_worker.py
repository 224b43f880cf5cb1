"""Compiles Python files to bytecode, in the Python of the base itself. Standard library only.

Arguments: the tree's root, then the folder that the paths are relative to, as the image sees it. Standard
input: those paths, one a line. A file that is not valid for this Python (some are for later ones) gets no
bytecode: importing it would fail the same way.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
import warnings

UNCHECKED_HASH = 0b01
"""PEP 552: the file holds its source's hash and is used without looking at the source: no times, no stat."""


def compile_file(root: str, folder: str, path: str) -> None:
    """Write the bytecode of ``folder/path`` in the tree ``root``; tracebacks show the path in the image."""
    with open(f"{root}{folder}/{path}", "rb") as file:  # noqa: PTH123  pathlib costs start-up in each worker
        source = file.read()
    try:
        code = compile(source, f"{folder}/{path}", "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):
        return
    parts = [
        importlib.util.MAGIC_NUMBER,
        UNCHECKED_HASH.to_bytes(4, "little"),
        importlib.util.source_hash(source),
        marshal.dumps(code),
    ]
    target = f"{root}{importlib.util.cache_from_source(f'{folder}/{path}')}"
    os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
    with open(target, "wb") as file:  # noqa: PTH123
        file.write(b"".join(parts))


def main() -> None:
    """Compile every path on standard input."""
    warnings.simplefilter("ignore")
    root, folder = sys.argv[1:]
    for line in sys.stdin.read().splitlines():
        compile_file(root, folder, line)


if __name__ == "__main__":
    main()
