"""A signed image and all that lies beside it, against image-spec 1.1 and the tools that read layouts."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import oci_schema
import pytest
from supply_cases import Work, ralbuild, signed_work

REF_NAME = "org.opencontainers.image.ref.name"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    work = signed_work(tmp_path_factory.mktemp("signed"))
    assert (
        ralbuild(
            "rebase",
            "oci:out",
            "--base",
            "oci:base",
            "--output",
            "oci:rebased",
            "--sign",
            "sign.key",
            cwd=work.root,
        ).code
        == 0
    )
    return work


@pytest.fixture(params=["out", "rebased", "base"])
def layout(work: Work, request: pytest.FixtureRequest) -> Path:
    return work.root / request.param


def document(path: Path, schema: dict[str, Any]) -> dict[str, Any]:
    value = json.loads(path.read_bytes())
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


def blob(layout: Path, descriptor: dict[str, Any]) -> Path:
    """Return the file of a descriptor after comparing its size and digest (descriptor.md, "Verification")."""
    path = layout / "blobs" / descriptor["digest"].replace(":", "/")
    data = path.read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (descriptor["size"], path.name)
    return path


def test_every_document_is_what_the_specification_says_and_every_digest_fits(layout: Path) -> None:
    document(layout / "oci-layout", oci_schema.LAYOUT)
    index = document(layout / "index.json", oci_schema.INDEX)
    named = set()
    for entry in index["manifests"]:
        path = blob(layout, entry)
        manifest = document(path, oci_schema.MANIFEST)
        named |= {path} | {blob(layout, part) for part in (manifest["config"], *manifest["layers"])}
        if "artifactType" in entry:
            assert entry["artifactType"] == manifest["artifactType"]
        if manifest["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json":
            config = document(blob(layout, manifest["config"]), oci_schema.CONFIG)
            layers = manifest["layers"]
            assert len(config["rootfs"]["diff_ids"]) == len(layers)
            history = [item for item in config.get("history", []) if not item.get("empty_layer")]
            assert not history or len(history) == len(layers)
        for key in (*manifest.get("annotations", {}), *entry.get("annotations", {})):
            assert key
    assert set((layout / "blobs/sha256").iterdir()) == named, "nothing else lies there"
    assert {path.name for path in layout.iterdir()} == {"oci-layout", "index.json", "blobs"}


def test_names_are_unique_and_only_descriptors_of_the_index_have_them(work: Work) -> None:
    """annotations.md: ref.name "SHOULD only be considered valid when on descriptors on index.json"."""
    index = json.loads((work.layout / "index.json").read_bytes())
    names = [entry.get("annotations", {}).get(REF_NAME) for entry in index["manifests"]]
    given = [name for name in names if name]
    assert len(given) == len(set(given)) == 2
    for entry in index["manifests"]:
        assert REF_NAME not in json.loads(blob(work.layout, entry).read_bytes()).get("annotations", {})


def test_a_referrer_names_a_subject_that_is_there(work: Work) -> None:
    """manifest.md: subject is a descriptor of another manifest; ours is in the same layout."""
    index = json.loads((work.layout / "index.json").read_bytes())
    digests = {entry["digest"] for entry in index["manifests"]}
    subjects = []
    for entry in index["manifests"]:
        manifest = json.loads(blob(work.layout, entry).read_bytes())
        if "subject" in manifest:
            jsonschema.Draft202012Validator(oci_schema.DESCRIPTOR).validate(manifest["subject"])
            blob(work.layout, manifest["subject"])
            subjects.append(manifest["subject"]["digest"])
    assert set(subjects) == {work.digest} <= digests
    assert len(subjects) == 4


def test_umoci_and_skopeo_read_an_image_that_has_artifacts_beside_it(work: Work, tmp_path: Path) -> None:
    source = f"{work.layout}:team/tiny:1"
    bundle = tmp_path / "bundle"
    subprocess.run(
        ["umoci", "unpack", "--rootless", "--image", source, bundle], check=True, capture_output=True
    )
    assert (bundle / "rootfs/models/tokenizer.json").read_bytes() == (
        work.root / "model/tokenizer.json"
    ).read_bytes()
    copy = ["skopeo", "copy", "--preserve-digests", f"oci:{source}", f"dir:{tmp_path / 'copy'}"]
    subprocess.run(copy, check=True, capture_output=True)
    copied = (tmp_path / "copy/manifest.json").read_bytes()
    assert f"sha256:{hashlib.sha256(copied).hexdigest()}" == work.digest
