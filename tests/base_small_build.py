"""Runs `ensure_base` for a base whose torch and transformers are stand-ins. Prints its steps and its result.

Usage: base_small_build.py FOLDER [ensure|build|broken]; FOLDER gets the stand-ins' wheels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

from base_sources import Quiet, small_sources
from wheel_factory import make_wheel

from ralbuild.errors import ImageError
from ralbuild.image.base import build
from ralbuild.image.base.lockfile import Lock, LockedWheel
from ralbuild.image.base.report import Report
from ralbuild.image.base.tree import Facts, Sources


class Loud(Quiet):
    def step(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def stand_ins(folder: Path) -> Sources:
    """Return the small sources with a torch and a transformers that hold one file each."""
    sources = small_sources()
    wheels, paths = list(sources.lock.wheels), dict(sources.wheels)
    for name in ("torch", "transformers"):
        path = make_wheel(folder, name, {f"{name}/__init__.py": b"x = 1\n"})
        wheels.append(LockedWheel(name, "1.0", (hashlib.sha256(path.read_bytes()).hexdigest(),)))
        paths[name] = path
    return dataclasses.replace(sources, lock=Lock(tuple(wheels), "1" * 64), wheels=paths)


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    sources = stand_ins(folder) if what != "cached" else None

    def fetch(target: str, lock: Lock, report: Report, *, refresh: bool) -> Sources:
        if sources is None:
            raise AssertionError("nothing may be resolved or fetched")
        report.step(f"fetch refresh={refresh}")
        return sources

    def prove(tree: Path, facts: Facts) -> None:
        if what == "broken":
            raise ImageError("the finished base does not run")

    build._fetch = fetch
    build.prove = prove
    build.load_lock = lambda _: sources.lock if sources else Lock((), "1" * 64)
    make = build.build_base if what == "build" else build.ensure_base
    sys.stdout.write(f"{make('cpu', Loud())}\n")


if __name__ == "__main__":
    main()
