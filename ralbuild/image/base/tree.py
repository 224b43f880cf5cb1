"""The base's whole file tree in a folder: Debian packages, wheels, bytecode; then proved by running it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import canonical_json, to_plain
from ralbuild.contract.places import BASE_MANIFEST, PACKAGES_DIR
from ralbuild.errors import ImageError
from ralbuild.image.base.apt import DebianPackage
from ralbuild.image.base.bytecode import compile_tree
from ralbuild.image.base.elf import strip_symbols
from ralbuild.image.base.lockfile import Lock
from ralbuild.image.base.prune import keeps
from ralbuild.image.base.recipe import PYTHON_VERSION, RECIPE
from ralbuild.image.base.report import Report
from ralbuild.image.base.rootfs import make_rootfs
from ralbuild.image.base.targets import base_target
from ralbuild.image.base.wheel import unpack_wheel
from ralbuild.image.treepython import python_command, python_home

MANIFEST_SCHEMA = "ralbuild.base/1"
_PROOF = """\
import json, platform, ssl, sys
import jinja2, numpy, prometheus_client, safetensors.torch, starlette.applications, tokenizers, torch, uvicorn
import transformers
from transformers.models.llama import modeling_llama
found = {"python": platform.python_version(), "torch": torch.__version__,
         "transformers": transformers.__version__, "a sum of 64 ones": str(int(torch.ones(8, 8).sum()))}
"""
# Both libraries answer without a GPU. NVRTC must refuse: 7 is NVRTC_ERROR_BUILTIN_OPERATION_FAILURE.
_CUDA_PROOF = """\
import ctypes
version, program = ctypes.c_int(), ctypes.c_void_p()
ctypes.CDLL("libcudart.so.12").cudaRuntimeGetVersion(ctypes.byref(version))
folder = torch.__path__[0] + "/../nvidia/cuda_nvrtc/lib/"
nvrtc = ctypes.CDLL(folder + "libnvrtc.so.12")
nvrtc.nvrtcCreateProgram(ctypes.byref(program), b"__global__ void k() {}", b"k.cu", 0, None, None)
found["CUDA runtime"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
found["NVRTC's refusal to compile at run time"] = str(nvrtc.nvrtcCompileProgram(program, 0, None))
"""
# PyPI's build of torch calls itself 2.4.1+cu121; its wheel does not.
_PROOF_END = """\
wrong = [f"{name} is {found[name]}, it should be {value}"
         for name, value in needed.items() if value not in (found[name], found[name].partition("+")[0])]
sys.exit("; ".join(wrong) or 0)
"""


_NVRTC_REFUSES = "7"


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that a base is made of: the packages, and the file of each by name."""

    target: str
    lock: Lock
    debian: tuple[DebianPackage, ...]
    archives: Mapping[str, Path]
    wheels: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the finished tree says of itself."""

    python: str
    torch: str
    transformers: str
    debian: str
    cuda: str = ""


def make_tree(sources: Sources, tree: Path, report: Report) -> None:
    """Fill the empty folder ``tree``.

    Raises:
        HostError, ImageError: as the parts do.
    """
    report.step("unpacking Debian packages and wheels")
    packages = tree / PACKAGES_DIR.lstrip("/")
    packages.mkdir(parents=True)
    # The largest first: torch takes longer than all the others together.
    order = sorted(sources.wheels, key=lambda name: (-sources.wheels[name].stat().st_size, name))
    with ThreadPoolExecutor(2) as pool:
        jobs: list[Future[None]] = [pool.submit(_install, name, sources, packages) for name in order[:1]]
        jobs.append(pool.submit(make_rootfs, sources.archives, tree))
        jobs += [pool.submit(_install, name, sources, packages) for name in order[1:]]
        for job in jobs:
            job.result()
    report.step("compiling bytecode")
    compile_tree(tree, report)
    place = tree / BASE_MANIFEST.lstrip("/")
    place.write_bytes(_manifest(sources))


def facts_of(tree: Path, sources: Sources) -> Facts:
    """Return what the image will say of itself; `prove` checks that it is true."""
    versions = {package.name: package.version for package in sources.debian}
    python = versions[f"python{PYTHON_VERSION}-minimal"]
    return Facts(
        python=python.rpartition("-")[0],  # without Debian's revision
        torch=sources.lock.version("torch"),
        transformers=sources.lock.version("transformers"),
        debian=(tree / "etc/debian_version").read_text(encoding="ascii").strip(),
        cuda=base_target(sources.target).cuda,
    )


def prove(tree: Path, facts: Facts) -> None:
    """Run the tree's Python: import what a server imports, compute something, compare the versions.

    Every function of every library that is loaded is bound at once, so that none is missing later.

    Raises:
        ImageError: when it does not run or is not what ``facts`` says.
    """
    environment = {
        "PYTHONHOME": python_home(tree),
        "PYTHONPATH": str(tree / PACKAGES_DIR.lstrip("/")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "HOME": "/nonexistent",
        "HF_HUB_OFFLINE": "1",
        "LD_BIND_NOW": "1",
    }
    command = [*python_command(tree), "-s", "-P", "-W", "ignore", "-c", proof_program(facts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tree)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise ImageError(f"the finished base does not run: {last[0]}", hint="this is a bug in its recipe")


def proof_program(facts: Facts) -> str:
    """Return a Python program that ends with status 0 in a base which is what ``facts`` says.

    Otherwise its last line on standard error says what is wrong. Empty facts are not compared.
    """
    needed = {"python": facts.python, "torch": facts.torch, "transformers": facts.transformers}
    needed["a sum of 64 ones"] = "64"
    if facts.cuda:
        needed["CUDA runtime"] = facts.cuda.rpartition(".")[0]
        needed["NVRTC's refusal to compile at run time"] = _NVRTC_REFUSES
    kept = {name: value for name, value in needed.items() if value}
    return f"{_PROOF}{_CUDA_PROOF if facts.cuda else ''}needed = {kept!r}\n{_PROOF_END}"


def _install(name: str, sources: Sources, packages: Path) -> None:
    unpack_wheel(sources.wheels[name], packages, keeps(name), strip_symbols)


def _manifest(sources: Sources) -> bytes:
    """Return ``base.json``: exactly what went in."""
    listed = wheel_list(sources.target, sources.lock, sources.wheels)
    return canonical_json({**listed, "debian": to_plain(sources.debian)})


def wheel_list(target: str, lock: Lock, wheels: Mapping[str, Path]) -> dict[str, Any]:
    """Return ``base.json`` without the packages of the distribution."""
    hashes = {wheel.name: wheel for wheel in lock.wheels}
    return {
        "schema": MANIFEST_SCHEMA,
        "target": target,
        "recipe": RECIPE,
        "lock": lock.sha256,
        "wheels": [
            {
                "name": name,
                "version": hashes[name].version,
                "file": path.name,
                "sha256": list(hashes[name].sha256),
            }
            for name, path in sorted(wheels.items())
        ],
    }
