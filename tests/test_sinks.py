"""Weight files that share a layer, resharding, and what several outputs of one run do to each other."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from image_cases import make_image
from model_factory import read_tensors, safetensors_bytes, write_model, write_tensors

from ralbuild.contract.tarball import MAX_WEIGHT_LAYERS, bundles
from ralbuild.digests import DigestCache, LayerFile, scan_layer
from ralbuild.errors import HostError, ImageError, UsageError, WeightsError
from ralbuild.image.layers import digest_layer, layer_recipe, recipe_chunks
from ralbuild.image.outputs import ArchiveOutput, LayoutOutput
from ralbuild.image.plan import HostFile, LayerPlan, bundled_layer
from ralbuild.image.write import write_image
from ralbuild.weights.reshard import reshard
from ralbuild.weights.scan import Order, ScannedModel, verify_folder

NOWHERE = DigestCache(None)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """282 files, as many as a public model has (huggingface_hub issue 4602)."""
    folder = tmp_path_factory.mktemp("shards")
    paths = [folder / f"model-{at:05}-of-00282.safetensors" for at in range(1, 283)]
    for at, path in enumerate(paths):
        path.write_bytes(os.urandom(100 + 37 * at))
    return paths


def layers_of(paths: list[Path], cache: DigestCache = NOWHERE) -> list[LayerPlan]:
    plans = []
    for part in bundles(len(paths)):
        group = paths[part.start : part.stop]
        digests = scan_layer([LayerFile(path, path.name) for path in group], cache, 0)
        plans.append(
            bundled_layer([(path.name, HostFile(path, path.stat().st_size)) for path in group], digests[0])
        )
    return plans


@pytest.mark.parametrize("count", [0, 1, 2, 99, 100, 101, 163, 191, 200, 201, 282, 1000, 5000])
def test_consecutive_files_share_at_most_100_layers(count: int) -> None:
    parts = bundles(count)
    assert [at for part in parts for at in part] == list(range(count))
    assert len(parts) <= MAX_WEIGHT_LAYERS
    assert count > 100 or all(len(part) == 1 for part in parts)
    assert len({len(part) for part in parts[:-1]}) <= 1


def test_282_files_are_94_layers_whose_bytes_are_what_the_scan_said(shards: list[Path]) -> None:
    plans = layers_of(shards)
    assert len(plans) == 94
    for plan in plans:
        assert digest_layer(layer_recipe(plan, 0)) == plan.known


def test_a_shared_layer_is_a_tar_of_its_files_with_aligned_contents(shards: list[Path]) -> None:
    plan = layers_of(shards)[-1]
    data = b"".join(bytes(chunk) for chunk in recipe_chunks(layer_recipe(plan, 0)))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = [member for member in tar if member.isfile()]
        assert [member.name for member in members] == [f"models/{path.name}" for path in shards[-3:]]
        for member, path in zip(members, shards[-3:], strict=True):
            assert member.offset_data % 4096 == 0
            assert tar.extractfile(member).read() == path.read_bytes()


@pytest.mark.parametrize("size", [None, 1, 60_000])
def test_a_changed_file_changes_one_layer(shards: list[Path], size: int | None, tmp_path: Path) -> None:
    cache = DigestCache(tmp_path / "cache")
    before = [plan.known for plan in layers_of(shards, cache)]
    victim = shards[100]
    old = victim.read_bytes()
    victim.write_bytes(os.urandom(len(old) if size is None else size))
    after = [plan.known for plan in layers_of(shards, cache)]
    victim.write_bytes(old)
    assert [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [100 // 3]


def test_a_remembered_layer_is_not_read_and_one_changed_neighbour_reads_all_of_it(
    shards: list[Path], tmp_path: Path
) -> None:
    cache, group = DigestCache(tmp_path / "cache"), []
    for path in shards[:3]:
        group.append(tmp_path / path.name)
        group[-1].write_bytes(path.read_bytes())
        os.utime(group[-1], (1e9, 1e9))
    files = [LayerFile(path, path.name) for path in group]
    from ralbuild.digests import scan as digests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "is_racy", lambda *_: False)
        first = scan_layer(files, cache, 0)
        second = scan_layer(files, cache, 0)
        assert [item.cached for item in (*first, *second)] == [False] * 3 + [True] * 3
        assert second == first
        group[1].write_bytes(b"other")
        third = scan_layer(files, cache, 0)
        assert not any(item.cached for item in third)
        assert third[0].layer_sha256 != first[0].layer_sha256
        alone = scan_layer(files[:1], cache, 0)
        assert not alone[0].cached, "a layer of its own is another layer"


def scanned(folder: Path, cache: DigestCache = NOWHERE, *, own_digests: bool = False) -> ScannedModel:
    model = verify_folder(folder, cache, 0, lambda *_: None, Order(own_digests=own_digests)).model
    assert model is not None
    return model


def write_out(model: ScannedModel, folder: Path) -> None:
    """Write the weight files as they would lie in the image."""
    folder.mkdir()
    for shard in model.shards:
        with (folder / shard.name).open("wb") as out:
            for piece in shard.pieces:
                if isinstance(piece, bytes):
                    out.write(piece)
                    continue
                with piece.path.open("rb") as file:
                    file.seek(piece.start)
                    out.write(file.read(piece.size))
    for name, data in model.files:
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("limit", [23_000, 40_000, 10**9])
@pytest.mark.parametrize("count", [1, 3])
def test_resharding_keeps_every_tensor_and_passes_verify_again(
    tmp_path: Path, count: int, limit: int
) -> None:
    """Read back by the safetensors library, and by our own verify."""
    from safetensors import safe_open

    model = scanned(write_model(tmp_path / "model", shards=count), own_digests=True)
    fresh = reshard(model, limit, NOWHERE, 0)
    write_out(fresh, tmp_path / "out")
    hashes: list[dict[str, str]] = []
    for shards, folder in ((model.shards, tmp_path / "model"), (fresh.shards, tmp_path / "out")):
        found = {}
        for shard in shards:
            with safe_open(folder / shard.name, "np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    found[name] = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
        hashes.append(found)
    assert hashes[0] == hashes[1]
    for shard, listed in zip(fresh.shards, fresh.manifest.weights, strict=True):
        data = (tmp_path / "out" / shard.name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == shard.digests.sha256
        assert shard.digests.layer_sha256 == listed.sha256
        assert len(data) == shard.size <= limit
    again = scanned(tmp_path / "out")
    assert [item.sha256 for item in again.manifest.weights] == [
        item.sha256 for item in fresh.manifest.weights
    ]
    assert [item.digests.layer_sha256 for item in again.shards] == [
        item.digests.layer_sha256 for item in fresh.shards
    ]
    assert again.manifest.parameters == model.manifest.parameters


def test_tensors_stay_aligned_for_their_type_whatever_is_put_together(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors = read_tensors(path)
    odd = {f"model.layers.0.extra{at}": ("I8", [3], bytes([at] * 3)) for at in range(3)}
    path.write_bytes(safetensors_bytes({**odd, **tensors}, {"format": "pt"}))
    from ralbuild.weights.reshard import _new_files, _read_tensors

    class Shard:
        path = tmp_path / "model/model.safetensors"
        name = "model.safetensors"
        size = (tmp_path / "model/model.safetensors").stat().st_size

    placed, metadata = _read_tensors([Shard])
    assert metadata == {"format": "pt"}
    import json

    for file in _new_files(placed, 40_000, metadata):
        header = json.loads(file.pieces[0][8:])
        assert len(file.pieces[0]) % 8 == 0
        for name, item in header.items():
            if name != "__metadata__" and item["dtype"] == "F32":
                assert item["data_offsets"][0] % 4 == 0


def test_a_tensor_above_the_size_cannot_be_cut(tmp_path: Path) -> None:
    model = scanned(write_model(tmp_path / "model"))
    with pytest.raises(UsageError, match="alone has 17408 bytes and cannot be cut") as caught:
        reshard(model, 17_408, NOWHERE, 0)
    least = int(caught.value.problems[0].hint.split()[-1])
    assert reshard(model, least, NOWHERE, 0).shards


def test_a_file_that_changed_after_verify_is_not_resharded(tmp_path: Path) -> None:
    model = scanned(write_model(tmp_path / "model"))
    path = tmp_path / "model/model.safetensors"
    tensors = read_tensors(path)
    name = next(iter(tensors))
    dtype, shape, data = tensors[name]
    write_tensors(path, {**tensors, name: (dtype, shape, bytes(len(data)))})
    with pytest.raises(WeightsError, match="changed after it was checked"):
        reshard(model, 40_000, NOWHERE, 0)


def test_resharded_layers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ralbuild.weights.reshard as module

    write_model(tmp_path / "model", shards=2)
    cache = DigestCache(tmp_path / "cache")
    monkeypatch.setattr("ralbuild.digests.scan.is_racy", lambda *_: False)
    monkeypatch.setattr(module, "is_racy", lambda *_: False)
    model = scanned(tmp_path / "model", cache)
    first = reshard(model, 24_000, cache, 0)
    monkeypatch.setattr(module, "_hash_pieces", None)
    assert reshard(model, 24_000, cache, 0) == first


# Several outputs ------------------------------------------------------------------------------------


def test_two_builds_that_write_the_same_outputs_in_another_order_both_end(tmp_path: Path) -> None:
    image = make_image(tmp_path / "model")
    one, two = LayoutOutput(tmp_path / "one"), ArchiveOutput(tmp_path / "two.tar")
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(write_image, image, outputs, cache=NOWHERE) for outputs in ([one, two], [two, one])
        ]
        assert {job.result(60).manifest_digest for job in jobs} == {image.digest}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one", "two.tar"]


def test_no_output_is_touched_when_another_one_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make_image(tmp_path / "model")
    small = tmp_path / "small"
    small.mkdir()
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: usage(path)._replace(free=1000) if Path(path) == small else usage(path),
    )
    outputs = [LayoutOutput(tmp_path / "layout"), ArchiveOutput(small / "a.tar")]
    with pytest.raises(HostError, match=r"needed, 1000 are free"):
        write_image(image, outputs, cache=NOWHERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]
    assert list(small.iterdir()) == []


def test_a_layout_that_is_there_stays_as_it_was_when_another_output_fails(tmp_path: Path) -> None:
    old = make_image(tmp_path / "model", "old rules")
    write_image(old, [LayoutOutput(tmp_path / "layout")], cache=NOWHERE)
    before = {path: path.read_bytes() for path in (tmp_path / "layout").rglob("*") if path.is_file()}
    (tmp_path / "folder").mkdir()
    new = make_image(tmp_path / "model", "new rules")
    with pytest.raises(ImageError, match="is not a file"):
        write_image(
            new, [LayoutOutput(tmp_path / "layout"), ArchiveOutput(tmp_path / "folder")], cache=NOWHERE
        )
    assert {path: path.read_bytes() for path in (tmp_path / "layout").rglob("*") if path.is_file()} == before
