"""Reading images: our own, and those that other tools made or changed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_cases import CONFIG, NOWHERE, make_image, make_plan, rules_layer, write_weights

from ralbuild.errors import ImageError
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.outputs import ArchiveOutput, LayoutOutput, Output
from ralbuild.image.plan import ImagePlan
from ralbuild.image.reader import open_image, read_base
from ralbuild.image.write import write_image

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"


def run(*command: str | Path) -> None:
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def built(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    outputs: list[Output] = [LayoutOutput(folder / "layout"), ArchiveOutput(folder / "image.tar")]
    write_image(image, outputs, tag="demo:1", cache=NOWHERE)
    return folder


@pytest.fixture
def layout(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(built / "layout", tmp_path / "layout"))


@pytest.mark.parametrize("store", ["layout", "image.tar"])
def test_our_image_is_read_back(built: Path, image: Image, store: str) -> None:
    with open_image(built / store) as found:
        assert (found.name, found.digest, found.config_digest) == (
            "demo:1",
            image.digest,
            image.config_digest,
        )
        assert found.labels == json.loads(image.config)["config"]["Labels"]
        assert [layer.name for layer in found.layers] == [layer.descriptor.name for layer in image.layers]
        assert [layer.kind for layer in found.layers] == ["small", "weights", "weights", "small", "small"]
        assert found.read_file("/opt/ral/bundle/ral-config.yaml") == b"bold: risk"
        assert found.read_file("etc/passwd") == b"nonroot:x:65532:65532::/nonexistent:/bin/false\n"
        for nothing in ("etc", "etc/shadow", "lib", "opt/ral/bundle/ral-config.yaml/x", "/"):
            assert found.read_file(nothing) is None
        with found.open_layer(found.layers[1]) as blob:
            assert f"sha256:{hashlib.sha256(blob.read()).hexdigest()}" == found.layers[1].digest


def test_what_umoci_changed_and_deleted_is_seen_so(layout: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    run("umoci", "unpack", "--rootless", "--image", f"{layout}:demo:1", bundle)
    (bundle / "rootfs/etc/passwd").unlink()
    shutil.rmtree(bundle / "rootfs/opt/ral/bundle")
    (bundle / "rootfs/opt/ral/entrypoint.sh").write_bytes(b"changed")
    (bundle / "rootfs/new").write_bytes(b"new")
    run("umoci", "repack", "--image", f"{layout}:demo:2", bundle)
    with open_image(layout, "demo:2") as found:
        assert found.layers[-1].media_type.endswith("tar+gzip")
        assert found.read_file("etc/passwd") is None
        assert found.read_file("opt/ral/bundle/ral-config.yaml") is None
        assert found.read_file("opt/ral/entrypoint.sh") == b"changed"
        assert found.read_file("new") == b"new"
        assert found.read_file("models/tokenizer.json") is not None
    with open_image(layout, "demo:1") as found:
        assert found.read_file("etc/passwd") is not None


def test_an_archive_by_skopeo_is_read(built: Path, image: Image, tmp_path: Path) -> None:
    target = tmp_path / "theirs.tar"
    run("skopeo", "copy", "--preserve-digests", f"oci:{built / 'layout'}", f"oci-archive:{target}:name")
    with open_image(target) as found:
        assert (found.name, found.digest) == ("name", image.digest)
        assert found.read_file("opt/ral/bundle/ral-config.yaml") == b"bold: risk"


def test_one_of_several_images_must_be_named(layout: Path, tmp_path: Path) -> None:
    write_weights(tmp_path / "model")
    write_image(make_image(tmp_path / "model", "x"), [LayoutOutput(layout)], tag="demo:2", cache=NOWHERE)
    with pytest.raises(ImageError, match="found 2: demo:1, demo:2"), open_image(layout):
        pass
    with open_image(layout, "demo:2") as found:
        assert found.read_file("opt/ral/bundle/ral-config.yaml") == b"x"
    with pytest.raises(ImageError, match="called 'demo:3', found 0"), open_image(layout, "demo:3"):
        pass


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"hello")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("hello"))
    for name in ("folder", "file", "other.tar", "missing"):
        with pytest.raises(ImageError) as caught, open_image(tmp_path / name):
            pass
        assert caught.value.problems[0].place == str(tmp_path / name)
        assert "OCI layout folder or an archive" in caught.value.problems[0].hint


def blob_path(layout: Path, digest: str) -> Path:
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")


@pytest.mark.parametrize("part", ["manifest", "config"])
def test_json_that_does_not_have_its_digest_is_refused(layout: Path, image: Image, part: str) -> None:
    path = blob_path(layout, image.digest if part == "manifest" else image.config_digest)
    path.write_bytes(path.read_bytes().replace(b"1970", b"1971"))
    with pytest.raises(ImageError, match="is damaged: needs sha256:"), open_image(layout):
        pass


def test_a_missing_manifest_is_refused(layout: Path, image: Image) -> None:
    blob_path(layout, image.digest).unlink()
    with pytest.raises(ImageError, match="has no readable blobs/sha256/"), open_image(layout):
        pass


@pytest.mark.parametrize("digest", ["../../etc/passwd", "sha256:../x", "sha512:" + "0" * 128, 7, None])
def test_a_digest_cannot_lead_out_of_the_store(layout: Path, digest: Any) -> None:
    index = json.loads((layout / "index.json").read_bytes())
    index["manifests"][0]["digest"] = digest
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(ImageError, match="needs a sha256 digest"), open_image(layout):
        pass


def test_a_damaged_layer_is_an_error_not_a_traceback(layout: Path, image: Image) -> None:
    blob_path(layout, image.layers[-1].descriptor.digest).write_bytes(b"\xff" * 5000)
    with open_image(layout) as found, pytest.raises(ImageError, match="is damaged"):
        found.read_file("opt/ral/entrypoint.sh")


# Bases


class Theirs:
    """A layout written by hand, as another tool might."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def blob(self, data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data), **more}

    def json(self, value: Any, media_type: str, **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value, indent=2).encode(), media_type, **more)

    def index(self, *entries: dict[str, Any]) -> None:
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))

    def image(self, docker: bool = False, architecture: str = "amd64") -> dict[str, Any]:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            info = tarfile.TarInfo("./etc/os-release")
            info.size = 5
            tar.addfile(info, io.BytesIO(b"ID=x\n"))
        layer_type = f"{DOCKER}.image.rootfs.diff.tar.gzip" if docker else f"{OCI}.layer.v1.tar+gzip"
        layer = self.blob(gzip.compress(raw.getvalue(), mtime=0), layer_type)
        diff_id = f"sha256:{hashlib.sha256(raw.getvalue()).hexdigest()}"
        rootfs = {"type": "layers", "diff_ids": [diff_id]}
        config_type = f"{DOCKER}.container.image.v1+json" if docker else f"{OCI}.config.v1+json"
        config = self.json({"architecture": architecture, "os": "linux", "rootfs": rootfs}, config_type)
        manifest_type = f"{DOCKER}.distribution.manifest.v2+json" if docker else f"{OCI}.manifest.v1+json"
        return self.json({"schemaVersion": 2, "config": config, "layers": [layer]}, manifest_type)


