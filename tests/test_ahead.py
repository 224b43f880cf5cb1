"""Weight layers that are written in the read that hashes them: a short cut that changes no byte of an image."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from image_cases import CONFIG, rules_layer, write_weights
from model_factory import edit_tensors, write_model
from supply_cases import build, ralbuild, write_inputs

from ralbuild.digests import DigestCache, LayerCopies, LayerFile, scan_layer
from ralbuild.errors import WeightsError
from ralbuild.image import ahead as module
from ralbuild.image import layers
from ralbuild.image.ahead import Ahead, writing_ahead
from ralbuild.image.assemble import Image, assemble_image
from ralbuild.image.disk import try_lock
from ralbuild.image.outputs import LayoutOutput, Output
from ralbuild.image.plan import HostFile, ImagePlan, LayerPlan, bundled_layer
from ralbuild.image.write import write_image


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_weights(tmp_path / "model", (5_000_001, 1_000_003, 7))


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "digests")


def image_of(shards: list[Path], copies: LayerCopies | None) -> Image:
    """Two layers: one of a large file, one that two small ones share."""
    plans: list[LayerPlan] = []
    for group in (shards[:1], shards[1:]):
        files = [LayerFile(path, path.name) for path in group]
        digests = scan_layer(files, DigestCache(None), 0, copies=copies)
        entries = [(path.name, HostFile(path, path.stat().st_size)) for path in group]
        plans.append(bundled_layer(entries, digests[0]))
    return assemble_image(ImagePlan(None, (*plans, rules_layer()), CONFIG))


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def tree(layout: Path) -> dict[str, bytes]:
    return {str(path.relative_to(layout)): path.read_bytes() for path in layout.rglob("*") if path.is_file()}


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight layer is copied when its turn comes."""
    append = layers.append_layer

    def small_only(recipe: layers.Recipe, *rest: Any) -> None:
        assert not recipe.name.startswith("weights"), recipe.name
        append(recipe, *rest)

    monkeypatch.setattr("ralbuild.image.blobs.append_layer", small_only)


