"""From the finished tree to an image plan: which file is in which layer, what the image says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ralbuild.contract.places import BASE_MANIFEST, PACKAGES_DIR, USER_ID
from ralbuild.contract.tarball import EXECUTABLE_MODE, FILE_MODE, STICKY_DIR_MODE
from ralbuild.image.base.lockfile import Lock
from ralbuild.image.base.recipe import (
    CONTRACT,
    CUDA_ENVIRONMENT,
    EMPTY_DIRS,
    ENVIRONMENT,
    RECIPE,
    STICKY_DIRS,
    WORKING_DIR,
)
from ralbuild.image.base.targets import base_target
from ralbuild.image.base.tree import Facts
from ralbuild.image.plan import (
    DirEntry,
    Entry,
    FileEntry,
    HostFile,
    ImageConfig,
    ImagePlan,
    LayerPlan,
    LinkEntry,
)

LABELS = "io.ralbuild.base."
_PACKAGES = PACKAGES_DIR.strip("/") + "/"
_MANIFEST = BASE_MANIFEST.strip("/")
_CUDA = ("nvidia/", "nvidia_")
_TORCH = ("functorch/", "torch/", "torch-", "torchgen/")
_OWNED = _PACKAGES.partition("/")[0]


def plan_base(tree: Path, target: str, lock: Lock, facts: Facts) -> ImagePlan:
    """Return the plan of the base: Debian, CUDA if any, torch, the other packages, then the list of it all.

    No date is in it, whatever ``SOURCE_DATE_EPOCH`` says: a base is shared by images of many commits.
    """
    system: list[Entry] = [DirEntry(path) for path in EMPTY_DIRS]
    system += [DirEntry(path, STICKY_DIR_MODE) for path in STICKY_DIRS]
    cuda: list[Entry] = []
    torch: list[Entry] = []
    packages: list[Entry] = []
    manifest: list[Entry] = []
    for entry in tree_entries(tree):
        inner = entry.path.removeprefix(_PACKAGES)
        if entry.path == _MANIFEST:
            manifest.append(entry)
        elif inner == entry.path:
            system.append(entry)
        elif inner.startswith(_CUDA):
            cuda.append(entry)
        elif inner.startswith(_TORCH):
            torch.append(entry)
        else:
            packages.append(entry)
    libraries = LayerPlan(f"CUDA {base_target(target).cuda}", "small", tuple(cuda), (_OWNED,))
    layers = (
        LayerPlan(f"Debian {facts.debian} and Python {facts.python}", "small", tuple(system), ("",)),
        *((libraries,) if cuda else ()),
        LayerPlan(f"torch {facts.torch}", "small", tuple(torch), (_OWNED,)),
        LayerPlan("Python packages", "small", tuple(packages), (_OWNED,)),
        LayerPlan("list of packages", "small", tuple(manifest)),
    )
    return ImagePlan(base=None, layers=layers, config=base_config(target, lock, facts))


def tree_entries(tree: Path) -> Iterator[Entry]:
    """Yield every file and link of a folder, by its path in it; modes are set, not copied."""
    for folder, folders, files in os.walk(tree):
        for name in (*folders, *files):
            place = Path(folder, name)
            path = place.relative_to(tree).as_posix()
            if place.is_symlink():
                yield LinkEntry(path, str(place.readlink()))
            elif not place.is_dir():
                info = place.stat()
                mode = EXECUTABLE_MODE if info.st_mode & 0o100 else FILE_MODE
                yield FileEntry(path, HostFile(place, info.st_size), mode)


def base_config(target: str, lock: Lock, facts: Facts) -> ImageConfig:
    """Return what a base says of itself, however it is made; a Debian release only where it is Debian's."""
    cuda = base_target(target).cuda
    labels = {
        "contract": CONTRACT,
        **({"cuda": cuda} if cuda else {}),
        **({"debian": facts.debian} if facts.debian else {}),
        "lock": lock.sha256,
        "python": facts.python,
        "recipe": RECIPE,
        "target": target,
        "torch": facts.torch,
        "transformers": facts.transformers,
    }
    return ImageConfig(
        env=(*ENVIRONMENT, *(CUDA_ENVIRONMENT if cuda else ())),
        cmd=("/usr/bin/python3.11",),
        user=f"{USER_ID}:{USER_ID}",
        workdir=WORKING_DIR,
        labels={LABELS + name: value for name, value in labels.items()},
    )
