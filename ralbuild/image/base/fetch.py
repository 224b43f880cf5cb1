"""Wheels of the lock, fetched by pip into the user's cache and checked here again."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ralbuild.errors import HostError, ImageError, RalError
from ralbuild.image.base.files import exclusive, hash_file
from ralbuild.image.base.lockfile import LockedWheel, format_lock, normalised
from ralbuild.image.base.recipe import PYTHON_VERSION
from ralbuild.image.base.report import Report

# The base has glibc 2.36. pip takes the names literally, so the older ones are listed too.
_GLIBC_MINORS = (36, 35, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
_MISMATCH = re.compile(r"Expected sha256 (?P<needed>[0-9a-f]{64}).*?Got\s+(?P<found>[0-9a-f]{64})", re.DOTALL)
_UNFOUND = re.compile(r"No matching distribution found for (?P<requirement>\S+)")
_TORCH_HINT = (
    "the lock needs this build of torch, which for the cpu base is a CPU build of torch: let pip find it "
    "(PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), or lock the build you have with `ralbuild base lock`"
)
_HINT = "check pip's index settings, or make a new lock with `ralbuild base lock`"


def fetch_wheels(wheels: Sequence[LockedWheel], folder: Path, report: Report) -> dict[str, Path]:
    """Return the wheel file of every package by name, downloading into ``folder`` what is not there.

    Raises:
        HostError: when pip is missing or cannot find or reach a package.
        ImageError: when the index serves another file than the locked one.
    """
    with exclusive(folder / ".lock"):
        found = _cached(wheels, folder)
        missing = [wheel for wheel in wheels if wheel.name not in found]
        if missing:
            size = f", {sum(wheel.size for wheel in missing) / 1e6:,.0f} MB"
            report.step(f"downloading {len(missing)} of {len(wheels)} Python packages{size}")
            with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
                _download(missing, Path(name))
                for path in sorted(Path(name).glob("*.whl")):
                    path.replace(folder / path.name)
            found = _cached(wheels, folder)
        for wheel in missing:
            if wheel.name not in found:
                raise ImageError(f"pip brought no file of {wheel.name} with the locked sha256", hint=_HINT)
    return found


def run_pip(verb: str, arguments: list[str]) -> None:
    """Run ``pip download`` or ``pip install --dry-run`` for the base's Python and platform.

    Raises:
        HostError: when pip is missing or fails for a reason that `_explain` does not know.
        ImageError: when pip found another file than the locked one.
    """
    command = [sys.executable, "-m", "pip", verb, "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", f"--python-version={PYTHON_VERSION}", "--implementation=cp"]
    command += [f"--platform={name}" for name in PLATFORMS]
    command += arguments
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise _explain(verb, done.stderr)


def _download(wheels: Sequence[LockedWheel], folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(format_lock(wheels, "# what is missing"), encoding="utf-8")
    options = ["--dest", str(folder), "--no-deps", "--require-hashes", "--requirement", str(requirements)]
    run_pip("download", options)


def _cached(wheels: Sequence[LockedWheel], folder: Path) -> dict[str, Path]:
    by_name: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        by_name.setdefault(normalised(path.name.partition("-")[0]), []).append(path)
    found = {}
    for wheel in wheels:
        for path in by_name.get(wheel.name, []):
            if path.name.split("-")[1] == wheel.version and hash_file(path) in wheel.sha256:
                found[wheel.name] = path
                break
    return found


def _explain(verb: str, stderr: str) -> RalError:
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    mismatch, unfound = _MISMATCH.search(stderr), _UNFOUND.search(stderr)
    if mismatch:
        # The line before says: name==version from LINK (from FILE):
        before = stderr[: mismatch.start()].split("\n")
        name = next((line.split()[0] for line in reversed(before) if line.strip()), "a wheel")
        message = f"needs sha256 {mismatch['needed']}, found {mismatch['found']}"
        return ImageError(message, place=name, hint=_hint(name))
    if unfound:
        name = unfound["requirement"]
        return HostError(f"pip finds no wheel for Python {PYTHON_VERSION}", place=name, hint=_hint(name))
    if "No module named pip" in stderr:
        return HostError(f"{sys.executable} has no pip", hint="run: python -m ensurepip")
    message = "; ".join(lines[:3]) or "failed without saying why"
    return HostError(message, place=f"pip {verb}", hint=_hint(message))


def _hint(text: str) -> str:
    return _TORCH_HINT if re.search(r"\btorch==", text) else _HINT