@pytest.mark.usefixtures("no_copy")
def test_what_is_hashed_is_written_in_the_same_read(
    tmp_path: Path, shards: list[Path], cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = LayoutOutput(tmp_path / "out")
    steps: list[int] = []
    with writing_ahead((output,)) as ahead:
        assert ahead is not None
        image = image_of(shards, ahead)
        assert listing(tmp_path) == {"model", ".out.partial-ahead"}
        assert (tmp_path / ".out.partial-ahead").stat().st_mode & 0o777 == 0o700
        given = ahead.hand_over(image)
        assert (given.digest, given) == (image.digest, image)
        written = write_image(given, (output,), cache=cache, progress=steps.append)
    assert listing(tmp_path) == {"model", "out", "digests"}
    for path in (tmp_path / "out/blobs/sha256").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert written.bytes_written == sum(path.stat().st_size for path in (tmp_path / "out/blobs").rglob("*/*"))
    assert sum(steps) == sum(layer.size for layer in written.layers)
    monkeypatch.setattr("ralbuild.image.blobs.digest_layer", lambda *_: pytest.fail("read a known blob"))
    again = write_image(image, (output,), cache=cache)
    assert all(layer.reused for layer in again.layers)


def test_two_new_layouts_of_one_run_are_both_complete(
    tmp_path: Path, shards: list[Path], cache: DigestCache
) -> None:
    outputs: tuple[Output, ...] = (LayoutOutput(tmp_path / "one"), LayoutOutput(tmp_path / "two"))
    with writing_ahead(outputs) as ahead:
        assert ahead is not None
        write_image(ahead.hand_over(image_of(shards, ahead)), outputs, cache=cache)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert listing(tmp_path) == {"model", "one", "two", "digests"}


def test_a_full_disk_gives_up_the_short_cut_and_not_the_image(
    tmp_path: Path, shards: list[Path], cache: DigestCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File:
        """A file on a disk that is full after 2 MB."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.left = inner, 2_000_000

        @property
        def closed(self) -> bool:
            return bool(self.inner.closed)

        def write(self, data: memoryview) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self.inner.write(data))

        def close(self) -> None:
            self.inner.close()

    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", *a, **k: (
            File(opened(path, mode, *a, **k))
            if mode == "xb" and "ahead" in str(path)
            else opened(path, mode, *a, **k)
        ),
    )
    output = LayoutOutput(tmp_path / "out")
    with writing_ahead((output,)) as ahead:
        assert ahead is not None
        image = image_of(shards, ahead)
        assert len(listing(tmp_path / ".out.partial-ahead")) == 1, "what does not fit is removed at once"
        write_image(ahead.hand_over(image), (output,), cache=cache)
    assert image == image_of(shards, None)
    for path in (tmp_path / "out/blobs/sha256").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert listing(tmp_path) == {"model", "out", "digests"}


def test_no_room_and_extents_that_can_be_shared_are_left_to_the_copy(
    tmp_path: Path, shards: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "room").mkdir()
    assert Ahead(tmp_path / "room").open(shards[0], 1 << 60) is None
    monkeypatch.setattr(module, "can_share", lambda *_: True)
    assert Ahead(tmp_path / "room").open(shards[0], 5_000_001) is None
    assert listing(tmp_path / "room") == set()


def test_a_file_that_was_touched_after_it_was_written_is_not_taken(
    tmp_path: Path, shards: list[Path], cache: DigestCache
) -> None:
    output = LayoutOutput(tmp_path / "out")
    with writing_ahead((output,)) as ahead:
        assert ahead is not None
        image = image_of(shards, ahead)
        for path in (tmp_path / ".out.partial-ahead").iterdir():
            with path.open("r+b") as file:
                file.write(b"x")
        write_image(ahead.hand_over(image), (output,), cache=cache)
    for path in (tmp_path / "out/blobs/sha256").iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def test_a_file_that_changes_while_it_is_read_leaves_nothing(tmp_path: Path, shards: list[Path]) -> None:
    files = [LayerFile(shards[0], shards[0].name)]
    with writing_ahead((LayoutOutput(tmp_path / "out"),)) as ahead:
        with pytest.raises(WeightsError, match="changed while"):
            scan_layer(files, DigestCache(None), 0, lambda _: os.truncate(shards[0], 3_000_000), copies=ahead)
        assert listing(tmp_path / ".out.partial-ahead") == set()
    assert listing(tmp_path) == {"model"}


def test_a_layout_that_is_there_and_other_outputs_are_not_written_ahead(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "there", tmp_path / "missing/below"):
        with writing_ahead((LayoutOutput(path),)) as ahead:
            assert ahead is None
    with writing_ahead(()) as ahead:
        assert ahead is None
    assert listing(tmp_path) == {"there"}


@pytest.mark.parametrize("there", [False, True])
def test_what_a_killed_build_left_is_removed(tmp_path: Path, there: bool) -> None:
    left = tmp_path / ".out.partial-ahead"
    left.mkdir()
    (left / "0").write_bytes(b"half a layer")
    if there:
        (tmp_path / "out").mkdir()
    with writing_ahead((LayoutOutput(tmp_path / "out"),)) as ahead:
        assert (ahead is None) is there
        assert not (left / "0").exists()
    assert not left.exists()


def test_the_folder_of_a_running_build_and_what_is_planted_stay_as_they_are(tmp_path: Path) -> None:
    place = tmp_path / ".out.partial-ahead"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_bytes(b"")
    place.mkdir()
    (place / "0").write_bytes(b"its layer")
    fd = os.open(place, os.O_RDONLY)
    assert try_lock(fd)
    try:
        with writing_ahead((LayoutOutput(tmp_path / "out"),)) as ahead:
            assert ahead is None
        assert (place / "0").read_bytes() == b"its layer"
    finally:
        os.close(fd)
    (place / "0").unlink()
    place.rmdir()
    place.symlink_to("elsewhere")
    with writing_ahead((LayoutOutput(tmp_path / "out"),)) as ahead:
        assert ahead is None
    assert listing(tmp_path / "elsewhere") == {"file"}


# The command


@pytest.mark.usefixtures("no_copy")
def test_a_cold_build_copies_in_its_one_read_and_a_changed_rule_finds_every_blob_known(
    tmp_path: Path,
) -> None:
    write_inputs(tmp_path)
    build(tmp_path)
    assert not [name for name in listing(tmp_path) if "partial" in name]
    config = tmp_path / "ral-config.yaml"
    config.write_text(config.read_text().replace("512", "256"))
    answer = json.loads(build(tmp_path, "--json"))
    weights = [layer for layer in answer["layers"] if layer["kind"] == "weights"]
    assert [layer["reused"] for layer in weights] == [True, True]
    assert answer["written"] < 1 << 20


def test_a_model_with_an_error_in_its_values_leaves_nothing(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_model(tmp_path / "model", shards=2)
    path = tmp_path / "model/model-00002-of-00002.safetensors"

    def not_a_number(tensors: dict[str, Any]) -> None:
        dtype, shape, data = tensors["model.norm.weight"]
        tensors["model.norm.weight"] = (dtype, shape, data[:-4] + b"\0\0\xc0\x7f")

    edit_tensors(path, not_a_number)
    before = listing(tmp_path)
    done = ralbuild(
        "image", "--model", "model", "--base", "oci:base", "--output", "oci:out", "--quiet", cwd=tmp_path
    )
    assert done.code == 3, done.err
    assert listing(tmp_path) - before <= {"xdg", ".ral_cache"}
