"""Debian packages for an ordinary user: apt with private state resolves, downloads and checks them.

The status file is empty, so apt resolves as if nothing were installed; its lists, caches and locks lie
in a folder of ours. Sources, keyrings, proxies and pins are the machine's own, and apt checks the
signatures. Maintainer scripts are never run. Nothing of the host is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ralbuild.digests import make_cache_folder
from ralbuild.errors import HostError
from ralbuild.image.base.files import exclusive, hash_file
from ralbuild.image.base.recipe import DEBIAN_ARCHITECTURE

MAX_LIST_AGE_S = 24 * 3600
"""Lists older than this are refreshed before they are used."""

# `#clear` drops hooks that images of Debian configure; they would run, and delete, outside our folder.
_CONFIG = """\
#clear APT::Architectures;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Get::AllowUnauthenticated "false";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Sandbox::User "root";
Acquire::AllowInsecureRepositories "false";
Acquire::ForceHash "sha256";
Acquire::Languages "none";
Acquire::Retries "3";
Dir::Cache "{folder}/cache";
Dir::Cache::Archives "{folder}/cache/archives";
Dir::Cache::pkgcache "pkgcache.bin";
Dir::Cache::srcpkgcache "srcpkgcache.bin";
Dir::Log "{folder}/log";
Dir::State "{folder}/state";
Dir::State::Lists "{folder}/lists";
Dir::State::status "{folder}/state/status";
"""
_URI_LINE = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """One resolved package; ``file`` is its archive's basename, ``size`` in bytes, ``sha256`` in hex."""

    name: str
    version: str
    architecture: str
    file: str
    size: int
    sha256: str


class PrivateApt:
    """apt-get with all its state under ``folder``; one process at a time uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.archives = folder / "archives"
        self._config = folder / "apt.conf"

    def update(self) -> None:
        """Fetch the lists of this machine's sources anew.

        Raises:
            HostError: without apt, or when a list cannot be fetched or its signature is wrong.
        """
        with exclusive(self.folder / "lock"):
            self._prepare()
            self._update()

    def resolve(self, names: Sequence[str]) -> list[DebianPackage]:
        """Return the dependency closure of ``names``, sorted by package name; old lists are updated first.

        Raises:
            HostError: without apt, without sources, or when they have no such packages.
        """
        with exclusive(self.folder / "lock"):
            self._prepare()
            if not self._lists_are_fresh():
                self._update()
            # apt leaves out what its archive folder holds already; it is empty, `download` uses another.
            text = self._run(["install", "-qq", "-y", "--reinstall", "--print-uris", *names])
        packages = [_parse_uri_line(line) for line in text.splitlines() if line.startswith("'")]
        return sorted(packages, key=lambda package: package.name)

    def download(self, packages: Sequence[DebianPackage]) -> dict[str, Path]:
        """Return the archive of every package by name, downloaded when it is not there, checked always.

        Raises:
            HostError: when one cannot be fetched or is not what the signed lists say.
        """
        with exclusive(self.folder / "lock"):
            self._prepare()
            paths = {package.name: self.archives / package.file for package in packages}
            missing = [package for package in packages if not _is_intact(paths[package.name], package)]
            for package in missing:
                paths[package.name].unlink(missing_ok=True)
            if missing:
                wanted = [f"{package.name}={package.version}" for package in missing]
                self._run(["download", "-qq", *wanted], cwd=self.archives)
            for package in missing:
                self._adopt(package, paths[package.name])
        return paths

    def _adopt(self, package: DebianPackage, path: Path) -> None:
        if not _is_intact(path, package):
            found = hash_file(path) if path.is_file() else "nothing"
            message = f"needs sha256 {package.sha256}, found {found}"
            raise HostError(message, place=package.file, hint="try again: the mirror may be mid-update")

    def _prepare(self) -> None:
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise HostError(
                "the embedded base needs apt-get and dpkg-deb, found neither or only one",
                hint="build it on Debian 12 (no root needed), or pass --base oci:DIR or REF@sha256:...",
            )
        for name in ("archives", "cache/archives/partial", "lists/partial", "state"):
            make_cache_folder(self.folder / name)
        (self.folder / "state/status").write_bytes(b"")
        text = _CONFIG.format(folder=self.folder, architecture=DEBIAN_ARCHITECTURE)
        self._config.write_text(text, encoding="utf-8")

    def _lists_are_fresh(self) -> bool:
        stamp = self.folder / "updated"
        try:
            age = time.time() - stamp.stat().st_mtime
        except FileNotFoundError:
            return False
        return 0 <= age < MAX_LIST_AGE_S

    def _update(self) -> None:
        self._run(["update", "-qq"])
        (self.folder / "updated").write_bytes(b"")

    def _run(self, arguments: list[str], cwd: Path | None = None) -> str:
        command = ["apt-get", "-c", str(self._config), *arguments]
        environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise _apt_error(arguments[0], done.stderr)
        return done.stdout


def _is_intact(path: Path, package: DebianPackage) -> bool:
    return path.is_file() and path.stat().st_size == package.size and hash_file(path) == package.sha256


def _parse_uri_line(line: str) -> DebianPackage:
    """Read ``'URI' FILE SIZE SHA256:HEX``; the file is NAME_VERSION_ARCH.deb, colons percent-encoded."""
    found = _URI_LINE.match(line)
    if found is None:
        raise HostError("apt-get names a package without a SHA-256", place=line)
    name, version, architecture = found["file"].removesuffix(".deb").split("_")
    return DebianPackage(
        name=name,
        version=urllib.parse.unquote(version),
        architecture=architecture,
        file=found["file"],
        size=int(found["size"]),
        sha256=found["sha256"],
    )


def _apt_error(verb: str, stderr: str) -> HostError:
    lines = [line.removeprefix("E: ") for line in stderr.splitlines() if line.startswith("E: ")]
    message = "; ".join(lines[:3]) or "failed without saying why"
    if "Unable to locate package" in stderr or "has no installation candidate" in stderr:
        hint = "the embedded base needs the packages of Debian 12 in this machine's apt sources"
    else:
        hint = "check this machine's network and apt sources, or pass --base oci:DIR"
    return HostError(message, place=f"apt-get {verb}", hint=hint)
