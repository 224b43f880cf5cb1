"""Running `ralbuild` as its users do: a process, its standard output, its messages, its exit status."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ralbuild.digests import DigestCache
from ralbuild.image.assemble import assemble_image
from ralbuild.image.layout import write_layout
from ralbuild.image.plan import FileEntry, ImageConfig, ImagePlan, LayerPlan

ROOT = Path(__file__).parent.parent
MINIMAL = 'version: "0.3"\nmodel: tiny\nmax_seq_len: 512\n'
NO_KERNELS = "build: {targets: []}\n"


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


def ralbuild(*arguments: object, cwd: Path, env: Mapping[str, str] | None = None, umask: int = -1) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "ralbuild.cli.main", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "XDG_CACHE_HOME": str(cwd / "xdg"), **(env or {})},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Outcome(done.returncode, done.stdout, done.stderr)


BASE_FACTS = {
    "io.ralbuild.base.contract": "1",
    "io.ralbuild.base.target": "cpu",
    "io.ralbuild.base.lock": "0" * 64,
    "io.ralbuild.base.python": "3.11.2",
    "io.ralbuild.base.torch": "2",
    "io.ralbuild.base.transformers": "5",
}
"""The labels that every runtime base has."""


def write_fake_base(folder: Path, **labels: str) -> str:
    """Write a layout with the labels of a runtime base and one small file; return the option for it."""
    values = BASE_FACTS | labels
    layer = LayerPlan("base", "small", (FileEntry("etc/base", b"base\n"),), owned=("etc",))
    plan = ImagePlan(None, (layer,), ImageConfig(env=(("PATH", "/usr/bin"),), labels=values))
    write_layout(folder, assemble_image(plan), "", DigestCache(None), None, print)
    return f"oci:{folder}"


def listing(folder: Path) -> list[str]:
    """Return every path below ``folder``, the cache excepted."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "xdg" not in path.relative_to(folder).parts
    )


@contextlib.contextmanager
def podman() -> Iterator[list[str | Path]]:
    """The beginning of a podman command with a store of its own; its run folder must have a short path."""
    folder = Path(tempfile.mkdtemp(prefix="pod", dir="/tmp"))
    try:
        yield ["podman", "--root", folder / "root", "--runroot", folder / "run", "--storage-driver", "vfs"]
    finally:
        shutil.rmtree(folder)
