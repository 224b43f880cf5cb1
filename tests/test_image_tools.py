"""What other people's tools say of our images: skopeo, umoci, podman and GNU tar.

They are Debian packages that the tests' set-up installs; without them these tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cli_support import podman
from image_cases import NOWHERE, make_image, make_plan, write_weights

from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.outputs import ArchiveOutput, LayoutOutput, Output
from ralbuild.image.plan import FileEntry, ImagePlan
from ralbuild.image.write import write_image

TAG = "team/demo:v1"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ImagePlan:
    return make_plan(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def image(plan: ImagePlan) -> Image:
    return assemble_image(plan)


@pytest.fixture(scope="module")
def folder(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the image as ``layout`` and as ``image.tar``."""
    folder = tmp_path_factory.mktemp("out")
    outputs: list[Output] = [LayoutOutput(folder / "layout"), ArchiveOutput(folder / "image.tar")]
    write_image(image, outputs, tag=TAG, cache=NOWHERE)
    return folder


STORES = [f"oci:layout:{TAG}", f"oci-archive:image.tar:{TAG}", "oci:layout", "oci-archive:image.tar"]


@pytest.mark.parametrize("store", STORES)
def test_skopeo_sees_the_same_digest_and_config(folder: Path, image: Image, store: str) -> None:
    seen = json.loads(run("skopeo", "inspect", store, cwd=folder))
    assert seen["Digest"] == image.digest
    assert seen["Layers"] == [layer.descriptor.digest for layer in image.layers]
    assert (seen["Architecture"], seen["Os"], seen["Created"]) == ("amd64", "linux", "1970-01-01T00:00:00Z")
    assert seen["Labels"]["org.opencontainers.image.title"] == "modèle"
    assert run("skopeo", "inspect", "--raw", store, cwd=folder).encode() == image.manifest
    assert run("skopeo", "inspect", "--config", "--raw", store, cwd=folder).encode() == image.config


def test_skopeo_reads_the_archive_as_docker_save_wrote_it(folder: Path, image: Image) -> None:
    store = f"docker-archive:image.tar:{TAG}"
    assert run("skopeo", "inspect", "--config", "--raw", store, cwd=folder).encode() == image.config
    seen: dict[str, Any] = json.loads(run("skopeo", "inspect", store, cwd=folder))
    assert seen["Layers"] == [layer.descriptor.digest for layer in image.layers]


@pytest.mark.parametrize("store", STORES)
def test_skopeo_copies_every_byte_unchanged(folder: Path, image: Image, store: str, tmp_path: Path) -> None:
    """skopeo checks each blob against its digest and diff id on the way."""
    run("skopeo", "copy", "--preserve-digests", store, f"dir:{tmp_path / 'copy'}", cwd=folder)
    assert (tmp_path / "copy/manifest.json").read_bytes() == image.manifest
    names = {layer.digest.sha256 for layer in image.layers}
    assert names <= {path.name for path in (tmp_path / "copy").iterdir()}


def test_umoci_unpacks_what_was_planned(folder: Path, plan: ImagePlan, tmp_path: Path) -> None:
    run("umoci", "unpack", "--rootless", "--image", f"layout:{TAG}", tmp_path / "bundle", cwd=folder)
    root = tmp_path / "bundle/rootfs"
    planned = {entry.path: entry for layer in plan.layers for entry in layer.entries}
    for path, entry in planned.items():
        found = root / path
        if isinstance(entry, FileEntry):
            source = entry.source
            assert found.read_bytes() == (source if isinstance(source, bytes) else source.path.read_bytes())
            assert found.stat().st_mode & 0o7777 == entry.mode
            assert found.stat().st_mtime == 0
    assert os.readlink(root / "lib") == "usr/lib"
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (root / "models").stat().st_mode & 0o7777 == 0o755
    unpacked = {
        str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file()
    }
    assert unpacked == {path for path, entry in planned.items() if path != "tmp"}


