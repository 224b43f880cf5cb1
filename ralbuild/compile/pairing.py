"""Proof that a PTX and the cubin beside it are of one compile: ptxas, run again, gives the same bytes."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from ralbuild.compile.toolchain import Toolchain
from ralbuild.contract.codec import sha256_hex
from ralbuild.errors import CompileError

TIMEOUT_SECONDS = 120.0


def check_pair(ptx: bytes, cubin: bytes, name: str, arch: str, toolchain: Toolchain) -> None:
    """Assemble ``ptx`` with the pinned ptxas and compare with ``cubin``, bit for bit.

    Raises:
        CompileError: when ptxas fails or gives other bytes.
    """
    place = f"{name} for {arch}"
    found = assemble(ptx, arch, toolchain, place)
    if found != cubin:
        raise CompileError(
            f"the cubin was not made of the PTX beside it: ptxas {toolchain.ptxas_version} gives SHA-256 "
            f"{sha256_hex(found)}, the bundle has {sha256_hex(cubin)}",
            place=place,
            hint="compile again with an empty cache folder",
        )


def assemble(ptx: bytes, arch: str, toolchain: Toolchain, place: str) -> bytes:
    """Return the cubin that ptxas makes of a PTX, with the options that Triton gives it."""
    target = f"{arch}a" if int(arch.removeprefix("sm_")) >= 90 else arch
    with tempfile.TemporaryDirectory(prefix="ralbuild-ptxas-") as folder:
        Path(folder, "kernel.ptx").write_bytes(ptx)
        command = [str(toolchain.ptxas), "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        try:
            done = subprocess.run(
                command, cwd=folder, env={}, capture_output=True, timeout=TIMEOUT_SECONDS, check=False
            )
            if done.returncode == 0:
                return Path(folder, "kernel.cubin").read_bytes()
            reason = done.stderr.decode("utf-8", "replace").strip()[-300:]
        except subprocess.TimeoutExpired:
            reason = f"no end after {TIMEOUT_SECONDS:.0f} s"
    raise CompileError(f"ptxas does not take the PTX: {reason}", place=place)
