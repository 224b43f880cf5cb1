"""A base in small: the real Debian packages, and only the wheels that unpack in a moment."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from ralbuild.image.assemble import assemble_image
from ralbuild.image.base.apt import PrivateApt
from ralbuild.image.base.build import fetch_debian
from ralbuild.image.base.fetch import fetch_wheels
from ralbuild.image.base.files import cache_dir
from ralbuild.image.base.layers import plan_base
from ralbuild.image.base.lockfile import Lock, load_lock
from ralbuild.image.base.tree import Facts, Sources, make_tree

WHEELS = ("click", "h11", "idna", "jinja2", "markupsafe", "pyyaml", "tqdm")
FACTS = Facts("3.11", "none", "none", "12")


class Quiet:
    """A report that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, done: int, total: int, unit: str) -> None:
        pass


@functools.cache
def small_sources() -> Sources:
    lock = load_lock("cpu")
    wheels = tuple(wheel for wheel in lock.wheels if wheel.name in WHEELS)
    debian, archives = fetch_debian(PrivateApt(cache_dir() / "apt"))
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    return Sources("cpu", Lock(wheels, lock.sha256), debian, archives, fetch_wheels(wheels, folder, Quiet()))


def make_small_tree(tree: Path) -> None:
    tree.mkdir(parents=True)
    make_tree(small_sources(), tree, Quiet())


def image_digest(tree: Path) -> str:
    return assemble_image(plan_base(tree, "cpu", small_sources().lock, FACTS)).digest


if __name__ == "__main__":
    make_small_tree(Path(sys.argv[1]))
    sys.stdout.write(image_digest(Path(sys.argv[1])))
