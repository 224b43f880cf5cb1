"""`ralbuild rebase`: the digest of a fresh build on the new base, without reading a weight."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from supply_cases import Work, blob, build, index, ralbuild, signed_work, write_small_base


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    """A signed image, a second base, and ``fresh``: the same image built on that."""
    work = signed_work(tmp_path_factory.mktemp("signed"))
    labels = {"maintainer": "somebody", "io.ralbuild.base.debian": "12.9"}
    write_small_base(work.root / "patched", version="2025c-1", content=b"patched\n", **labels)
    build(work.root, "--base", "oci:patched", output="fresh")
    return work


@pytest.fixture
def root(work: Work, tmp_path: Path) -> Path:
    shutil.copytree(work.root, tmp_path / "w")
    return tmp_path / "w"


def weights(layout: Path) -> list[Path]:
    manifest = json.loads(blob(layout, image_digest(layout)))
    kind = "io.ralbuild.layer.kind"
    found = [layer["digest"][7:] for layer in manifest["layers"] if layer["annotations"][kind] == "weights"]
    assert len(found) == 2
    return [layout / "blobs/sha256" / name for name in found]


def image_digest(layout: Path) -> str:
    (entry,) = [entry for entry in index(layout) if "platform" in entry]
    return entry["digest"]


@pytest.mark.parametrize("output", ["oci:moved", "oci:out", "archive:moved.tar"])
def test_the_digest_is_that_of_a_fresh_build_on_the_new_base(root: Path, output: str) -> None:
    done = ralbuild("rebase", "oci:out", "--base", "oci:patched", "--output", output, cwd=root)
    assert (done.code, done.out.strip()) == (0, image_digest(root / "fresh")), done.err
    if output.startswith("oci:"):
        layout = root / output.removeprefix("oci:")
        copy = ["skopeo", "copy", "--preserve-digests", f"oci:{layout}:team/tiny:1", f"dir:{root / 'copy'}"]
        subprocess.run(copy, check=True, capture_output=True)
        assert [entry["digest"] for entry in index(layout)] == [done.out.strip()], (
            "no artifact of the old image"
        )


def test_an_image_with_a_date_and_a_changed_epoch_keeps_its_date(root: Path) -> None:
    env = {"SOURCE_DATE_EPOCH": "1700000000"}
    build(root, output="dated", env=env)
    fresh = build(root, "--base", "oci:patched", output="dated2", env=env)
    done = ralbuild("rebase", "oci:dated", "--base", "oci:patched", "--output", "oci:moved", cwd=root)
    assert done.out.strip() == fresh


@pytest.mark.parametrize("output", ["moved", "out"])
def test_no_weight_is_opened_for_reading(root: Path, output: str) -> None:
    """strace sees every open and copy of the process; the weights' blobs are linked, never opened."""
    names = [path.name for path in weights(root / "out")]
    trace = root / "trace"
    command = [
        "strace", "-f", "-qq", "-o", trace, "-e", "trace=open,openat,openat2,sendfile,copy_file_range,link,linkat",
        sys.executable, "-m", "ralbuild.cli.main", "rebase", "oci:out", "--base", "oci:patched", "--output", f"oci:{output}",
    ]  # fmt: skip
    subprocess.run(command, cwd=root, check=True, capture_output=True, env=None)
    calls = [line for line in trace.read_text().splitlines() if any(name in line for name in names)]
    assert [line for line in calls if not re.search(r"\blink(at)?\(", line)] == []
    assert len(calls) == (2 if output == "moved" else 0)


def test_linked_weights_are_the_same_file_and_survive_the_old_layout(root: Path) -> None:
    assert ralbuild("rebase", "oci:out", "--base", "oci:patched", "--output", "oci:moved", cwd=root).code == 0
    for old, new in zip(weights(root / "out"), weights(root / "moved"), strict=True):
        assert old.samefile(new)
    shutil.rmtree(root / "out")
    done = ralbuild("sign", "oci:moved", "--key", "sign.key", cwd=root)
    assert done.code == 0, done.err


def test_rebuilding_into_the_old_layout_reads_no_weight_after_a_link(root: Path) -> None:
    """A new name changes a file's ctime; what was known of it is still known."""
    build(root, output="known")
    assert (
        ralbuild("rebase", "oci:known", "--base", "oci:patched", "--output", "oci:moved", cwd=root).code == 0
    )
    trace = root / "trace"
    names = [path.name for path in weights(root / "known")]
    command = [
        "strace", "-f", "-qq", "-o", trace, "-e", "trace=openat",
        sys.executable, "-m", "ralbuild.cli.main", "image", "--model", "model", "--base", "oci:base", "--tag", "team/tiny:1",
        "--output", "oci:known",
    ]  # fmt: skip
    import os

    subprocess.run(
        command,
        cwd=root,
        check=True,
        capture_output=True,
        env={**os.environ, "XDG_CACHE_HOME": str(root / "xdg")},
    )
    assert not [line for line in trace.read_text().splitlines() if any(name in line for name in names)]


def test_the_new_image_can_be_signed_at_once(root: Path) -> None:
    done = ralbuild(
        "rebase", "oci:out", "--base", "oci:patched", "--output", "oci:moved", "--sign", "sign.key", "--sbom", cwd=root
    )  # fmt: skip
    assert done.code == 0, done.err
    checked = ralbuild(
        "verify-image", "oci:moved", "--key", "sign.pub", "--require", "signature,sbom", cwd=root
    )
    assert checked.code == 0, checked.out
    assert "2025c-1" in (root / "moved/blobs/sha256" / bill(root / "moved")).read_text()


def bill(layout: Path) -> str:
    (entry,) = [
        item for item in index(layout) if item.get("artifactType") == "application/vnd.cyclonedx+json"
    ]
    return json.loads(blob(layout, entry["digest"]))["layers"][0]["digest"][7:]


@pytest.mark.parametrize(
    ("labels", "wording"),
    [({"io.ralbuild.base.contract": "2"}, "needs the label io.ralbuild.base.contract=1"),
     ({"io.ralbuild.base.target": "cuda"}, "is a base for 'cuda'")],
)  # fmt: skip
def test_a_base_that_breaks_the_contract_is_refused(root: Path, labels: dict[str, str], wording: str) -> None:
    write_small_base(root / "odd", **labels)
    before = (root / "out/index.json").read_bytes()
    done = ralbuild("rebase", "oci:out", "--base", "oci:odd", "--output", "oci:out", cwd=root)
    assert (done.code, wording in done.err) == (6, True), done.err
    assert (root / "out/index.json").read_bytes() == before


def test_only_images_of_ralbuild_can_be_rebased(root: Path) -> None:
    done = ralbuild("rebase", "oci:base", "--base", "oci:patched", "--output", "oci:moved", cwd=root)
    assert (done.code, "is no image of ralbuild" in done.err) == (6, True)
    assert not (root / "moved").exists()


def test_a_signature_is_never_dropped_in_silence(root: Path) -> None:
    done = ralbuild(
        "rebase", "oci:out", "--base", "oci:patched", "--output", "docker", "--sign", "sign.key", cwd=root
    )  # fmt: skip
    assert (done.code, "add --output oci:DIR" in done.err) == (2, True)
