"""Triton as a layer of an image: only a CPU image that interprets user kernels has it.

What is kept runs the interpreter. The compilers, assemblers and profilers of the wheel are left out
(`ralbuild.image.base.prune`), so even this image holds nothing that makes machine code for a GPU.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ralbuild.contract.codec import canonical_json, to_plain
from ralbuild.contract.places import INTERPRETER_MANIFEST, PACKAGES_DIR
from ralbuild.digests import make_cache_folder
from ralbuild.image.base.elf import strip_symbols
from ralbuild.image.base.fetch import fetch_wheels
from ralbuild.image.base.files import cache_dir, exclusive
from ralbuild.image.base.layers import tree_entries
from ralbuild.image.base.lockfile import Lock, Work, load_lock, work_of
from ralbuild.image.base.prune import keeps
from ralbuild.image.base.recipe import RECIPE
from ralbuild.image.base.report import Report
from ralbuild.image.base.wheel import unpack_wheel
from ralbuild.image.disk import check_room, host_errors
from ralbuild.image.plan import LayerPlan

_ROOM = 500_000_000
_PACKAGES = PACKAGES_DIR.strip("/")


def interpreter_layer(report: Report) -> LayerPlan:
    """Return the layer, unpacked in the user's cache when that has not been done yet.

    Raises:
        HostError: when the wheel cannot be had or there is no room.
        ImageError: when it is not the locked one.
    """
    lock = load_lock("interpreter")
    tree = _tree(lock)
    folder = tree.parent
    make_cache_folder(folder)
    with host_errors(folder, _ROOM), exclusive(folder / ".lock"):
        for old in folder.glob(".work-*"):  # of a killed build
            shutil.rmtree(old, ignore_errors=True)
        if not tree.is_dir():
            check_room(folder, _ROOM)
            downloads = cache_dir() / "wheels"
            make_cache_folder(downloads)
            wheel = fetch_wheels(lock.wheels, downloads, report)["triton"]
            report.step("unpacking Triton")
            work = Path(tempfile.mkdtemp(prefix=".work-", dir=folder))
            unpack_wheel(wheel, work / _PACKAGES, keeps("triton"), strip_symbols)
            (work / INTERPRETER_MANIFEST.strip("/")).write_bytes(_manifest(wheel, lock))
            work.rename(tree)
    return _layer(tree, lock)


def find_interpreter() -> LayerPlan | None:
    """Return the layer when it has been unpacked before, else None.

    Raises:
        HostError: for a user without a home.
    """
    lock = load_lock("interpreter")
    tree = _tree(lock)
    return _layer(tree, lock) if tree.is_dir() else None


def interpreter_work() -> Work:
    """Return what making the layer takes."""
    lock = load_lock("interpreter")
    return work_of(f"{_name(lock)}, which interprets user kernels", lock, _ROOM)


def _name(lock: Lock) -> str:
    return f"triton-{lock.version('triton')}"


def _tree(lock: Lock) -> Path:
    """Return where the unpacked layer lies; the name says what is in it."""
    return cache_dir() / "interpreter" / f"{_name(lock)}-{RECIPE}-{lock.sha256[:16]}"


def _layer(tree: Path, lock: Lock) -> LayerPlan:
    return LayerPlan(_name(lock), "small", tuple(tree_entries(tree)), (_PACKAGES.partition("/")[0],))


def _manifest(wheel: Path, lock: Lock) -> bytes:
    """Return the list of what was added, in the form of a base's list."""
    rows = [
        {"name": item.name, "version": item.version, "file": wheel.name, "sha256": item.sha256}
        for item in lock.wheels
    ]
    return canonical_json(to_plain({"debian": [], "wheels": rows}))
