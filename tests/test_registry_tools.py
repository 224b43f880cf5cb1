"""Debian's docker-registry as the other side, skopeo as an independent reader and writer, `ralbuild` itself."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ralbuild, write_fake_base
from image_cases import NOWHERE, make_image
from model_factory import read_tensors, write_model

from ralbuild.image.assemble import Image
from ralbuild.image.outputs import LayoutOutput
from ralbuild.image.write import write_image


@dataclass(frozen=True)
class Registry:
    host: str
    log: Path

    def asked(self, method: str, text: str) -> int:
        """Count the requests of its access log."""
        return sum(f'"{method} ' in line and text in line for line in self.log.read_text().splitlines())


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    (folder / "config.yml").write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\nhttp: {{addr: {host}}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log
        )
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://{host}/v2/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield Registry(host, folder / "log")
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Image, Path]:
    folder = tmp_path_factory.mktemp("image")
    image = make_image(folder / "model")
    write_image(image, [LayoutOutput(folder / "layout")], cache=NOWHERE)
    return image, folder


def skopeo(*arguments: object) -> str:
    done = subprocess.run(["skopeo", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_skopeo_reads_what_was_pushed_byte_for_byte(registry: Registry, built, tmp_path: Path) -> None:
    image, folder = built
    done = ralbuild("push", "oci:layout", f"registry:{registry.host}/team/demo:v1", cwd=folder)
    assert (done.code, done.out) == (0, f"{image.digest}\n"), done.err
    place = f"docker://{registry.host}/team/demo:v1"
    assert json.loads(skopeo("inspect", "--tls-verify=false", place))["Digest"] == image.digest
    skopeo("copy", "--preserve-digests", "--src-tls-verify=false", place, f"dir:{tmp_path / 'copy'}")
    assert (tmp_path / "copy/manifest.json").read_bytes() == image.manifest
    for layer in image.layers:
        data = (tmp_path / "copy" / layer.digest.sha256).read_bytes()
        assert hashlib.sha256(data).hexdigest() == layer.digest.sha256
    assert registry.asked("PATCH", "/team/demo/") == 0
    assert registry.asked("PUT", "/team/demo/blobs") == len(image.layers) + 1

    again = ralbuild("push", "oci:layout", f"registry:{registry.host}/team/demo:v1", "--json", cwd=folder)
    answer = json.loads(again.out)
    assert answer["sent"] == 0
    assert answer["names"] == [f"{registry.host}/team/demo:v1@{image.digest}"]
    assert not any(layer["sent"] for layer in answer["layers"])


def test_debians_registry_takes_chunks_too(registry: Registry, built) -> None:
    image, folder = built
    target = f"registry:{registry.host}/chunks:v1"
    done = ralbuild("push", "oci:layout", target, "--chunk-size", "2MB", "--push-jobs", "2", cwd=folder)
    assert done.code == 0, done.err
    assert registry.asked("PATCH", "/chunks/") >= 4
    found = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{registry.host}/chunks:v1"))
    assert found["Digest"] == image.digest


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> tuple[Path, str]:
    """A model, a config, and a base that skopeo pushed to the registry in Docker's own format."""
    folder = tmp_path_factory.mktemp("work")
    write_model(folder / "model", shards=3)
    (folder / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS)
    write_fake_base(folder / "base")
    place = f"docker://{registry.host}/base/python:1"
    skopeo("copy", "--dest-tls-verify=false", "--format", "v2s2", f"oci:{folder / 'base'}", place)
    raw = skopeo("inspect", "--raw", "--tls-verify=false", place).encode()
    assert b"vnd.docker.distribution.manifest.v2" in raw
    return folder, f"sha256:{hashlib.sha256(raw).hexdigest()}"


def build(work: Path, *arguments: str):
    model = ["--model", "model", "--config", "ral-config.yaml", "--quiet"]
    return ralbuild("image", *model, *arguments, cwd=work)


