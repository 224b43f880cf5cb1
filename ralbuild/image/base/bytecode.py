"""Deterministic bytecode for the Python of the base: its standard library and its packages.

On a read-only root file system Python would compile every module at every start: `import torch` takes half
the time with it. The files are compiled by the base's own Python. Which objects `marshal` writes as
references depends on what the process did before; so the sorted list of files is cut into a fixed number
of parts, each compiled from its first file to its last by a fresh process with a fixed hash seed. The
number of CPUs only decides how many run at once.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from ralbuild.contract.places import PACKAGES_DIR
from ralbuild.errors import ImageError
from ralbuild.image.base import bytecode_worker
from ralbuild.image.base.recipe import STDLIB_DIR
from ralbuild.image.base.report import Report
from ralbuild.image.treepython import python_command, python_home

PARTS = 16
"""Part of the recipe: another number gives other bytes."""
_FOLDERS = (f"/{STDLIB_DIR}", PACKAGES_DIR)
_WITHOUT = tuple(
    f"{PACKAGES_DIR}/{pattern}"
    for pattern in (
        "sympy/combinatorics/*",
        "sympy/physics/*",
        "sympy/stats/*",
        "torch/_inductor/*/*",
        "torch/_vendor/*",
        "torch/testing/_internal/*",
        "torchgen/*/*",
        "transformers/cli/*",
        "transformers/exporters/*",
        "transformers/pipelines/*",
    )
)
"""Kept as source only: a server does not import them, but a model's own code might."""
_MODELS = f"{PACKAGES_DIR}/transformers/models/*"
_MODEL_FILES = ("*/__init__.py", "*/auto/*", "*/configuration_*.py", "*/modeling_*.py")


def compile_tree(tree: Path, report: Report) -> int:
    """Write bytecode beside the Python files of ``tree``; return the number of files dealt with.

    Raises:
        ImageError: when the tree's Python does not run or fails.
    """
    paths = sorted(path for folder in _FOLDERS for path in _sources(tree, folder) if _pays(path))
    parts = [part for part in _parts(tree, paths) if part]
    done = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for count in pool.map(lambda part: _compile(tree, part), parts):
            done += count
            report.progress(done, len(paths), "files")
    return done


def _sources(tree: Path, folder: str) -> list[str]:
    return [f"/{path.relative_to(tree).as_posix()}" for path in Path(f"{tree}{folder}").rglob("*.py")]


def _pays(path: str) -> bool:
    if fnmatchcase(path, _MODELS) and not any(fnmatchcase(path, pattern) for pattern in _MODEL_FILES):
        return False
    return not any(fnmatchcase(path, pattern) for pattern in _WITHOUT)


def _parts(tree: Path, paths: list[str]) -> list[list[str]]:
    """Cut the list into `PARTS` runs of about the same number of bytes."""
    sizes = [Path(f"{tree}{path}").stat().st_size for path in paths]
    share = sum(sizes) // PARTS + 1
    parts: list[list[str]] = [[] for _ in range(PARTS)]
    before = 0
    for path, size in zip(paths, sizes, strict=True):
        parts[before // share].append(path)
        before += size
    return parts


def _compile(tree: Path, paths: list[str]) -> int:
    # Bytecode that another part has written must not be loaded: it would change this process's past.
    options = ["-B", "-S", "-s", "-P", "-X", "pycache_prefix=/nonexistent"]
    command = [*python_command(tree), *options, bytecode_worker.__file__, str(tree)]
    environment = {"PYTHONHOME": python_home(tree), "PYTHONHASHSEED": "0", "LANG": "C.UTF-8"}
    done = subprocess.run(
        command, input="\n".join(paths), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ImageError(f"the base's Python failed to compile its packages: {last[0]}", place=str(tree))
    return len(paths)
