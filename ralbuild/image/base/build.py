"""The stages of `ralbuild base`, in order."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ralbuild.digests import DigestCache, make_cache_folder
from ralbuild.errors import HostError, ImageError
from ralbuild.image.assemble import assemble_image
from ralbuild.image.base.apt import DebianPackage, PrivateApt
from ralbuild.image.base.fetch import fetch_wheels
from ralbuild.image.base.files import cache_dir, exclusive
from ralbuild.image.base.layers import plan_base
from ralbuild.image.base.libraries import Checked, check_libraries
from ralbuild.image.base.lockfile import Lock, Work, load_lock, read_lock, work_of
from ralbuild.image.base.recipe import DEBIAN_PACKAGES, DROPPED_PACKAGES, MACHINE
from ralbuild.image.base.report import Report
from ralbuild.image.base.store import BaseStore, base_key
from ralbuild.image.base.targets import base_target
from ralbuild.image.base.tree import Sources, facts_of, make_tree, prove
from ralbuild.image.disk import check_room, host_errors
from ralbuild.image.layout import write_layout

_NAMED = frozenset({"torch", "transformers"})
"""Packages whose versions the labels of a base say."""


def ensure_base(target: str, report: Report, lock_file: Path | None = None) -> Path:
    """Return the layout of the embedded base for ``target``, made when there is none yet.

    When this lock and recipe have a finished base in the cache, nothing is resolved, downloaded or run.
    ``lock_file`` is a lock to use instead of the one that ships with ralbuild.

    Raises:
        UsageError, HostError, ImageError: as `build_base`.
    """
    found = find_base(target, lock_file)
    if found is not None:
        return found
    return _build(target, chosen_lock(target, lock_file), _store(), report, refresh=False)


def find_base(target: str, lock_file: Path | None = None) -> Path | None:
    """Return the layout of the finished base for ``target``, or None when there is none yet.

    Raises:
        UsageError, HostError, ImageError: as `chosen_lock`.
    """
    lock = chosen_lock(target, lock_file)
    store = _store()
    with host_errors(store.folder, base_target(target).room):
        return store.newest(target, lock)


def base_work(target: str) -> Work:
    """Return what making the base for ``target`` takes; Debian's packages come on top."""
    return work_of(f"the base for {target}", chosen_lock(target, None), base_target(target).room)


def build_base(target: str, report: Report, lock_file: Path | None = None) -> Path:
    """Return the layout of a base made of the Debian packages of this moment and the locked wheels.

    A base of exactly these packages that is in the cache already is not made again.

    Raises:
        UsageError: for a target that this version has no base for.
        HostError: when this machine cannot make it: no apt, no network, no room, another processor.
        ImageError: when a package is not what it should be, or the result does not run.
    """
    return _build(target, chosen_lock(target, lock_file), _store(), report, refresh=True)


def chosen_lock(target: str, lock_file: Path | None) -> Lock:
    """Return the lock in ``lock_file``, or the one that ships with ralbuild for ``target``.

    Raises:
        UsageError, HostError: for a target or a machine without bases.
        ImageError: when the lock is none, or lacks torch or transformers.
    """
    base_target(target)
    if platform.machine() != MACHINE:
        raise HostError(f"the embedded base is for {MACHINE}, this machine is {platform.machine()}")
    if lock_file is None:
        return load_lock(target)
    lock = read_lock(lock_file)
    missing = sorted(_NAMED - {wheel.name for wheel in lock.wheels})
    if missing:
        hint = "`ralbuild base lock` makes a whole one"
        raise ImageError(f"does not lock {', '.join(missing)}", place=str(lock_file), hint=hint)
    return lock


def _store() -> BaseStore:
    return BaseStore(cache_dir() / "base")


def _build(target: str, lock: Lock, store: BaseStore, report: Report, *, refresh: bool) -> Path:
    with host_errors(cache_dir(), base_target(target).room):
        sources = _fetch(target, lock, report, refresh=refresh)
        key = base_key(target, lock, sources.debian)
        with exclusive(store.lock_file):
            found = store.get(key) or _make(sources, key, store, report)
            store.point(target, lock, key)
        return found


def _fetch(target: str, lock: Lock, report: Report, *, refresh: bool) -> Sources:
    apt = PrivateApt(cache_dir() / "apt")
    report.step("resolving Debian packages")
    if refresh:
        apt.update()
    debian, archives = fetch_debian(apt)
    folder = cache_dir() / "wheels"
    make_cache_folder(folder)
    return Sources(target, lock, debian, archives, fetch_wheels(lock.wheels, folder, report))


def fetch_debian(apt: PrivateApt) -> tuple[tuple[DebianPackage, ...], dict[str, Path]]:
    """Return the packages of the base, sorted by name, and the archive of each.

    Raises:
        HostError: when they cannot be had.
    """
    debian = _kept(apt.resolve(DEBIAN_PACKAGES))
    try:
        return debian, apt.download(debian)
    except HostError:  # a mirror drops a version as soon as there is a newer one
        apt.update()
        debian = _kept(apt.resolve(DEBIAN_PACKAGES))
        return debian, apt.download(debian)


def _kept(packages: Iterable[DebianPackage]) -> tuple[DebianPackage, ...]:
    return tuple(package for package in packages if package.name not in DROPPED_PACKAGES)


def _make(sources: Sources, key: str, store: BaseStore, report: Report) -> Path:
    target = base_target(sources.target)
    check_room(store.folder, target.room)
    work = store.new_work_dir()
    try:
        tree, layout = work / "tree", work / "layout"
        tree.mkdir()
        make_tree(sources, tree, report)
        report.step("running the base once and writing its layers")
        facts = facts_of(tree, sources)
        checked = check_libraries(tree, system=target.system)
        with ThreadPoolExecutor(1) as pool:
            proof = pool.submit(prove, tree, facts)
            image = assemble_image(plan_base(tree, sources.target, sources.lock, facts))
            write_layout(layout, image, "", DigestCache(None), None, report.note)
            proof.result()
        report.note(_found(checked))
        return store.put(key, layout)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _found(checked: Checked) -> str:
    system = f"; the machine brings {', '.join(checked.system)}" if checked.system else ""
    return f"{checked.files} programs and libraries find every library they need{system}"
