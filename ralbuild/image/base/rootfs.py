"""The Debian part of the base: archives in, a small root file system out. No root, no maintainer scripts.

What maintainer scripts would have made and a server needs is written here instead: users, the
certificate bundle, the time zone, the links of the merged /usr. Only paths that the recipe names are
kept. Modes are set, never copied; owners and times are the layer writer's business.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ralbuild.errors import HostError, ImageError
from ralbuild.image.base.recipe import (
    CERTIFICATES_DIR,
    CERTIFICATES_FILE,
    DROPPED_MODULES,
    DROPPED_PATHS,
    EMPTY_DIRS,
    KEPT_PATHS,
    LINKS,
    MERGED_DIRS,
    PACKAGE_RECORDS_DIR,
    STDLIB_DIR,
    STICKY_DIRS,
    TEXT_FILES,
)

_COPYRIGHT = re.compile(r"usr/share/doc/[^/]+(/copyright)?")
_MODULE = re.compile(rf"{re.escape(STDLIB_DIR)}/lib-dynload/([^./]+)\.[^/]*")


def make_rootfs(archives: Mapping[str, Path], tree: Path) -> None:
    """Unpack the packages in ``archives`` (name to .deb) into the empty folder ``tree`` and finish it.

    Raises:
        HostError: when dpkg-deb cannot read an archive.
        ImageError: when an archive holds a path that leads out of the tree.
    """
    for name in sorted(archives):
        _unpack(archives[name], tree)
        _write(tree / PACKAGE_RECORDS_DIR / name, _dpkg_deb("--field", archives[name]))
    for path in (*EMPTY_DIRS, *STICKY_DIRS):
        (tree / path).mkdir(parents=True, exist_ok=True)
    for path, text in TEXT_FILES.items():
        _write(tree / path, text.encode())
    for path, target in LINKS.items():
        _link(tree / path, target)
    _bundle_certificates(tree)


def _unpack(archive: Path, tree: Path) -> None:
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                for member in tar:
                    _unpack_member(tar, member, tree)
        except tarfile.TarError as error:
            process.kill()
            raise HostError(f"is not a Debian archive: {error}", place=str(archive)) from None
        process.stdout.read()  # past the end marker, so that dpkg-deb does not die of a closed pipe
        message = process.stderr.read().decode(errors="replace").strip()
    if process.returncode:
        raise HostError(message or "dpkg-deb failed", place=str(archive))


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, tree: Path) -> None:
    path = _merged(member.name)
    if not _is_kept(path):
        return
    place = tree / path
    if member.isdir():
        return  # made when a file needs it, so that no folder is left without one
    place.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        _link(place, _relative(path, member.linkname))
    elif member.islnk():
        shutil.copy(tree / _merged(member.linkname), place)
    elif member.isreg():
        source = tar.extractfile(member)
        assert source is not None
        with place.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        place.chmod(0o755 if member.mode & 0o111 else 0o644)
    else:
        raise ImageError("a Debian package holds a device or a pipe", place=member.name)


def _merged(name: str) -> str:
    """Return ``name`` without ``./`` and below usr when it lies in a merged folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ImageError("a Debian package holds a path that leads out of it", place=name)
    if parts and parts[0] in MERGED_DIRS:
        parts.insert(0, "usr")
    return "/".join(parts)


def _is_kept(path: str) -> bool:
    if _COPYRIGHT.fullmatch(path):
        return True
    if path.startswith(DROPPED_PATHS) or not path.startswith(KEPT_PATHS):
        return False
    module = _MODULE.fullmatch(path)
    return module is None or module[1] not in DROPPED_MODULES


def _relative(path: str, target: str) -> str:
    """Return the target of the link ``path`` relative to it, so that the tree works wherever it lies."""
    if not target.startswith("/"):
        return target
    return os.path.relpath("/" + _merged(target), "/" + str(PurePosixPath(path).parent))


def _link(place: Path, target: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def _write(place: Path, data: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    place.chmod(0o644)


def _dpkg_deb(option: str, archive: Path) -> bytes:
    done = subprocess.run(["dpkg-deb", option, str(archive)], capture_output=True, check=False)
    if done.returncode:
        raise HostError(done.stderr.decode(errors="replace").strip(), place=str(archive))
    return done.stdout


def _bundle_certificates(tree: Path) -> None:
    """Replace the certificate files by the one bundle that TLS libraries read, ordered by file name."""
    folder = tree / CERTIFICATES_DIR
    texts = [path.read_text(encoding="ascii").strip() for path in sorted(folder.rglob("*.crt"))]
    if not texts:
        raise HostError("the package ca-certificates holds no certificate")
    _write(tree / CERTIFICATES_FILE, ("\n".join(texts) + "\n").encode())
    shutil.rmtree(folder)
