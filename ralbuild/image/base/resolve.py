"""Which wheels a base's requirements come to, from the metadata of an index: nothing is imported or run.

pip resolves (``pip install --dry-run --report``, format version 1). What the target replaces is then
taken from the index as well, without its dependencies: pip cannot be told that torch may run with later
libraries than it declares. Earlier ones are refused.
"""

from __future__ import annotations

import json
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.digests import make_cache_folder
from ralbuild.errors import HostError, ImageError
from ralbuild.image.base.fetch import run_pip
from ralbuild.image.base.files import cache_dir
from ralbuild.image.base.lockfile import LockedWheel, normalised
from ralbuild.image.base.targets import BaseTarget

_REPORT = "report.json"
_DECLARED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\(?==\s*(?P<version>[0-9][0-9.]*))?")
_SIZE_TIMEOUT_S = 20
_SIZE_JOBS = 8


@dataclass(frozen=True, slots=True)
class Package:
    """One package of pip's report: where its wheel lies, and the requirements it declares."""

    name: str
    version: str
    sha256: str
    url: str
    requires: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The wheels of a lock, sorted by name, and one line for each that is not what a package declares."""

    wheels: tuple[LockedWheel, ...]
    notes: tuple[str, ...]


def resolve(target: BaseTarget) -> Resolved:
    """Resolve the target's requirements with pip's own index settings.

    Raises:
        HostError: when pip is missing, finds no solution, or reports what is not understood.
        ImageError: when a replacement is older than what it replaces, or needs a package that is not there.
    """
    wheels = cache_dir() / "wheels"
    make_cache_folder(wheels)
    with tempfile.TemporaryDirectory(dir=wheels, prefix=".new-") as name:
        # The folder of earlier downloads may hold a build of torch that no index lists.
        found = _report([f"--find-links={wheels}", *target.roots], Path(name))
        exact = {key: version for key, version in target.replaced.items() if key in found}
        if exact:
            wanted = [f"{key}=={version}" for key, version in sorted(exact.items())]
            fresh = _report(["--no-deps", *wanted], Path(name))
            notes = _compared(found.values(), fresh)
            found |= fresh
            _check_complete(fresh.values(), found)
        else:
            notes = ()
    kept = [found[key] for key in sorted(found.keys() - target.unused)]
    with ThreadPoolExecutor(_SIZE_JOBS) as pool:
        sizes = pool.map(size_of, [package.url for package in kept])
    locked = (
        LockedWheel(package.name, package.version, (package.sha256,), size)
        for package, size in zip(kept, sizes, strict=True)
    )
    return Resolved(tuple(locked), notes)


def _report(arguments: list[str], folder: Path) -> dict[str, Package]:
    path = folder / _REPORT
    options = ["--dry-run", "--ignore-installed", f"--target={folder / 'none'}", f"--report={path}"]
    run_pip("install", [*options, *arguments])
    try:
        packages = [_package(item) for item in json.loads(path.read_bytes())["install"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        hint = "pip 23 or later is needed: python -m pip install --upgrade pip"
        raise HostError("pip's report is not understood", place="pip install", hint=hint) from None
    return {package.name: package for package in packages}


def _package(item: Mapping[str, Any]) -> Package:
    metadata, download = item["metadata"], item["download_info"]
    digest = download["archive_info"].get("hashes", {}).get("sha256", "")
    name = normalised(metadata["name"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise HostError("the index gives no sha256 for the wheel", place=f"{name}=={metadata['version']}")
    return Package(
        name, metadata["version"], digest, download["url"], tuple(metadata.get("requires_dist", ()))
    )


def _compared(resolved: Iterable[Package], fresh: Mapping[str, Package]) -> tuple[str, ...]:
    """Return what `Resolved.notes` says; refuse a replacement older than what some package declares."""
    notes, old = set(), []
    for package in resolved:
        for name, version in _declared(package):
            new = fresh.get(name)
            if new is None or not version or new.version == version or package.name in fresh:
                continue
            notes.add(f"{name} {new.version} instead of {version}, which {package.name} declares")
            if _numbers(new.version) < _numbers(version):
                old.append(f"{package.name} {package.version} declares {name} {version}, found {new.version}")
    if old:
        hint = "a library runs programs built for its own version or an earlier one: choose an earlier torch"
        raise ImageError("; ".join(sorted(old)), place="lock", hint=hint)
    return tuple(sorted(notes))


def _check_complete(fresh: Iterable[Package], found: Mapping[str, Package]) -> None:
    for package in fresh:
        for name, _ in _declared(package):
            if name not in found:
                message = f"{package.name} {package.version} needs {name}, which nothing else asks for"
                raise ImageError(message, place="lock")


def _declared(package: Package) -> Iterable[tuple[str, str]]:
    """Yield (name, exact version or nothing) of what the package needs on this platform without extras."""
    for text in package.requires:
        requirement, _, marker = text.partition(";")
        found = _DECLARED.match(requirement.strip())
        if found and "extra" not in marker:
            yield normalised(found["name"]), found["version"] or ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def size_of(url: str) -> int:
    """Return the size of the file at ``url`` in bytes, 0 when its server does not say."""
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(urllib.request.url2pathname(parts.path)).stat().st_size
        if parts.scheme not in ("http", "https"):
            return 0
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310  the scheme is one of these two
        with urllib.request.urlopen(request, timeout=_SIZE_TIMEOUT_S) as answer:  # noqa: S310
            return int(answer.headers.get("Content-Length", "0"))
    except (OSError, ValueError):
        return 0
