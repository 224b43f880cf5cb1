"""The other way to a base: a build context for a container engine, on an image of the user's choice."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

from ralbuild import __version__
from ralbuild.contract.codec import canonical_json
from ralbuild.contract.places import BASE_MANIFEST, PACKAGES_DIR, USER_ID
from ralbuild.digests import make_cache_folder
from ralbuild.errors import HostError, UsageError
from ralbuild.image.base.build import chosen_lock
from ralbuild.image.base.fetch import fetch_wheels
from ralbuild.image.base.files import cache_dir
from ralbuild.image.base.layers import base_config
from ralbuild.image.base.lockfile import Lock, LockedWheel, format_lock
from ralbuild.image.base.recipe import DISTRIBUTION_PACKAGES, PYTHON_VERSION
from ralbuild.image.base.report import Report
from ralbuild.image.base.targets import BaseTarget, base_target
from ralbuild.image.base.tree import Facts, proof_program, wheel_list
from ralbuild.image.context import give_name, new_folder
from ralbuild.image.oci import DIGEST
from ralbuild.image.registry.reference import REPOSITORY, TAG
from ralbuild.pins import load_pins
from ralbuild.render import render_text

_NAMED = re.compile(
    rf"(?=.{{1,255}}@)(?:[a-zA-Z0-9.-]+(?::[0-9]{{1,5}})?/)?{REPOSITORY}(?::{TAG})?@{DIGEST.pattern}"
)
"""An image as an engine knows it: also without a registry's name, which `--base` needs."""


def write_base_context(target: str, origin: str, out: Path, report: Report, lock_file: Path | None) -> Path:
    """Write what an engine needs to make a base of the contract on ``origin``; return the Dockerfile.

    The new folder ``out`` holds the Dockerfile, the locked wheels (hard links to the cache where they can
    be) and four small files. It is complete or not there.

    Args:
        target: ``cpu`` or ``cuda``.
        origin: image below it, ``NAME@sha256:DIGEST``; empty for NVIDIA's of our CUDA version.
        out: the new folder.
        report: for progress.
        lock_file: a lock to use instead of the one that ships with ralbuild.

    Raises:
        UsageError: when ``origin`` has no digest or is needed, or the folder is there already.
        HostError: when a wheel cannot be had or the folder cannot be written.
        ImageError: when a wheel is another file than the locked one.
    """
    chosen = base_target(target)
    below = _origin(chosen, origin)
    lock = chosen_lock(target, lock_file)
    folder = cache_dir() / "wheels"
    make_cache_folder(folder)
    wheels = fetch_wheels(lock.wheels, folder, report)
    try:
        with new_folder(out) as partial:
            (partial / "wheels").mkdir()
            for path in wheels.values():
                _link(path, partial / "wheels" / path.name)
            for name, data in context_files(chosen, below, lock, wheels).items():
                (partial / name).write_bytes(data)
            give_name(partial, out)
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(out)) from None
    return out / "Dockerfile"


def _origin(target: BaseTarget, origin: str) -> str:
    if not origin and not target.cuda:
        hint = "--from NAME@sha256:DIGEST: an image of Debian 12, or of Ubuntu 22.04 or later, with apt"
        raise UsageError(f"is needed for --target {target.name}", place="--from", hint=hint)
    if not origin:
        image = load_pins().images["cuda-runtime"]
        return f"nvidia/cuda:{image.tag}@{image.digest}"
    if not _NAMED.fullmatch(origin):
        hint = "NAME@sha256:...: a tag can stand for another image tomorrow"
        raise UsageError(f"needs a digest, found {origin!r}", place="--from", hint=hint)
    return origin


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def context_files(
    target: BaseTarget, origin: str, lock: Lock, wheels: Mapping[str, Path]
) -> dict[str, bytes]:
    """Return the files of the context beside the wheels, by name."""
    facts = Facts(
        python=PYTHON_VERSION,
        torch=lock.version("torch"),
        transformers=lock.version("transformers"),
        debian="",
        cuda=target.cuda,
    )
    config = base_config(target.name, lock, facts)
    values = {
        "version": __version__,
        "base": origin,
        "system": DISTRIBUTION_PACKAGES,
        "user": USER_ID,
        "cuda": bool(target.cuda),
        "packages_dir": PACKAGES_DIR,
        "manifest": BASE_MANIFEST,
        "labels": sorted(config.labels.items()),
        "env": config.env,
        "workdir": config.workdir,
    }
    worker = resources.files("ralbuild").joinpath("image", "base", "list_worker.py")
    return {
        "Dockerfile": render_text("Dockerfile.base.j2", values),
        "requirements.txt": _requirements(lock.wheels).encode(),
        "wheels.json": canonical_json(wheel_list(target.name, lock, wheels)),
        "list_packages.py": worker.read_bytes(),
        # The distribution decides the third number of Python's version.
        "prove.py": proof_program(replace(facts, python="")).encode(),
    }


def _requirements(wheels: tuple[LockedWheel, ...]) -> str:
    return format_lock(wheels, "# The lock of ralbuild for this base; the files are in wheels/.")
