"""The build context: complete or not there, whatever other renders and killed ones do."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest
from image_cases import NOWHERE, make_plan, weight_layers, write_weights

from ralbuild.digests import DigestCache, scan_file
from ralbuild.errors import HostError, UsageError
from ralbuild.image.context import write_context
from ralbuild.image.plan import BaseImage, ImagePlan


@pytest.fixture
def plan(tmp_path: Path) -> ImagePlan:
    base = BaseImage("sha256:" + "0" * 64, "", {}, ())
    found = make_plan(tmp_path / "model", base=base, sizes=(1000,))
    return dataclasses.replace(found, layers=found.layers[:1])  # the weights


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_second_of_two_renders_is_told_that_the_name_is_taken(
    kind: str, plan: ImagePlan, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        write_context(plan, out, NOWHERE)
    else:
        out.write_bytes(b"first")
    with pytest.raises(UsageError, match="is already there"):
        write_context(plan, out, NOWHERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_killed_renders_left_is_removed(plan: ImagePlan, tmp_path: Path) -> None:
    for name in (".out.partial-1", f".out.partial-{os.getpid()}"):
        (tmp_path / name / "models").mkdir(parents=True)
    (tmp_path / ".outer.partial-1").mkdir()
    write_context(plan, tmp_path / "out", NOWHERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".outer.partial-1", "model", "out"]


def test_only_another_file_system_is_called_so(
    plan: ImagePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for out in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(HostError) as caught:
            write_context(plan, out, NOWHERE)
        assert caught.value.problems[0].hint == ""

    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(HostError) as caught:
        write_context(plan, tmp_path / "out", NOWHERE)
    assert "file system that holds the weights" in caught.value.problems[0].hint
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_weights_that_the_server_could_not_read_are_refused(
    mode: int, plan: ImagePlan, tmp_path: Path
) -> None:
    """A hard link has its file's mode, and the builder copies it; the server runs as another user."""
    (shard,) = (tmp_path / "model").glob("model-*")
    shard.chmod(mode)
    with pytest.raises(HostError, match=f"has mode {mode:04o}") as caught:
        write_context(plan, tmp_path / "out", NOWHERE)
    assert caught.value.problems[0].place == str(shard)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_umask_changes_no_mode_of_a_folder(plan: ImagePlan, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        write_context(plan, tmp_path / "out", NOWHERE)
    finally:
        os.umask(old)
    assert (tmp_path / "out/models").stat().st_mode & 0o777 == 0o755


def test_a_second_name_does_not_make_the_next_build_read_the_weights(
    plan: ImagePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link changes the file's ctime, which the digest cache goes by."""
    cache = DigestCache(tmp_path / "digests")
    paths = write_weights(tmp_path / "shards", (5000, 6000))
    for path in paths:
        os.utime(path, (1_000_000_000, 1_000_000_000))
    monkeypatch.setattr("ralbuild.digests.scan.is_racy", lambda *_: False)
    layers = weight_layers(paths, cache)
    write_context(dataclasses.replace(plan, layers=layers), tmp_path / "out", cache)
    assert os.path.samefile(paths[0], tmp_path / "out/models" / paths[0].name)
    assert [scan_file(path, cache, 0).cached for path in paths] == [True, True]
    with paths[1].open("r+b") as file:
        file.write(b"other")
    assert [scan_file(path, cache, 0).cached for path in paths] == [True, False]
