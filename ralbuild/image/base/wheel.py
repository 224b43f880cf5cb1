"""A wheel unpacked by the wheel specification (PEP 427, PEP 376), every file checked against its RECORD.

Only what belongs on the import path is installed: the root and the ``purelib`` and ``platlib`` folders.
Scripts, headers and ``data`` files are left out, and nothing of the wheel is run.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ralbuild.errors import ImageError
from ralbuild.image.base.lockfile import normalised

_CHUNK = 1 << 20
_UNRECORDED = ("RECORD", "RECORD.jws", "RECORD.p7s")
_LIBRARY = re.compile(r"\.so(\.[0-9.]+)?$")
_SCHEMES = ("purelib", "platlib")


def unpack_wheel(
    path: Path, packages: Path, keep: Callable[[str], bool], finish: Callable[[Path], object]
) -> None:
    """Install the wheel ``path`` into the folder ``packages``, without the files that ``keep`` refuses.

    ``finish`` is called with each shared library after it was checked, and may rewrite it.

    Every installed file is checked; memory is one chunk. That the wheel itself is the locked one is known.

    Raises:
        ImageError: when the file is no wheel of this kind, a file is not what RECORD says, a path leads
            out of the folder, or another wheel installed the same path.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            hashes = dict(_record(archive, path))
            for member in archive.infolist():
                if member.is_dir():
                    continue
                installed = _unpack_member(archive, member, hashes, packages, keep, path)
                if installed is not None and _LIBRARY.search(installed.name):
                    finish(installed)
    except zipfile.BadZipFile as error:
        raise ImageError(f"is not a wheel: {error}", place=str(path)) from None
    if hashes:
        raise ImageError(f"RECORD lists files that are not there, such as {min(hashes)}", place=str(path))


def _record(archive: zipfile.ZipFile, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, digest as RECORD writes it) for every recorded file but RECORD itself."""
    project, version = path.name.split("-")[:2]
    for name in archive.namelist():
        folder, _, rest = name.partition("/")
        if rest == "RECORD" and folder.endswith(".dist-info") and _same_project(folder, project, version):
            text = archive.read(name).decode("utf-8")
            break
    else:
        raise ImageError("the wheel holds no RECORD of its own", place=str(path))
    for row in csv.reader(io.StringIO(text)):
        if row and row[0].rpartition("/")[2] not in _UNRECORDED:
            yield row[0], row[1]


def _same_project(folder: str, project: str, version: str) -> bool:
    found, _, found_version = folder.removesuffix(".dist-info").partition("-")
    return normalised(found) == normalised(project) and found_version == version


def _unpack_member(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    hashes: dict[str, str],
    packages: Path,
    keep: Callable[[str], bool],
    wheel: Path,
) -> Path | None:
    name = member.filename
    place = f"{wheel.name}: {name}"
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ImageError("the wheel holds a path that leads out of its folder", place=place)
    recorded = not (len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in _UNRECORDED)
    wanted = hashes.pop(name, "") if recorded else None
    if wanted == "":
        raise ImageError("the file is not in the wheel's RECORD", place=place)
    target = _target(parts)
    if target is None or not keep(target):
        return None
    with archive.open(member) as source:
        found = _install(source, packages / target, _mode(member, name), place)
    if wanted is not None and wanted != found:
        raise ImageError(f"RECORD says {wanted}, the file has {found}", place=place)
    return packages / target


def _target(parts: list[str]) -> str | None:
    """Return the path below the packages folder, or None for what is not on the import path."""
    if not parts[0].endswith(".data"):
        return "/".join(parts)
    return "/".join(parts[2:]) if len(parts) > 2 and parts[1] in _SCHEMES else None


def _mode(member: zipfile.ZipInfo, name: str) -> int:
    executable = (member.external_attr >> 16) & 0o111 and not name.endswith((".py", ".so"))
    return 0o755 if executable else 0o644


def _install(source: IO[bytes], target: Path, mode: int, place: str) -> str:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with target.open("xb") as out:
            found = _digest(_copied(source, out))
    except FileExistsError:
        raise ImageError("two packages install the same file", place=place) from None
    target.chmod(mode)
    return found


def _copied(source: IO[bytes], out: io.BufferedWriter) -> Iterator[bytes]:
    while chunk := source.read(_CHUNK):
        out.write(chunk)
        yield chunk


def _digest(chunks: Iterator[bytes]) -> str:
    """Return ``sha256=`` and URL-safe base64 without padding, as RECORD writes a digest."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
