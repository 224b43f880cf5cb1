"""The archive sink: complete or not there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from image_cases import NOWHERE, make_image, write_weights

from ralbuild.digests import DigestCache, StatKey
from ralbuild.errors import HostError, ImageError
from ralbuild.image.outputs import ArchiveOutput, LayoutOutput
from ralbuild.image.write import write_image


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model")
    return tmp_path / "model"


def test_a_failed_build_leaves_the_old_archive(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "out" / "a.tar"
    write_image(make_image(model), [ArchiveOutput(target)], cache=NOWHERE)
    old = target.read_bytes()
    image = make_image(model, "new")
    write_weights(model, (5 << 20, 999))
    with pytest.raises(ImageError, match="changed while"):
        write_image(image, [ArchiveOutput(target)], cache=NOWHERE)
    assert target.read_bytes() == old
    assert [path.name for path in target.parent.iterdir()] == ["a.tar"]


def test_a_killed_build_leaves_the_old_archive_and_the_next_one_succeeds(tmp_path: Path, model: Path) -> None:
    target = tmp_path / "out" / "a.tar"
    write_image(make_image(model), [ArchiveOutput(target)], cache=NOWHERE)
    old, image = target.read_bytes(), make_image(model, "new")
    pid = os.fork()
    if pid == 0:
        kill = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        write_image(image, [ArchiveOutput(target)], cache=NOWHERE, progress=kill)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert target.read_bytes() == old
    write_image(image, [ArchiveOutput(target)], cache=NOWHERE)
    assert target.read_bytes() != old
    assert [path.name for path in target.parent.iterdir()] == ["a.tar"]


def test_a_folder_in_the_way_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "a.tar").mkdir()
    with pytest.raises(ImageError, match="is not a file"):
        write_image(make_image(model), [ArchiveOutput(tmp_path / "a.tar")], cache=NOWHERE)


@pytest.mark.parametrize("field", ["layer_sha256", "layer_size"])
@pytest.mark.parametrize("output", [ArchiveOutput, LayoutOutput])
def test_a_wrong_digest_in_the_cache_is_forgotten_so_that_the_next_build_heals(
    field: str,
    output: type[ArchiveOutput | LayoutOutput],
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)  # not just written
    cache = DigestCache(tmp_path / "digests")
    put = cache.put

    def put_wrongly(path: Path, purpose: str, key: StatKey, values: Mapping[str, str]) -> None:
        wrong = {"layer_sha256": "0" * 64, "layer_size": "7"}[field]
        put(path, purpose, key, {**values, field: wrong} if field in values else values)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "put", put_wrongly)
        right = make_image(model, cache=cache)
    targets = [output(tmp_path / "out")]
    for _ in right.layers[1:3]:  # one weight layer a build
        with pytest.raises(ImageError, match="remembered digest is wrong") as caught:
            write_image(make_image(model, cache=cache), targets, cache=cache)
        assert "--rehash" in caught.value.problems[0].hint
    healed = make_image(model, cache=cache)
    assert write_image(healed, targets, cache=cache).manifest_digest == right.digest


@pytest.mark.parametrize("plant", ["symbolic link", "hard link", "folder", "pipe"])
def test_what_lies_at_the_temporary_name_is_removed_and_never_written_through(
    plant: str, tmp_path: Path, model: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    partial = tmp_path / ".a.tar.partial-build"
    if plant == "symbolic link":
        partial.symlink_to("secret")
    elif plant == "hard link":
        partial.hardlink_to(tmp_path / "secret")
    elif plant == "folder":
        (partial / "blobs").mkdir(parents=True)
    else:
        os.mkfifo(partial)
    write_image(make_image(model), [ArchiveOutput(tmp_path / "a.tar")], cache=NOWHERE)
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert (tmp_path / "a.tar").is_file()
    assert not os.path.lexists(partial)


def test_a_folder_that_may_not_be_entered_and_a_name_too_long_are_errors_of_the_host(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = make_image(model)
    with pytest.raises(HostError, match="name too long"):
        write_image(image, [ArchiveOutput(tmp_path / ("x" * 300))], cache=NOWHERE)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)  # root may enter every folder
    for output in (ArchiveOutput, LayoutOutput):
        with pytest.raises(HostError, match="Permission denied"):
            write_image(image, [output(tmp_path / "x" / "y")], cache=NOWHERE)


def test_progress_adds_up_to_what_is_written(tmp_path: Path, model: Path) -> None:
    steps: list[int] = []
    image = make_image(model)
    written = write_image(image, [ArchiveOutput(tmp_path / "a.tar")], cache=NOWHERE, progress=steps.append)
    assert sum(steps) == written.bytes_written == (tmp_path / "a.tar").stat().st_size
