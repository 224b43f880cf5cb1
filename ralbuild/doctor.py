"""What this machine has and lacks, for `ralbuild doctor`. Nothing is installed or changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ralbuild.compile.toolchain import find_toolchain
from ralbuild.digests import cache_root
from ralbuild.errors import RalError
from ralbuild.pins import load_pins
from ralbuild.report import format_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for; ``needed`` when `ralbuild image` cannot do without it."""

    name: str
    ok: bool
    needed: bool
    found: str
    hint: str = ""


def examine() -> list[Finding]:
    """Look for everything that a command of ralbuild may use."""
    return [
        _python(),
        _toolchain(),
        _tool("apt-get", needed=True, why="the embedded base is made of Debian packages"),
        _tool("dpkg-deb", needed=True, why="the embedded base is made of Debian packages"),
        _cache_space(),
        _docker(),
        _gpu(),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", sys.version_info >= (3, 11), True, version, "needs Python 3.11 or later")


def _toolchain() -> Finding:
    try:
        tools = find_toolchain(load_pins())
    except RalError as error:
        problem = error.problems[0]
        return Finding("kernel toolchain", False, True, problem.message, problem.hint)
    found = f"triton {tools.triton_version}, ptxas {tools.ptxas_version}, digest as pinned"
    return Finding("kernel toolchain", True, True, found)


def _tool(name: str, *, needed: bool, why: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path is not None, needed, path or "not found", why)


def _cache_space() -> Finding:
    base = cache_root()
    if base is None:
        return Finding("space for caches", False, True, "no home folder", "set XDG_CACHE_HOME")
    while not base.exists():
        base = base.parent
    free = shutil.disk_usage(base).free
    return Finding("space for caches", free > 6 << 30, True, f"{format_bytes(free)} free", "needs 6 GB")


def _docker() -> Finding:
    try:
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding(
            "docker engine", False, False, "not found", "not needed: images are written without it"
        )
    if done.returncode:
        return Finding(
            "docker engine", False, False, "does not answer", "not needed: images are written without it"
        )
    return Finding("docker engine", True, False, done.stdout.strip())


def _gpu() -> Finding:
    if not Path("/dev/nvidiactl").exists():
        return Finding(
            "NVIDIA GPU", False, False, "not found", "not needed: kernels are compiled without one"
        )
    driver = Path("/sys/module/nvidia/version")
    return Finding("NVIDIA GPU", True, False, driver.read_text().strip() if driver.exists() else "present")
