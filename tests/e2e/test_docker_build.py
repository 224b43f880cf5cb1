"""The classic builder makes the same tree of files from a rendered context as the daemonless writer does.

The base comes from Debian's registry on loopback, by the digest that the Dockerfile names: the context
is built as it was rendered.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cli_support import BASE_FACTS, MINIMAL, NO_KERNELS, ralbuild
from image_cases import NOWHERE, root_layer
from model_factory import write_model

from benchmarks.image import registry
from ralbuild.image.assemble import assemble_image
from ralbuild.image.layout import write_layout
from ralbuild.image.plan import ImageConfig, ImagePlan

pytestmark = pytest.mark.docker
OURS, THEIRS = "ralbuild-test/ours:v1", "ralbuild-test/theirs:v1"
Tree = dict[str, tuple[object, ...]]


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    client.ping()
    yield client
    client.close()


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    """A base that has been pushed, by digest."""
    labels = ImageConfig(env=(("PATH", "/usr/bin"),), workdir="/tmp", labels=BASE_FACTS)
    write_layout(
        tmp_path / "base", assemble_image(ImagePlan(None, (root_layer(),), labels)), "", NOWHERE, None, print
    )
    with registry(tmp_path, "registry") as host:
        pushed = ralbuild("push", "oci:base", f"registry:{host}/base:v1", "--quiet", cwd=tmp_path)
        assert pushed.code == 0, pushed.err
        yield f"{host}/base@{pushed.out.strip()}"


def tree(engine: docker.DockerClient, image: str) -> Tree:
    """Return type, mode, owner, link and content of everything in a container of ``image``; times are not compared."""
    container = engine.containers.create(image)
    try:
        data = io.BytesIO(b"".join(container.export()))  # type: ignore[arg-type]
    finally:
        container.remove()
    found: Tree = {}
    with tarfile.open(fileobj=data) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            digest = hashlib.sha256(file.read()).hexdigest() if file else ""
            owner = (member.uid, member.gid)
            found[member.name.rstrip("/")] = (member.type, oct(member.mode), owner, member.linkname, digest)
    return found


def run_facts(engine: docker.DockerClient, image: str) -> dict[str, object]:
    config = engine.images.get(image).attrs["Config"]
    config["Env"].sort()
    return {
        name: config[name]
        for name in ("Env", "Entrypoint", "Cmd", "User", "WorkingDir", "ExposedPorts", "StopSignal")
    }


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_builder_makes_the_tree_of_the_daemonless_image(
    engine: docker.DockerClient, base: str, tmp_path: Path, umask: int
) -> None:
    write_model(tmp_path / "model", shards=3)
    (tmp_path / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS)
    common = ["--model", "model", "--base", base, "--quiet"]
    try:
        done = ralbuild("image", *common, "--output", "docker", "--tag", OURS, cwd=tmp_path)
        assert done.code == 0, done.err
        done = ralbuild("render", *common, "--out", "context", cwd=tmp_path, umask=umask)
        assert done.code == 0, done.err
        shard = next((tmp_path / "model").glob("*.safetensors"))
        assert (tmp_path / "context/models" / shard.name).samefile(shard)
        engine.images.build(path=str(tmp_path / "context"), tag=THEIRS, rm=True)
        ours, theirs = tree(engine, OURS), tree(engine, THEIRS)
        assert "models/config.json" in ours
        differing = {
            name: (ours.get(name), theirs.get(name))
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        }
        assert differing == {}, json.dumps(differing, default=str, indent=1)
        assert run_facts(engine, OURS) == run_facts(engine, THEIRS)
    finally:
        for name in (OURS, THEIRS, base):
            engine.images.remove(name, force=True)