@pytest.mark.parametrize("docker", [False, True])
def test_a_base_of_either_kind_becomes_an_oci_image(tmp_path: Path, docker: bool) -> None:
    """Docker's gzip layers are OCI's byte for byte; the types must not be mixed in one manifest."""
    theirs = Theirs(tmp_path / "base")
    theirs.index(theirs.image(docker))
    base = read_base(tmp_path / "base")
    image = assemble_image(ImagePlan(base, (rules_layer(),), CONFIG))
    write_image(image, [LayoutOutput(tmp_path / "out")], tag="demo:1", cache=NOWHERE)
    types = [layer["mediaType"] for layer in json.loads(image.manifest)["layers"]]
    assert types == [f"{OCI}.layer.v1.tar+gzip", f"{OCI}.layer.v1.tar"]
    run("umoci", "unpack", "--rootless", "--image", f"{tmp_path / 'out'}:demo:1", tmp_path / "bundle")
    assert (tmp_path / "bundle/rootfs/etc/os-release").read_bytes() == b"ID=x\n"
    with open_image(tmp_path / "out") as found:
        assert found.read_file("/etc/os-release") == b"ID=x\n"


def test_the_platform_is_chosen_from_a_nested_index(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "base")
    entries = [
        {**theirs.image(architecture=name), "platform": {"os": "linux", "architecture": name}}
        for name in ("arm64", "amd64")
    ]
    attestation = theirs.json({}, f"{OCI}.manifest.v1+json")
    entries.append({**attestation, "platform": {"os": "unknown", "architecture": "unknown"}})
    theirs.index(theirs.json({"schemaVersion": 2, "manifests": entries}, f"{OCI}.index.v1+json"))
    base = read_base(tmp_path / "base")
    assert base.digest == entries[1]["digest"]
    assert base.config["architecture"] == "amd64"


def test_our_image_can_be_a_base(built: Path, image: Image, tmp_path: Path) -> None:
    base = read_base(built / "layout")
    assert base.digest == image.digest
    assert [layer.name for layer in base.layers] == [layer.descriptor.name for layer in image.layers]
    plan = make_plan(tmp_path / "model", base=base)
    write_image(assemble_image(plan), [LayoutOutput(tmp_path / "out")], cache=NOWHERE)
    run("skopeo", "copy", "--preserve-digests", f"oci:{tmp_path / 'out'}", f"dir:{tmp_path / 'copy'}")


def test_a_base_with_a_blob_missing_or_cut_is_refused(layout: Path, image: Image) -> None:
    path = blob_path(layout, image.layers[0].descriptor.digest)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ImageError, match="needs 38912 bytes, found 100"):
        read_base(layout)
    path.unlink()
    with pytest.raises(ImageError, match="is missing"):
        read_base(layout)


