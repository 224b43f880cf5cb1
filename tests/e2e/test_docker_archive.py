"""A docker engine loads our archive as it is; the engine's address comes from the environment."""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.models.images import Image as DockerImage

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from image_cases import NOWHERE, make_image, write_weights

from ralbuild.image.assemble import Image
from ralbuild.image.outputs import ArchiveOutput
from ralbuild.image.write import write_image

pytestmark = pytest.mark.docker
TAG = "ralbuild-test/archive:v1"


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    client.ping()
    yield client
    client.close()


@pytest.fixture
def image(tmp_path: Path) -> Image:
    write_weights(tmp_path / "model")
    return make_image(tmp_path / "model")


@pytest.fixture
def loaded(engine: docker.DockerClient, image: Image, tmp_path: Path) -> Iterator[DockerImage]:
    write_image(image, [ArchiveOutput(tmp_path / "image.tar")], tag=TAG, cache=NOWHERE)
    with (tmp_path / "image.tar").open("rb") as file:
        (found,) = engine.images.load(file)
    yield found
    engine.images.remove(TAG, force=True)


def test_the_engines_image_id_is_our_config_digest(loaded: DockerImage, image: Image) -> None:
    assert loaded.id == image.config_digest
    assert loaded.tags == [TAG]
    assert loaded.attrs["RootFS"]["Layers"] == [layer.descriptor.diff_id for layer in image.layers]
    config = loaded.attrs["Config"]
    assert config["Entrypoint"] == ["/opt/ral/entrypoint.sh"]
    assert (config["User"], config["WorkingDir"]) == ("65532", "/opt/ral")
    assert config["Labels"]["org.opencontainers.image.title"] == "modèle"


def test_a_containers_files_are_those_that_were_planned(
    engine: docker.DockerClient, loaded: DockerImage, image: Image, tmp_path: Path
) -> None:
    container = engine.containers.create(loaded)
    try:
        data = io.BytesIO(b"".join(container.export()))  # type: ignore[arg-type]
    finally:
        container.remove()
    with tarfile.open(fileobj=data) as tar:
        members = {member.name.rstrip("/"): member for member in tar}
        weights = next((tmp_path / "model").glob("model-00002*"))
        file = tar.extractfile(f"models/{weights.name}")
        assert file is not None
        assert file.read() == weights.read_bytes()
    folder, script = members["models"], members["opt/ral/entrypoint.sh"]
    assert (folder.mode & 0o7777, folder.uid, folder.gid, folder.mtime) == (0o755, 0, 0, 0)
    assert (script.mode & 0o7777, script.uid, script.mtime) == (0o755, 0, 0)
    assert members["tmp"].mode & 0o7777 == 0o1777
    assert members["lib"].linkname == "usr/lib"
    assert members["usr/lib/" + "long/" * 30 + "name"].size == 5
    assert "usr/share/ca/NetLock_Főtanúsítvány.crt" in members
