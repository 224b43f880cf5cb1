"""`--output docker`: the image streamed into an engine; and the engine pulls what `registry:` pushed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from image_cases import NOWHERE, make_image

from ralbuild.engine import Engine
from ralbuild.errors import HostError, ImageError
from ralbuild.image.assemble import Image
from ralbuild.image.outputs import ArchiveOutput, DockerOutput, LayoutOutput
from ralbuild.image.write import write_image
from ralbuild.release.source import fetch, parse_source

pytestmark = pytest.mark.docker
TAG = "ralbuild-test/sink:v1"


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    client.ping()
    yield client
    for name in (TAG, "ralbuild-test/sink:v2"):
        with contextlib.suppress(docker.errors.ImageNotFound):
            client.images.remove(name, force=True)
    client.close()


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return make_image(tmp_path / "model")


def test_the_engine_gets_the_image_beside_a_layout_and_knows_it_the_next_time(
    engine: docker.DockerClient, image: Image, tmp_path: Path
) -> None:
    outputs = [DockerOutput(), LayoutOutput(tmp_path / "layout")]
    first = write_image(image, outputs, tag=TAG, cache=NOWHERE)
    assert engine.images.get(TAG).id == image.config_digest
    assert first.names == (TAG,)
    again = write_image(image, [DockerOutput()], tag="ralbuild-test/sink:v2", cache=NOWHERE)
    assert again.bytes_written == 0
    assert engine.images.get("ralbuild-test/sink:v2").id == image.config_digest


def test_a_file_that_changed_stops_the_load_and_leaves_no_image(
    engine: docker.DockerClient, image: Image, tmp_path: Path
) -> None:
    path = next((tmp_path / "model").glob("model-00001*"))
    with path.open("ab") as file:
        file.write(b"!")
    outputs = [DockerOutput(), LayoutOutput(tmp_path / "layout")]
    with pytest.raises(ImageError, match="changed while the image was being built"):
        write_image(image, outputs, tag=TAG, cache=NOWHERE)
    with pytest.raises(docker.errors.ImageNotFound):
        engine.images.get(TAG)
    assert not (tmp_path / "layout").exists()


def test_no_engine_is_an_error_with_a_way_out(
    image: Image, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(HostError, match="no docker engine answers") as caught:
        write_image(image, [DockerOutput()], tag=TAG, cache=NOWHERE)
    assert "archive:FILE" in caught.value.problems[0].hint


@pytest.mark.parametrize("kind", ["oci", "archive"])
def test_a_release_loads_a_layout_and_an_archive_as_the_image_they_are(
    engine: docker.DockerClient, image: Image, tmp_path: Path, kind: str
) -> None:
    """This image is not of `ralbuild image`, so that the release refuses it once the engine has it."""
    output = LayoutOutput(tmp_path / "it") if kind == "oci" else ArchiveOutput(tmp_path / "it")
    write_image(image, [output], tag=TAG, cache=NOWHERE)
    for _ in range(2):
        with pytest.raises(ImageError, match="lacks the label"):
            fetch(parse_source(f"{kind}:{tmp_path / 'it'}", ""), Engine("release"))
        assert engine.images.get(image.config_digest).labels["io.ralbuild.model"] == "demo"
    engine.images.remove(image.config_digest, force=True)


def test_what_the_engine_refuses_is_our_error(engine: docker.DockerClient) -> None:
    ours = Engine("release")
    with pytest.raises(ImageError, match="the engine did not pull") as caught:
        ours.pull("127.0.0.1:1/none@sha256:" + "0" * 64)
    assert caught.value.problems[0].place == "release"
    assert ours.find("ralbuild-test/none:v1") is None
    assert ours.status("ralbuild-test-none") == ("missing", 0)
    ours.stop("ralbuild-test-none", 1)
    ours.remove("ralbuild-test-none")