def test_an_image_goes_from_a_registry_s_base_to_the_registry_without_touching_the_disk(
    registry: Registry, work, tmp_path: Path
) -> None:
    folder, digest = work
    base, target = f"{registry.host}/base/python@{digest}", f"registry:{registry.host}/app:v1"
    done = build(folder, "--base", base, "--output", target, "--output", f"oci:{tmp_path / 'l'}", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    place = f"docker://{registry.host}/app:v1"
    seen = json.loads(skopeo("inspect", "--tls-verify=false", place))
    assert seen["Digest"] == answer["manifest"]
    assert skopeo("inspect", "--raw", f"oci:{tmp_path / 'l'}") == skopeo(
        "inspect", "--raw", "--tls-verify=false", place
    )
    manifest = json.loads(skopeo("inspect", "--raw", "--tls-verify=false", place))
    assert manifest["annotations"]["org.opencontainers.image.base.digest"] == digest
    assert manifest["annotations"]["org.opencontainers.image.base.name"] == base
    base_layer = json.loads(
        skopeo("inspect", "--raw", "--tls-verify=false", f"docker://{registry.host}/base/python:1")
    )
    assert manifest["layers"][0]["digest"] == base_layer["layers"][0]["digest"]
    assert registry.asked("POST", "from=base/python") == 1


def test_resharded_weights_are_the_same_tensors_and_the_index_says_where(
    registry: Registry, work, tmp_path: Path
) -> None:
    folder, digest = work
    base, target = f"{registry.host}/base/python@{digest}", f"registry:{registry.host}/resharded:v1"
    done = build(folder, "--base", base, "--output", target, "--reshard", "24KB")
    assert done.code == 0, done.err
    skopeo(
        "copy", "--src-tls-verify=false", f"docker://{registry.host}/resharded:v1", f"oci:{tmp_path / 'l'}:v1"
    )
    subprocess.run(["umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'l'}:v1", tmp_path / "b"],
                   check=True, capture_output=True)  # fmt: skip
    models = tmp_path / "b/rootfs/models"
    ours = {path.name: read_tensors(path) for path in sorted(models.glob("*.safetensors"))}
    theirs = [read_tensors(path) for path in sorted((folder / "model").glob("*.safetensors"))]
    assert {k: v for part in ours.values() for k, v in part.items()} == {
        k: v for part in theirs for k, v in part.items()
    }
    assert all(path.stat().st_size <= 24_000 for path in models.glob("*.safetensors"))
    index = json.loads((models / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, part in ours.items() for name in part}
    bundle = json.loads((tmp_path / "b/rootfs/opt/ral/bundle/bundle.json").read_text())
    objects = tmp_path / "b/rootfs/opt/ral/bundle/objects"
    manifest = json.loads((objects / bundle["manifest"]["sha256"]).read_text())
    blobs = tmp_path / "l/blobs/sha256"
    entry = json.loads((tmp_path / "l/index.json").read_text())["manifests"][0]
    image = json.loads((blobs / entry["digest"][7:]).read_text())
    diff_ids = json.loads((blobs / image["config"]["digest"][7:]).read_text())["rootfs"]["diff_ids"]
    for item in manifest["weights"]:  # skopeo has compressed the layers
        layer = image["layers"][diff_ids.index(f"sha256:{item['sha256']}")]
        with tarfile.open(blobs / layer["digest"][7:], "r:*") as tar:
            found = {member.name: member.size for member in tar if member.isfile()}
        assert found == {f"models/{file['path']}": file["size"] for file in item["files"]}


@pytest.mark.parametrize(
    ("arguments", "code", "wording"),
    [
        (["--registry-profile", "nope", "--output", "registry:127.0.0.1:1/x"], 2, "no profile 'nope'"),
        (["--reshard", "1KB"], 2, "alone has"),
        (["--reshard", "huge"], 2, "needs a size such as 5GB"),
    ],
)
def test_each_failure_is_one_error_and_leaves_nothing(work, arguments, code, wording) -> None:
    folder, _ = work
    caches = {".ral_cache", "xdg"}
    before = {path.name for path in folder.iterdir()} - caches
    done = build(folder, "--base", "oci:base", *arguments)
    assert (done.code, done.out) == (code, ""), done.err
    assert wording in done.err
    assert {path.name for path in folder.iterdir()} - caches == before


def test_a_rendered_dockerfile_names_the_registry_s_base_by_its_digest(registry: Registry, work) -> None:
    folder, digest = work
    base = f"{registry.host}/base/python:1@{digest}"
    arguments = ["--model", "model", "--config", "ral-config.yaml", "--out", "context", "--quiet"]
    done = ralbuild("render", *arguments, "--base", base, cwd=folder)
    assert done.code == 0, done.err
    lines = (folder / "context/Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM ")] == [f"FROM {base}"]