def test_umoci_reads_how_it_runs(folder: Path, tmp_path: Path) -> None:
    run("umoci", "unpack", "--rootless", "--image", f"layout:{TAG}", tmp_path / "bundle", cwd=folder)
    process = json.loads((tmp_path / "bundle/config.json").read_bytes())["process"]
    assert process["args"] == ["/opt/ral/entrypoint.sh"]
    assert process["cwd"] == "/opt/ral"
    assert "RAL_MODEL=demo" in process["env"]
    stat = json.loads(run("umoci", "stat", "--json", "--image", f"layout:{TAG}", cwd=folder))
    assert len(stat["history"]) == 5


def test_podman_loads_the_archive_and_shows_the_planned_files(
    folder: Path, plan: ImagePlan, image: Image
) -> None:
    with podman() as store:
        run(*store, "load", "-q", "-i", folder / "image.tar")
        (seen,) = json.loads(run(*store, "image", "inspect", f"localhost/{TAG}"))
        assert f"sha256:{seen['Id']}" == image.config_digest
        assert seen["RootFS"]["Layers"] == [layer.descriptor.diff_id for layer in image.layers]
        root = Path(run(*store, "image", "mount", f"localhost/{TAG}").strip())
        try:
            for entry in (entry for layer in plan.layers for entry in layer.entries):
                if isinstance(entry, FileEntry) and isinstance(entry.source, bytes):
                    assert (root / entry.path).read_bytes() == entry.source
                    assert (root / entry.path).stat().st_mode & 0o7777 == entry.mode
        finally:
            run(*store, "image", "unmount", "--all")


def test_gnu_tar_and_umoci_read_the_archive(folder: Path, image: Image, tmp_path: Path) -> None:
    listing = run("tar", "-tf", "image.tar", cwd=folder).splitlines()
    assert listing[:3] == ["oci-layout", "index.json", "manifest.json"]
    assert len(listing) == len(set(listing))
    run("tar", "-xf", folder / "image.tar", "-C", tmp_path)
    assert run("umoci", "ls", "--layout", tmp_path).split() == [TAG]
    run("umoci", "unpack", "--rootless", "--image", f"{tmp_path}:{TAG}", tmp_path / "bundle")
    assert (tmp_path / "bundle/rootfs/opt/ral/entrypoint.sh").read_bytes().startswith(b"#!/bin/sh")
    assert (tmp_path / "blobs/sha256" / image.digest.removeprefix("sha256:")).read_bytes() == image.manifest


def test_weight_bytes_start_at_a_multiple_of_4096_in_the_archive(folder: Path) -> None:
    """So a file system can share them with the weight files themselves."""
    starts = []
    with tarfile.open(folder / "image.tar") as tar, (folder / "image.tar").open("rb") as raw:
        for member in tar:
            if member.name.startswith("blobs/sha256/") and member.size > 500_000:
                raw.seek(member.offset_data)
                with tarfile.open(fileobj=raw, mode="r:") as layer:
                    starts += [file.offset_data for file in layer if file.isfile()]
    assert len(starts) == 2
    assert [start % 4096 for start in starts] == [0, 0]


def test_the_archive_is_the_same_every_time(folder: Path, image: Image, tmp_path: Path) -> None:
    write_image(image, [ArchiveOutput(tmp_path / "again.tar")], tag=TAG, cache=NOWHERE)
    assert (tmp_path / "again.tar").read_bytes() == (folder / "image.tar").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.tar"]


def test_an_image_without_a_name_is_read_too(tmp_path: Path) -> None:
    write_weights(tmp_path / "model")
    image = make_image(tmp_path / "model")
    write_image(image, [ArchiveOutput(tmp_path / "a.tar")], cache=NOWHERE)
    for kind in ("oci-archive", "docker-archive"):
        store = f"{kind}:{tmp_path / 'a.tar'}"
        assert run("skopeo", "inspect", "--config", "--raw", store).encode() == image.config
