"""A base made by a container engine: what the context holds, and what other tools read in it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from base_sources import FACTS
from cli_support import ralbuild
from wheel_factory import make_wheel

from ralbuild.image.base import list_worker
from ralbuild.image.base.dockerfile import context_files
from ralbuild.image.base.layers import base_config
from ralbuild.image.base.lockfile import Lock, load_lock, parse_lock
from ralbuild.image.base.targets import TARGETS
from ralbuild.image.facts import base_packages
from ralbuild.image.plan import BaseImage
from ralbuild.image.planning import check_base

BELOW = "registry.example/debian:12@sha256:" + "a" * 64


def files_of(target: str) -> dict[str, bytes]:
    lock = load_lock(target)
    wheels = {wheel.name: Path(f"{wheel.name}-{wheel.version}-py3-none-any.whl") for wheel in lock.wheels}
    return context_files(TARGETS[target], BELOW, lock, wheels)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_dockerfile_passes_hadolint_and_stands_on_a_digest(target: str, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_bytes(files_of(target)["Dockerfile"])
    subprocess.run([Path(sys.executable).parent / "hadolint", dockerfile], check=True)
    origins = re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)
    assert origins == [BELOW, "system", "system"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_its_labels_and_environment_are_those_of_the_embedded_base(target: str) -> None:
    lines = files_of(target)["Dockerfile"].decode().splitlines()
    said = {
        kind: dict(
            shlex.split(line.removeprefix(f"{kind} "))[0].split("=", 1)
            for line in lines
            if line.startswith(f"{kind} ")
        )
        for kind in ("LABEL", "ENV")
    }
    embedded = base_config(target, load_lock(target), FACTS)
    assert said["ENV"] == dict(embedded.env)
    differ = {"io.ralbuild.base.debian", "io.ralbuild.base.python"}
    differ |= {name for name in embedded.labels if name.endswith((".torch", ".transformers", ".cuda"))}
    assert {k: v for k, v in said["LABEL"].items() if k not in differ} == {
        k: v for k, v in embedded.labels.items() if k not in differ
    }
    check_base(BaseImage("sha256:" + "b" * 64, "made", {"config": {"Labels": said["LABEL"]}}, ()), target)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_requirements_are_the_lock_and_the_list_names_every_wheel(target: str) -> None:
    files = files_of(target)
    lock = load_lock(target)
    assert parse_lock(files["requirements.txt"].decode(), "requirements.txt").wheels == lock.wheels
    rows = json.loads(files["wheels.json"])["wheels"]
    assert [row["name"] for row in rows] == sorted(wheel.name for wheel in lock.wheels)


def test_pip_takes_the_requirements_and_refuses_a_wheel_that_is_not_the_locked_one(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    names = ("torch", "transformers")
    paths = {name: make_wheel(wheels, name, {f"{name}/__init__.py": b"x = 1\n"}) for name in names}
    digest = {n: subprocess.check_output(["sha256sum", p], text=True).split()[0] for n, p in paths.items()}
    text = "".join(f"{name}==1.0 --hash=sha256:{digest[name]}\n" for name in names)
    lock = Lock(parse_lock(text, "lock").wheels, "1" * 64)
    files = context_files(TARGETS["cpu"], BELOW, lock, paths)
    requirements = tmp_path / "requirements.txt"
    requirements.write_bytes(files["requirements.txt"])
    # The arguments are those of the Dockerfile's own line.
    line = next(x for x in files["Dockerfile"].decode().replace("\\\n", " ").splitlines() if "-m pip" in x)
    words = shlex.split(line.partition("-m pip")[2].partition("&&")[0])
    places = {
        "/build/wheels": wheels,
        "/build/requirements.txt": requirements,
        "/opt/ral/packages": tmp_path / "out",
    }
    command = [sys.executable, "-m", "pip", *(str(places.get(word, word)) for word in words)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "out/torch/__init__.py").read_bytes() == b"x = 1\n"
    with paths["torch"].open("ab") as file:
        file.write(b"\0")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr


def test_the_list_made_inside_names_what_dpkg_has_installed(tmp_path: Path) -> None:
    """dpkg's own status file is the other view; the bill of materials reads the result."""
    rest = tmp_path / "wheels.json"
    rest.write_bytes(files_of("cpu")["wheels.json"])
    data = subprocess.check_output([sys.executable, "-I", list_worker.__file__, rest])
    stanzas = Path("/var/lib/dpkg/status").read_text(encoding="utf-8").split("\n\n")
    installed = sorted(
        re.search(r"^Package: (\S+)", stanza, re.MULTILINE)[1]  # type: ignore[index]
        for stanza in stanzas
        if "\nStatus: install ok installed\n" in stanza
    )
    packages = base_packages(data)
    assert [package.name for package in packages if package.kind == "deb"] == installed
    assert {package.distribution for package in packages if package.kind == "deb"} == {"debian"}
    assert not any(package.sha256 for package in packages if package.kind == "deb")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "cpu"], "is needed for --target cpu"),
        (["--target", "cpu", "--from", "debian:12"], "needs a digest, found 'debian:12'"),
        (["--target", "cpu", "--from", "a b@sha256:" + "a" * 64], "needs a digest, found 'a b@"),
        (["--target", "cpu", "--from", "a//b@sha256:" + "a" * 64], "needs a digest, found 'a//b@"),
        (["--target", "cpu", "--from", "DEBIAN@sha256:" + "a" * 64], "needs a digest, found 'DEBIAN@"),
        (["--target", "cpu", "--from", BELOW, "--refresh"], "unrecognized arguments: --refresh"),
    ],
)
def test_what_cannot_be_rendered_is_refused_and_leaves_nothing(
    words: list[str], said: str, tmp_path: Path
) -> None:
    out = tmp_path / "context"
    done = ralbuild("base", "render", *words, "--out", out, cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert not list(tmp_path.iterdir())
