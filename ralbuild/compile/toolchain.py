"""Finds the pinned compiler without importing it: Triton by its metadata, ptxas by its digest."""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from ralbuild.errors import HostError
from ralbuild.pins import Pins


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler that was checked against the pins.

    Attributes:
        triton_version: such as ``3.7.1``.
        triton_record: digest of Triton's compiled core as its wheel records it; empty when it does not.
        triton_root: folder that holds the package.
        ptxas: the binary.
        ptxas_version, ptxas_sha256: of that binary.
        python_version: major and minor, for Triton reads Python's own syntax tree.
    """

    triton_version: str
    triton_record: str
    triton_root: Path
    ptxas: Path
    ptxas_version: str
    ptxas_sha256: str
    python_version: str


def find_toolchain(pins: Pins) -> Toolchain:
    """Return the installed toolchain.

    Raises:
        HostError: when a part is missing, of another version, or not the pinned bytes.
    """
    wanted = pins.toolchain
    triton = _installed("triton", f"triton>={wanted.triton_least},<{wanted.triton_below}")
    low, high = _numbers(wanted.triton_least), _numbers(wanted.triton_below)
    if not low <= _numbers(triton.version) < high:
        raise HostError(
            f"needs Triton {wanted.triton_least} or later, below {wanted.triton_below}, "
            f"found {triton.version}",
            place="triton",
            hint=f"pip install 'triton>={wanted.triton_least},<{wanted.triton_below}'",
        )
    _refuse_plugins(wanted.triton_backends)
    requirement = f"{wanted.ptxas_package}=={wanted.ptxas_version}"
    package = _installed(wanted.ptxas_package, requirement)
    ptxas = Path(str(package.locate_file(wanted.ptxas_file)))
    digest = _digest(ptxas, requirement)
    if package.version != wanted.ptxas_version or digest != wanted.ptxas_sha256:
        raise HostError(
            f"needs version {wanted.ptxas_version} with SHA-256 {wanted.ptxas_sha256}, "
            f"found {package.version} with {digest}",
            place=str(ptxas),
            hint=f"pip install --force-reinstall {requirement}",
        )
    return Toolchain(
        triton_version=triton.version,
        triton_record=_recorded_digest(triton, "triton/_C/libtriton.so"),
        triton_root=Path(str(triton.locate_file("triton"))),
        ptxas=ptxas,
        ptxas_version=package.version,
        ptxas_sha256=digest,
        python_version=".".join(platform.python_version_tuple()[:2]),
    )


def _installed(name: str, requirement: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise HostError(
            "is not installed", place=name, hint=f"kernels need it: pip install '{requirement}'"
        ) from None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``3.7.1+git`` gives (3, 7, 1)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _refuse_plugins(known: tuple[str, ...]) -> None:
    """Any package can register a Triton backend and would then run inside the compiler."""
    unknown = sorted({item.value for item in entry_points(group="triton.backends")} - set(known))
    if unknown:
        raise HostError(
            f"has the unknown backends {', '.join(unknown)}",
            place="triton",
            hint="uninstall the packages that provide them, or build in a clean virtual environment",
        )


def _digest(path: Path, requirement: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise HostError(
            f"cannot be read: {error.strerror}",
            place=str(path),
            hint=f"pip install --force-reinstall {requirement}",
        ) from None


def _recorded_digest(package: Distribution, name: str) -> str:
    for file in package.files or ():
        if str(file) == name and file.hash is not None:
            return file.hash.value
    return ""