def test_a_base_layer_with_a_flipped_byte_fails_when_it_is_written(
    layout: Path, image: Image, tmp_path: Path
) -> None:
    path = blob_path(layout, image.layers[0].descriptor.digest)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    built = assemble_image(ImagePlan(read_base(layout), (rules_layer(),), CONFIG))
    with pytest.raises(ImageError, match="base layer sha256:") as caught:
        write_image(built, [LayoutOutput(tmp_path / "out")], cache=NOWHERE)
    assert caught.value.problems[0].place == str(path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "layer_type", [f"{OCI}.layer.nondistributable.v1.tar", f"{OCI}.layer.v1.tar+gzip+encrypted", "text/plain"]
)
def test_a_layer_type_that_cannot_be_shipped_is_refused(tmp_path: Path, layer_type: str) -> None:
    theirs = Theirs(tmp_path / "base")
    entry = theirs.image()
    manifest = json.loads(blob_path(theirs.folder, entry["digest"]).read_bytes())
    manifest["layers"][0]["mediaType"] = layer_type
    theirs.index(theirs.json(manifest, f"{OCI}.manifest.v1+json"))
    with pytest.raises(ImageError, match="unsupported type"):
        read_base(theirs.folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rootfs": {}},
        {"rootfs": {"diff_ids": []}},
        {"rootfs": {"diff_ids": "x"}},
        {"rootfs": []},
        {"config": ["x"]},
        {"config": {"Env": "PATH=x"}},
        {"config": {"Env": [1]}},
        {"config": {"Labels": {"a": 1}}},
        {"config": {"ExposedPorts": ["80"]}},
        {"history": {"a": 1}},
        {"history": [1]},
    ],
)
def test_a_config_that_does_not_fit_the_layers_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    theirs = Theirs(tmp_path / "base")
    entry = theirs.image()
    manifest = json.loads(blob_path(theirs.folder, entry["digest"]).read_bytes())
    good = json.loads(blob_path(theirs.folder, manifest["config"]["digest"]).read_bytes())
    manifest["config"] = theirs.json({**good, **config} if config else {}, f"{OCI}.config.v1+json")
    theirs.index(theirs.json(manifest, f"{OCI}.manifest.v1+json"))
    with pytest.raises(ImageError):
        read_base(theirs.folder)


@pytest.mark.parametrize("entries", ["{}", "[1]", "7", '[{"digest":1}]', "null"])
def test_an_index_that_lists_no_descriptors_is_refused(layout: Path, entries: str) -> None:
    (layout / "index.json").write_text(f'{{"schemaVersion":2,"manifests":{entries}}}')
    with pytest.raises(ImageError), open_image(layout):
        pass


def test_an_artifact_that_is_no_container_image_is_refused(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path / "base")
    config = theirs.json({}, "application/vnd.oci.empty.v1+json")
    theirs.index(theirs.json({"config": config, "layers": []}, f"{OCI}.manifest.v1+json"))
    with pytest.raises(ImageError, match="not a container image"):
        read_base(theirs.folder)


def test_a_base_is_a_folder(built: Path) -> None:
    with pytest.raises(ImageError, match="is not a folder"):
        read_base(built / "image.tar")


def rewrite(layout: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change manifest and config of the only image and name them by their new digests."""

    def load(digest: str) -> Any:
        return json.loads((layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes())

    def store(value: object) -> dict[str, Any]:
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (layout / "blobs/sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    index = json.loads((layout / "index.json").read_bytes())
    manifest = load(index["manifests"][0]["digest"])
    config = load(manifest["config"]["digest"])
    change(manifest, config)
    manifest["config"] |= store(config)
    index["manifests"][0] |= store(manifest)
    (layout / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest, _: manifest["layers"][0].update(annotations=["x"]),
        lambda _, config: config["config"].update(Entrypoint="sh"),
        lambda _, config: config["config"].update(Entrypoint=[1]),
        lambda _, config: config["config"].update(Cmd={"a": "b"}),
        lambda _, config: config["config"].update(Env=["A=b\0c"]),
        lambda _, config: config["config"].update(Cmd=["b\0c"]),
        lambda _, config: config["config"].update(WorkingDir=["/"]),
        lambda _, config: config["config"].update(User=7),
    ],
)
def test_settings_of_the_wrong_type_are_refused(
    layout: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    rewrite(layout, change)
    with pytest.raises(ImageError), open_image(layout):
        pass


@pytest.mark.parametrize("name", ["index.json", "manifest", "layer"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(layout: Path, image: Image, name: str) -> None:
    digest = {"manifest": image.digest, "layer": image.layers[-1].descriptor.digest}.get(name, "")
    path = layout / (f"blobs/sha256/{digest.removeprefix('sha256:')}" if digest else name)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ImageError), open_image(layout) as found:
        found.read_file("no/such/file")
    with pytest.raises(ImageError):
        read_base(layout)


def test_a_pipe_a_long_name_and_a_closed_folder_are_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / ("x" * 300)):
        with pytest.raises(ImageError), open_image(path):
            pass

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)  # root may enter every folder
    with pytest.raises(ImageError, match="Permission denied"), open_image(tmp_path / "x"):
        pass
    with pytest.raises(ImageError, match="Permission denied"):
        read_base(tmp_path / "x")
