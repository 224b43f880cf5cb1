"""A base that an engine makes from `base render` on a Debian of debootstrap: pushed, built upon, served from.

Long: debootstrap and pip fetch and unpack half a gigabyte. Needs debootstrap and a network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli_support import MINIMAL, NO_KERNELS, ralbuild
from model_factory import write_model
from release_support import free_ports

from benchmarks.image import registry

pytestmark = [pytest.mark.docker, pytest.mark.long]
CACHE = {"XDG_CACHE_HOME": str(Path.home() / ".cache")}
"""Of the user: the wheels of the lock are there already."""


@dataclass(frozen=True)
class Made:
    engine: docker.DockerClient
    below: str
    base: str
    folder: Path


def mirror() -> str:
    """Return where this machine's own apt finds Debian."""
    said = subprocess.check_output(["apt-get", "indextargets", "--format", "$(SITE)"], text=True)
    return next(line for line in said.splitlines() if "security" not in line)


def pushed(engine: docker.DockerClient, name: str) -> str:
    """Push an image of the engine and return its name by digest."""
    engine.images.push(name)
    return str(engine.images.get(name).attrs["RepoDigests"][0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("base")
    root, packed = folder / "root", folder / "root.tar"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", root, mirror()], check=True, capture_output=True
    )
    subprocess.run(["tar", "-C", root, "-cf", packed, "."], check=True)
    with ExitStack() as stack:
        engine = docker.from_env()
        stack.callback(engine.close)
        host = stack.enter_context(registry(folder, "registry"))
        for name in ("debian", "base"):
            stack.callback(
                subprocess.run, ["docker", "rmi", "--force", f"{host}/{name}:1"], capture_output=True
            )
        engine.api.import_image(str(packed), repository=f"{host}/debian", tag="1")
        below = pushed(engine, f"{host}/debian:1")
        done = ralbuild("base", "render", "--from", below, "--out", "context", cwd=folder, env=CACHE)
        assert done.code == 0, done.err
        command = ["docker", "build", "--network", "host", "--tag", f"{host}/base:1", "context"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        yield Made(engine, below, pushed(engine, f"{host}/base:1"), folder)


def bill_of_materials(layout: Path) -> Any:
    def blob(descriptor: dict[str, Any]) -> Any:
        return json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_bytes())

    entries = json.loads((layout / "index.json").read_bytes())["manifests"]
    entry = next(item for item in entries if "cyclonedx" in item.get("artifactType", ""))
    return blob(blob(entry)["layers"][0])


def test_an_image_on_it_serves_and_its_bill_of_materials_names_the_distributions_packages(made: Made) -> None:
    model = write_model(made.folder / "model")
    (made.folder / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS)
    (port,) = free_ports(1)
    words = ("--model", model, "--config", "ral-config.yaml", "--base", made.base, "--tag", "on-debian:1")
    for outputs in (("--output", "docker"), ("--output", "oci:layout", "--sbom")):
        done = ralbuild("image", *words, *outputs, cwd=made.folder)
        assert done.code == 0, done.err
    bill = bill_of_materials(made.folder / "layout")
    found = {item.get("purl", "").partition("?")[0] for item in bill["components"]}
    python = made.engine.containers.run(made.base, ["-V"], entrypoint="python3.11", remove=True).decode()
    version = re.fullmatch(r"Python (\S+)\n", python)
    assert version
    assert any(purl.startswith(f"pkg:deb/debian/python3.11@{version[1]}") for purl in found)
    assert "pkg:pypi/starlette" in {purl.partition("@")[0] for purl in found}
    container = made.engine.containers.run(
        "on-debian:1",
        detach=True,
        network_mode="host",
        read_only=True,
        tmpfs={"/tmp": ""},
        cap_drop=["ALL"],
        environment={"RAL_PORT": str(port), "RAL_HOST": "127.0.0.1"},
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            container.reload()
            assert container.status != "exited", container.logs().decode()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(container.logs().decode())
    finally:
        container.remove(force=True)
        made.engine.images.remove("on-debian:1", force=True)
