"""The digest cache and the one-read scan of a weight file."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ralbuild.contract.manifest import PackedWeights, WeightEntry
from ralbuild.contract.tarball import END, padding, weight_layer_header
from ralbuild.digests import (
    DigestCache,
    FileDigests,
    LayerFile,
    StatKey,
    default_cache,
    is_racy,
    scan_file,
    scan_layer,
)
from ralbuild.errors import HostError, WeightsError
from ralbuild.image.base.files import cache_dir, exclusive
from ralbuild.image.layers import layer_recipe, recipe_chunks
from ralbuild.image.own_digests import OwnDigests
from ralbuild.image.plan import HostFile, bundled_layer

SECOND = 1_000_000_000


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(3_000_001))
    return path


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "digests")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour after the test's files were written."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * SECOND)


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_the_file_digest_is_that_of_hashlib(weights: Path, cache: DigestCache) -> None:
    with weights.open("rb") as file:
        expected = hashlib.file_digest(file, "sha256").hexdigest()
    assert scan_file(weights, cache, 0, own=True).sha256 == expected
    assert scan_file(weights, cache, 0).sha256 == "", "a hash that nobody asked for"


@pytest.mark.usefixtures("later")
def test_a_digest_that_was_not_asked_for_before_is_computed_when_it_is(
    weights: Path, cache: DigestCache
) -> None:
    first = scan_file(weights, cache, 0)
    both = scan_file(weights, cache, 0, own=True)
    assert not both.cached
    assert both.layer_sha256 == first.layer_sha256
    assert both.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert scan_file(weights, cache, 0, own=True) == both
    assert scan_file(weights, cache, 0, own=True).cached
    assert scan_file(weights, cache, 0).cached


@pytest.mark.usefixtures("later")
def test_only_what_this_run_has_read_at_rest_has_a_witness(weights: Path, cache: DigestCache) -> None:
    first, second = scan_file(weights, cache, 0), scan_file(weights, cache, 0)
    assert first.witness is not None
    assert first.witness.state == StatKey.of(weights.stat())
    frame = weight_layer_header(weights.name, weights.stat().st_size, 0)
    frame += padding(weights.stat().st_size) + END
    assert first.witness.frame == hashlib.sha256(frame).hexdigest()
    assert second.witness is None


def test_a_file_that_was_just_written_has_no_witness(weights: Path) -> None:
    assert scan_file(weights, DigestCache(None), 0).witness is None


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_the_layer_digest_is_that_of_a_tar_with_the_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(os.urandom(size))
    found = scan_file(path, DigestCache(None), 5)
    tar_path = tmp_path / "layer.tar"
    header = weight_layer_header(path.name, size, 5)
    tar_path.write_bytes(header + path.read_bytes() + padding(size) + END)
    assert found.layer_sha256 == hashlib.sha256(tar_path.read_bytes()).hexdigest()
    assert found.layer_size == tar_path.stat().st_size
    with tarfile.open(tar_path) as tar:
        folder, file = tar.getmembers()
        assert (folder.name, folder.isdir(), folder.mode, folder.mtime) == ("models", True, 0o755, 5)
        assert (file.name, file.mode, file.mtime) == ("models/w.safetensors", 0o644, 5)
        data = tar.extractfile(file)
        assert data is not None
        assert data.read() == path.read_bytes()


@pytest.mark.parametrize("step", [1000, 4096, 1 << 20])
def test_a_weight_file_is_hashed_alone_while_its_layer_goes_by(tmp_path: Path, step: int) -> None:
    sizes = {"a.safetensors": 100_001, "b.safetensors": 0, "c.safetensors": 512, "d.safetensors": 4096}
    data = {name: os.urandom(size) for name, size in sizes.items()}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    files = [LayerFile(tmp_path / name, name) for name in data]
    entries = [(name, HostFile(tmp_path / name, len(content))) for name, content in data.items()]
    digests = scan_layer(files, DigestCache(None), 0)
    tar = b"".join(map(bytes, recipe_chunks(layer_recipe(bundled_layer(entries, digests[0]), 0))))
    assert hashlib.sha256(tar).hexdigest() == digests[0].layer_sha256
    packed = PackedWeights(digests[0].layer_sha256, tuple(WeightEntry(*item) for item in sizes.items()))
    own = OwnDigests(packed)
    for at in range(0, len(tar), step):
        own.feed(tar[at : at + step])
    assert own.digests == {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}


def test_each_byte_is_read_once(weights: Path, cache: DigestCache) -> None:
    before = bytes_read()
    scan_file(weights, cache, 0)
    assert bytes_read() - before < weights.stat().st_size + 100_000


@pytest.mark.usefixtures("later")
def test_a_second_scan_reads_nothing_and_says_so(weights: Path, cache: DigestCache) -> None:
    first = scan_file(weights, cache, 0)
    before = bytes_read()
    second = scan_file(weights, cache, 0)
    assert second == first
    assert (first.cached, second.cached) == (False, True)
    assert bytes_read() - before < 100_000


@pytest.mark.usefixtures("later")
def test_rehash_ignores_what_is_remembered(weights: Path, cache: DigestCache) -> None:
    scan_file(weights, cache, 0)
    assert not scan_file(weights, cache, 0, rehash=True).cached


@pytest.mark.usefixtures("later")
def test_progress_adds_up_to_the_size_read_or_not(weights: Path, cache: DigestCache) -> None:
    for _ in range(2):
        steps: list[int] = []
        scan_file(weights, cache, 0, steps.append)
        assert sum(steps) == weights.stat().st_size


def test_a_file_that_was_just_written_is_not_trusted(weights: Path, cache: DigestCache) -> None:
    scan_file(weights, cache, 0)
    assert not scan_file(weights, cache, 0).cached


@pytest.mark.parametrize(
    ("mtime", "ctime", "racy"),
    [(0, 0, False), (0, 99, True), (99, 0, True), (0, 97, False), (0, 200, True), (10**6, 0, False)],
)
def test_a_state_within_two_seconds_of_its_hashing_is_racy(mtime: int, ctime: int, racy: bool) -> None:
    assert is_racy(StatKey(1, 1, 1, mtime * SECOND, ctime * SECOND), 100 * SECOND) is racy


def replace_keeping_time(path: Path) -> None:
    info = path.stat()
    other = path.with_name("other")
    other.write_bytes(os.urandom(info.st_size))
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(path)


def overwrite_keeping_time(path: Path) -> None:
    info = path.stat()
    with path.open("r+b") as file:
        file.write(os.urandom(64))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("change", [replace_keeping_time, overwrite_keeping_time, append])
def test_a_changed_file_is_read_again(
    weights: Path, cache: DigestCache, change: Callable[[Path], None]
) -> None:
    scan_file(weights, cache, 0)
    change(weights)
    found = scan_file(weights, cache, 0, own=True)
    assert not found.cached
    assert found.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()


@pytest.mark.usefixtures("later")
def test_another_name_or_time_is_another_layer(weights: Path, cache: DigestCache) -> None:
    scan_file(weights, cache, 0)
    link = weights.with_name("alias.safetensors")
    link.symlink_to(weights.name)
    assert not scan_file(link, cache, 0).cached
    assert not scan_file(weights, cache, 1).cached
    assert scan_file(weights, cache, 0).cached


def flip_a_digit(entry: Path) -> None:
    text = entry.read_text()
    position = text.index('"layer_sha256":"') + 20
    digit = "0" if text[position] != "0" else "1"
    entry.write_text(text[:position] + digit + text[position + 1 :])


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.write_bytes(b""),
        lambda entry: entry.write_bytes(entry.read_bytes()[:-5]),
        lambda entry: entry.write_bytes(b"\xff" * 50),
        lambda entry: entry.write_bytes(b"[1,2]"),
        lambda entry: entry.write_bytes(b"[" * 100_000),
        flip_a_digit,
        lambda entry: (entry.unlink(), entry.mkdir()),
        lambda entry: (entry.unlink(), os.mkfifo(entry)),
        lambda entry: (
            entry.rename(entry.parent.with_name("e")) and entry.symlink_to(entry.parent.with_name("e"))
        ),
        lambda entry: entry.chmod(0o666),
    ],
)
def test_a_damaged_entry_is_computed_anew(
    weights: Path, cache: DigestCache, damage: Callable[[Path], object]
) -> None:
    first = scan_file(weights, cache, 0)
    assert cache.folder is not None
    (entry,) = cache.folder.iterdir()
    damage(entry)
    again = scan_file(weights, cache, 0)
    assert again == first
    assert not again.cached


@pytest.mark.usefixtures("later")
def test_an_unusable_cache_folder_is_no_error(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    expected = scan_file(weights, DigestCache(None), 0)
    assert scan_file(weights, DigestCache(tmp_path / "file" / "digests"), 0) == expected


def test_the_cache_folder_is_private(weights: Path, cache: DigestCache) -> None:
    cache.put(weights, "test", StatKey.of(weights.stat()), {"a": "b"})
    assert cache.folder is not None
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert cache.get(weights, "test", StatKey.of(weights.stat())) == {"a": "b"}
    cache.forget(weights, "test")
    assert cache.get(weights, "test", StatKey.of(weights.stat())) is None
    assert list(cache.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/ralbuild/digests"),
        ({"HOME": "/h"}, "/h/.cache/ralbuild/digests"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/ralbuild/digests"),
        ({"HOME": "relative"}, None),
        ({}, "/of-passwd/.cache/ralbuild/digests"),
    ],
)
def test_the_cache_lies_where_xdg_says(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str | None
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_dir="/of-passwd"))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert default_cache().folder == (Path(expected) if expected else None)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> object:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert default_cache().folder is None
    with pytest.raises(HostError) as caught:
        cache_dir()
    assert "XDG_CACHE_HOME" in caught.value.problems[0].hint


def test_no_cache_folder_can_be_written_by_others_whatever_the_umask(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    before = os.umask(0)
    try:
        default_cache().put(weights, "test", StatKey.of(weights.stat()), {})
        with exclusive(cache_dir() / "run" / ".lock"):
            pass
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "xdg/ralbuild").iterdir()}
    assert modes == {"digests": 0o700, "run": 0o755}
    assert (tmp_path / "xdg/ralbuild").stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("later")
def test_a_path_that_is_not_utf8_is_remembered_too(tmp_path: Path, cache: DigestCache) -> None:
    folder = tmp_path / os.fsdecode(b"mod\xffel")
    folder.mkdir()
    (folder / "w.safetensors").write_bytes(b"x")
    assert not scan_file(folder / "w.safetensors", cache, 0).cached
    assert scan_file(folder / "w.safetensors", cache, 0).cached


def test_a_missing_file_a_pipe_and_a_folder_are_refused(tmp_path: Path, cache: DigestCache) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "missing"):
        with pytest.raises(WeightsError, match=name):
            scan_file(tmp_path / name, cache, 0)


@pytest.mark.parametrize(
    "change", [append, overwrite_keeping_time, lambda path: os.truncate(path, 2_000_000)]
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    weights: Path, cache: DigestCache, change: Callable[[Path], None]
) -> None:
    done: list[int] = []

    def change_once(count: int) -> None:
        if not done:
            time.sleep(0.02)  # beyond the granularity of the file system's clock
            change(weights)
        done.append(count)

    with pytest.raises(WeightsError, match="changed while it was read") as caught:
        scan_file(weights, cache, 0, change_once)
    assert caught.value.problems[0].place == str(weights)


def test_a_moved_folder_gives_the_same_digests(weights: Path, tmp_path: Path, cache: DigestCache) -> None:
    first = scan_file(weights, cache, 0)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    copy = Path(shutil.copy(weights, moved))
    copy.chmod(0o600)
    os.utime(copy, (1, 1))
    assert scan_file(copy, cache, 0) == first
    assert isinstance(first, FileDigests)
