"""``python -m ralbuild.image.base.lock``: resolve the runtime's packages anew and rewrite the lock.

Prints what changed, one package a line. The result is code: review it, run the tests of the base
(they import every model family from a base made of it), commit it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ralbuild.digests import make_cache_folder
from ralbuild.files import write_atomically
from ralbuild.image.base.fetch import pip_download
from ralbuild.image.base.files import cache_dir, hash_file
from ralbuild.image.base.lockfile import LOCK_NAME, LockedWheel, format_lock, normalised, parse_lock

ROOTS = (
    "torch==2.13.0",
    "transformers==5.24.*",
    "tokenizers",
    "safetensors",
    "jinja2",
    "starlette",
    "uvicorn",
    "prometheus-client",
    "numpy",
)
"""What the runtime imports; pip adds what these declare."""

UNUSED = frozenset(
    {
        # The command lines of transformers and huggingface-hub.
        *("annotated-doc", "annotated-types", "markdown-it-py", "mdurl", "pydantic", "pydantic-core"),
        *("pygments", "rich", "shellingham", "typer", "typing-inspection"),
        # Downloads from a model hub, and remote file systems: the image needs no network.
        *("fsspec", "hf-xet"),
        # Building extensions, and drawing graphs of programs: nothing is compiled in the image.
        *("networkx", "setuptools"),
    }
)
"""Declared dependencies that no import of a server reaches; tests/test_base_tree.py proves it."""

_COMMENT = """\
# The Python packages of the embedded CPU base. Made by: python -m ralbuild.image.base.lock
# Every wheel is for CPython 3.11 on x86_64 Linux. torch is a CPU build.
"""


def resolve() -> list[LockedWheel]:
    """Let pip resolve `ROOTS` with its index settings; return every wheel but the unused, sorted.

    Raises:
        HostError: when pip finds no solution.
    """
    folder = cache_dir() / "wheels"
    make_cache_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
        pip_download([*ROOTS, f"--find-links={folder}"], Path(name))
        wheels = []
        for path in sorted(Path(name).glob("*.whl")):
            project, version = path.name.split("-")[:2]
            if normalised(project) not in UNUSED:
                wheels.append(LockedWheel(normalised(project), version, (hash_file(path),)))
                path.replace(folder / path.name)
    return sorted(wheels, key=lambda wheel: wheel.name)


def changes(old: list[LockedWheel], new: list[LockedWheel]) -> list[str]:
    """Return one line for each package that was added, removed, moved or rebuilt."""
    before = {wheel.name: wheel for wheel in old}
    after = {wheel.name: wheel for wheel in new}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is None and now is not None:
            lines.append(f"+ {name} {now.version}")
        elif was is not None and now is None:
            lines.append(f"- {name} {was.version}")
        elif was is not None and now is not None and was != now:
            note = (
                f"{was.version} -> {now.version}"
                if was.version != now.version
                else f"{now.version}, another file"
            )
            lines.append(f"  {name} {note}")
    return lines


def main() -> int:
    """Rewrite the lock of the CPU base (or the file given) and print what changed."""
    default = Path(__file__).parents[2] / "data" / LOCK_NAME.format(target="cpu")
    parser = argparse.ArgumentParser(prog="python -m ralbuild.image.base.lock", description=main.__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=default, help="lock to rewrite")
    path: Path = parser.parse_args().file
    old = list(parse_lock(path.read_text(encoding="utf-8"), path.name).wheels) if path.exists() else []
    new = resolve()
    write_atomically(path, format_lock(new, _COMMENT).encode())
    for line in changes(old, new) or ["no change"]:
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
