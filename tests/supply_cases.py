"""Signed images of a tiny model for the tests of the supply room."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from cli_support import BASE_FACTS, MINIMAL, NO_KERNELS, Outcome
from model_factory import write_model

from ralbuild.cli.main import main
from ralbuild.digests import DigestCache
from ralbuild.image.assemble import assemble_image
from ralbuild.image.layout import write_layout
from ralbuild.image.plan import FileEntry, ImageConfig, ImagePlan, LayerPlan

RULES = "routing: {rules: [{match: 'finance.*', action: apply_financial_guardrails}]}\n"
CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n"
DEBIAN = [
    {
        "name": "libc6",
        "version": "2.36-9+deb12u13",
        "architecture": "amd64",
        "file": "libc6.deb",
        "size": 1,
        "sha256": "aa" * 32,
    },
    {
        "name": "tzdata",
        "version": "2025b-0+deb12u2",
        "architecture": "all",
        "file": "tz.deb",
        "size": 1,
        "sha256": "bb" * 32,
    },
]
WHEELS = [
    {"name": "jinja2", "version": "3.1.6", "file": "jinja2-3.1.6-py3-none-any.whl", "sha256": ["cc" * 32]}
]


@dataclass(frozen=True, slots=True)
class Work:
    """A folder with a model, a base, a config and keys, and what one signed build of it printed."""

    root: Path
    digest: str

    @property
    def layout(self) -> Path:
        return self.root / "out"


def ralbuild(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, umask: int | None = None
) -> Outcome:
    """Run a command in this process: nine in ten seconds of a small build are Python's start."""
    out, err = io.StringIO(), io.StringIO()
    old = os.umask(0o022 if umask is None else umask)
    changed = {"XDG_CACHE_HOME": str(cwd / "xdg"), **(env or {})}
    try:
        with (
            contextlib.chdir(cwd), mock.patch.dict(os.environ, changed),
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        ):  # fmt: skip
            code = main([str(word) for word in arguments])
    finally:
        os.umask(old)
    return Outcome(code, out.getvalue(), err.getvalue())


def write_small_base(
    folder: Path, version: str = "2025b-0+deb12u2", content: bytes = b"base\n", **labels: str
) -> None:
    """Write a layout with a base's labels and its list of packages; ``version`` is the one of tzdata."""
    debian = [DEBIAN[0], {**DEBIAN[1], "version": version}]
    packages = json.dumps({"schema": "ralbuild.base/1", "debian": debian, "wheels": WHEELS}).encode()
    values = {**BASE_FACTS, **labels}
    system = LayerPlan("Debian", "small", (FileEntry("etc/base", content),), owned=("etc",))
    listing = LayerPlan(
        "list of packages", "small", (FileEntry("opt/ral/base.json", packages),), owned=("opt",)
    )
    plan = ImagePlan(None, (system, listing), ImageConfig(env=(("PATH", "/usr/bin"),), labels=values))
    write_layout(folder, assemble_image(plan), "", DigestCache(None), None, print)


def write_inputs(root: Path, rules: str = RULES) -> None:
    write_model(root / "model", shards=2)
    (root / "model" / "README.md").write_text(CARD)
    write_small_base(root / "base")
    (root / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS + rules)


def make_key(folder: Path, name: str = "sign") -> Path:
    """Make a P-256 key pair with OpenSSL: ``<name>.key`` and ``<name>.pub``."""
    key = folder / f"{name}.key"
    command = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key]
    subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", folder / f"{name}.pub"], check=True)
    return key


def build(root: Path, *more: object, output: str = "out", **options: Any) -> str:
    """Build an image and return what was printed."""
    done = ralbuild(
        "image", "--model", "model", "--base", f"oci:{root / 'base'}", "--output", f"oci:{output}", "--tag", "team/tiny:1",
        "--quiet", *more, cwd=root, **options,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done.out.strip()


def signed_work(root: Path) -> Work:
    write_inputs(root)
    make_key(root)
    return Work(root, build(root, "--sign", "sign.key", "--sbom", "--provenance"))


def index(layout: Path) -> list[dict[str, Any]]:
    return json.loads((layout / "index.json").read_bytes())["manifests"]


def blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()


def artifacts(layout: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Return manifest and content of everything beside the image, by what it is."""
    found = {}
    for entry in index(layout):
        notes = entry.get("annotations", {})
        manifest = json.loads(blob(layout, entry["digest"]))
        name = notes.get("dev.sigstore.bundle.predicateType") or entry.get("artifactType")
        if notes.get("org.opencontainers.image.ref.name", "").endswith(".sig"):
            name = "old signature"
        if name:
            found[name] = (manifest, blob(layout, manifest["layers"][0]["digest"]))
    return found
