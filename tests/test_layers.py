"""Layers: what goes into one, in which order, and that what is hashed is what is written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from image_cases import NOWHERE, root_layer, rules_layer, weight_layers, write_weights

from ralbuild.contract.tarball import END, padding, weight_layer_header
from ralbuild.digests import StatKey
from ralbuild.errors import HostError, ImageError
from ralbuild.image import disk, layers
from ralbuild.image.disk import check_room, host_errors
from ralbuild.image.layers import (
    Recipe,
    WrongLayerError,
    append_layer,
    digest_layer,
    layer_recipe,
    recipe_chunks,
)
from ralbuild.image.plan import DirEntry, Entry, FileEntry, HostFile, LayerDigest, LayerPlan, LinkEntry


def small(*entries: Entry, owned: tuple[str, ...] = ()) -> LayerPlan:
    return LayerPlan("test", "small", entries, owned)


def layer_bytes(layer: LayerPlan, mtime: int = 0) -> bytes:
    return b"".join(bytes(chunk) for chunk in recipe_chunks(layer_recipe(layer, mtime)))


def members(layer: LayerPlan) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(layer_bytes(layer))) as tar:
        return tar.getmembers()


def write(layer: LayerPlan, path: Path, expected: LayerDigest | None = None) -> LayerDigest:
    recipe = layer_recipe(layer, 0)
    digest = expected or layer.known or digest_layer(recipe)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        append_layer(recipe, fd, digest)
    finally:
        os.close(fd)
    return digest


# What is in a layer


def test_a_small_layer_has_the_bytes_that_gnu_tar_writes(tmp_path: Path) -> None:
    entries: list[Entry] = [
        FileEntry("etc/b", b"x" * 1000),
        FileEntry("etc/run", b"#!/bin/sh\n", 0o755),
        FileEntry("etc/empty", b""),
        LinkEntry("etc/a", "b"),
        DirEntry("tmp", 0o1777),
    ]
    names = ["etc", "etc/a", "etc/b", "etc/empty", "etc/run", "tmp"]
    for entry in entries:
        path = tmp_path / entry.path
        path.parent.mkdir(exist_ok=True)
        if isinstance(entry, FileEntry):
            assert isinstance(entry.source, bytes)
            path.write_bytes(entry.source)
            path.chmod(entry.mode)
        elif isinstance(entry, LinkEntry):
            path.symlink_to(entry.target)
        else:
            path.mkdir()
            path.chmod(entry.mode)
    (tmp_path / "etc").chmod(0o755)
    options = ["--format=ustar", "--owner=0", "--group=0", "--numeric-owner", "--no-recursion", "--mtime=@0"]
    command = ["tar", *options, "-b1", "-C", str(tmp_path), "-cf", "-", *names]
    expected = subprocess.run(command, check=True, capture_output=True).stdout
    assert layer_bytes(small(*entries, owned=("",))) == expected


def test_the_order_of_entries_does_not_matter() -> None:
    layer = root_layer()
    backwards = LayerPlan(layer.name, layer.kind, layer.entries[::-1], layer.owned)
    assert layer_bytes(layer) == layer_bytes(backwards)


def test_entries_are_sorted_by_the_bytes_of_their_paths() -> None:
    names = ["b", "a", "a.b", "a-b", "Z", "é", "z", "a0"]
    found = [member.name for member in members(small(*(FileEntry(name, b"") for name in names)))]
    assert found == sorted(names, key=lambda name: name.encode())
    assert found[-1] == "é"


def test_only_folders_that_are_ours_get_an_entry() -> None:
    layer = small(FileEntry("opt/ral/app/a/b.py", b""), FileEntry("etc/x", b""), owned=("opt/ral",))
    assert [(member.name, member.type) for member in members(layer)] == [
        ("etc/x", tarfile.REGTYPE),
        ("opt/ral", tarfile.DIRTYPE),
        ("opt/ral/app", tarfile.DIRTYPE),
        ("opt/ral/app/a", tarfile.DIRTYPE),
        ("opt/ral/app/a/b.py", tarfile.REGTYPE),
    ]


def test_owning_a_folder_is_not_owning_one_whose_name_starts_the_same() -> None:
    layer = small(FileEntry("opt/ralph/x", b""), owned=("opt/ral",))
    assert [member.name for member in members(layer)] == ["opt/ralph/x"]


def test_no_owner_name_or_foreign_mode_reaches_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    path.chmod(0o600)
    os.utime(path, (1_000_000, 1_000_000))
    for member in members(small(FileEntry("d/f", HostFile(path, 1)), DirEntry("d"), owned=("d",))):
        assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 0)
        assert member.mode == (0o755 if member.isdir() else 0o644)
        assert not member.pax_headers


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "./a",
        "a//b",
        "a/",
        "a/.wh.b",
        ".wh..wh..opq",
        "a\nb",
        "a\x00b",
        "a\x7fb",
        "a\x85b",
        "bad\udcff",
        "x" * 256,
        "/".join(["x" * 200] * 25),
    ],
)
def test_an_unsafe_path_is_refused(path: str) -> None:
    with pytest.raises(ImageError, match="test: "):
        layer_recipe(small(FileEntry(path, b"")), 0)


@pytest.mark.parametrize(
    "entries",
    [
        (FileEntry("a", b""), FileEntry("a", b"")),
        (FileEntry("a", b""), DirEntry("a")),
        (FileEntry("a", b""), FileEntry("a/b", b"")),
        (LinkEntry("lib", "usr/lib"), FileEntry("lib/x", b"")),
        (FileEntry("a", b"", 0o600),),
        (FileEntry("a", b"", 0o4755),),
        (DirEntry("a", 0o777),),
        (LinkEntry("a", ""),),
        (LinkEntry("a", "b\nc"),),
    ],
)
def test_entries_that_cannot_be_are_refused(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(ImageError, match="a"):
        layer_recipe(small(*entries), 0)


# Weight layers


def test_a_weight_layer_is_header_file_and_trailer(tmp_path: Path) -> None:
    (path,) = write_weights(tmp_path, (70_001,))
    (layer,) = weight_layers([path])
    expected = weight_layer_header(path.name, 70_001, 0) + path.read_bytes() + padding(70_001) + END
    assert layer_bytes(layer) == expected
    assert layer.known == LayerDigest(hashlib.sha256(expected).hexdigest(), len(expected))


def test_every_file_of_a_bundle_is_aligned(tmp_path: Path) -> None:
    paths = write_weights(tmp_path, (5000, 1, 4096, 123_457))
    entries = tuple(FileEntry(f"models/{path.name}", HostFile(path, path.stat().st_size)) for path in paths)
    layer = LayerPlan("bundle", "weights", entries, ("models",))
    files = [member for member in members(layer) if member.isfile()]
    assert [member.size for member in files] == [5000, 1, 4096, 123_457]
    assert [member.offset_data % 4096 for member in files] == [0, 0, 0, 0]


# What is hashed is what is written


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "model", (5_000_001,))[0]


def forbid_kernel_copy(monkeypatch: pytest.MonkeyPatch, number: int, after: int = 0) -> None:
    copy, calls = os.copy_file_range, iter(range(1000))

    def refuse(*args: int) -> int:
        if next(calls) < after:
            return copy(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)


def test_the_digest_is_that_of_the_written_bytes(tmp_path: Path, shard: Path) -> None:
    plans = [*weight_layers([shard]), root_layer(), rules_layer()]
    for number, layer in enumerate(plans):
        out = tmp_path / str(number)
        digest = write(layer, out)
        assert digest.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()
        assert digest.size == out.stat().st_size


def test_a_layer_is_appended_where_the_file_ends(tmp_path: Path, shard: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"before")
    (layer,) = weight_layers([shard])
    write(layer, out)
    assert out.read_bytes() == b"before" + layer_bytes(layer)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_the_bytes_are_the_same_where_the_kernel_cannot_copy(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, number: int, after: int
) -> None:
    (layer,) = weight_layers([shard])
    monkeypatch.setattr(layers, "COPY_STEP", 1 << 20)
    forbid_kernel_copy(monkeypatch, number, after)
    write(layer, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == layer_bytes(layer)


def test_another_failure_of_the_kernel_copy_is_not_hidden(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_kernel_copy(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write(weight_layers([shard])[0], tmp_path / "out")


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def overwrite(path: Path) -> None:
    info = path.stat()
    time.sleep(0.02)  # beyond the granularity of the file system's clock
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"overwritte")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


CHANGES: list[Callable[[Path], None]] = [grow, overwrite, lambda path: os.truncate(path, 4_000_000)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_after_it_was_scanned_fails_by_name(
    tmp_path: Path, shard: Path, change: Callable[[Path], None]
) -> None:
    (layer,) = weight_layers([shard])
    change(shard)
    with pytest.raises(ImageError, match="changed while the image was being built") as caught:
        write(layer, tmp_path / "out")
    assert caught.value.problems[0].place == str(shard)


@pytest.mark.parametrize("in_kernel", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_copied_fails_by_name(
    tmp_path: Path,
    shard: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    in_kernel: bool,
) -> None:
    (layer,) = weight_layers([shard])
    if not in_kernel:
        forbid_kernel_copy(monkeypatch, errno.EXDEV)
    unchanging = disk.unchanging

    @contextlib.contextmanager
    def change_when_open(source: HostFile) -> Iterator[int]:
        with unchanging(source) as fd:
            change(shard)
            yield fd

    monkeypatch.setattr(layers, "unchanging", change_when_open)
    with pytest.raises(ImageError, match="changed while the image was being built") as caught:
        write(layer, tmp_path / "out")
    assert str(shard) in str(caught.value)


# Each byte is hashed once: what this run has read for its digest is copied without another hash


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are older than the racy rule minds."""
    monkeypatch.setattr("ralbuild.digests.scan.is_racy", lambda *_: False)


@pytest.fixture
def no_second_hash(monkeypatch: pytest.MonkeyPatch, settled: None) -> None:
    monkeypatch.setattr(layers, "_Follower", lambda *_: pytest.fail("hashed what arrived"))


@pytest.mark.usefixtures("no_second_hash")
def test_what_this_run_has_hashed_is_not_hashed_again_when_it_arrives(tmp_path: Path, shard: Path) -> None:
    (layer,) = weight_layers([shard])
    steps: list[int] = []
    with (tmp_path / "out").open("w+b") as out:
        append_layer(layer_recipe(layer, 0), out.fileno(), layer.known, steps.append)
    assert hashlib.sha256((tmp_path / "out").read_bytes()).hexdigest() == layer.known.sha256
    assert sum(steps) == layer.known.size


@pytest.mark.usefixtures("no_second_hash")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("late", [False, True])
def test_a_file_that_this_run_has_hashed_must_stay_what_it_was(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], late: bool
) -> None:
    (layer,) = weight_layers([shard])
    copy = os.copy_file_range
    if late:
        monkeypatch.setattr(os, "copy_file_range", lambda *args: (change(shard), copy(*args))[1])
    else:
        change(shard)
    with pytest.raises(ImageError, match="changed while the image was being built") as caught:
        write(layer, tmp_path / "out")
    assert str(shard) in str(caught.value)


@pytest.mark.usefixtures("no_second_hash")
def test_a_file_that_takes_the_place_of_a_hashed_one_is_refused_whatever_its_times(
    tmp_path: Path, shard: Path
) -> None:
    (layer,) = weight_layers([shard])
    info, other = shard.stat(), tmp_path / "other"
    other.write_bytes(bytes(info.st_size))
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(shard)
    with pytest.raises(ImageError, match="replaced after it was hashed"):
        write(layer, tmp_path / "out")


def test_a_change_that_no_time_stamp_shows_is_found_in_a_file_that_was_just_written(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The racy rule: two writes within one tick of the clock leave the same time stamps."""
    key = StatKey.of(shard.stat())
    monkeypatch.setattr(StatKey, "of", lambda _: key)
    (layer,) = weight_layers([shard])
    overwrite(shard)
    with pytest.raises(WrongLayerError):
        write(layer, tmp_path / "out")


@pytest.mark.usefixtures("settled")
def test_a_layer_with_another_header_than_the_one_that_was_hashed_is_found(
    tmp_path: Path, shard: Path
) -> None:
    (layer,) = weight_layers([shard])
    assert layer.known is not None
    with (tmp_path / "out").open("w+b") as out, pytest.raises(WrongLayerError):
        append_layer(layer_recipe(layer, 1), out.fileno(), layer.known)


@pytest.mark.usefixtures("settled")
def test_where_the_kernel_stops_copying_the_bytes_are_hashed_as_they_arrive(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer,) = weight_layers([shard])
    assert layer.known is not None
    monkeypatch.setattr(layers, "COPY_STEP", 1 << 20)
    forbid_kernel_copy(monkeypatch, errno.EXDEV, 2)
    steps: list[int] = []
    (tmp_path / "out").write_bytes(b"before")
    with (tmp_path / "out").open("r+b") as out:
        append_layer(layer_recipe(layer, 0), out.fileno(), layer.known, steps.append)
    assert (tmp_path / "out").read_bytes() == b"before" + layer_bytes(layer)
    assert sum(steps) == layer.known.size


def test_a_small_file_must_have_the_digest_that_was_verified(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a":1}')
    digest = hashlib.sha256(b'{"a":1}').hexdigest()
    layer = small(FileEntry("models/config.json", HostFile(path, 7, digest)))
    good = digest_layer(layer_recipe(layer, 0))
    path.write_bytes(b'{"a":2}')
    with pytest.raises(ImageError, match="changed while") as hashing:
        digest_layer(layer_recipe(layer, 0))
    with pytest.raises(ImageError, match="changed while") as writing:
        write(layer, tmp_path / "out", good)
    assert hashing.value.problems[0].place == writing.value.problems[0].place == str(path)


def test_sources_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "missing", "missing/below"):
        with pytest.raises(ImageError, match=name):
            digest_layer(layer_recipe(small(FileEntry("x", HostFile(tmp_path / name, 0))), 0))


# The disk


def test_a_full_disk_says_how_many_bytes_are_needed_and_free(tmp_path: Path) -> None:
    recipe = Recipe("test", (b"x" * 4_000_000,))
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        full = pytest.raises(HostError, match=r"4000000 bytes are needed, \d+ are free")
        with full as caught, host_errors(tmp_path, recipe.size):
            append_layer(recipe, fd, LayerDigest("", recipe.size))
    finally:
        os.close(fd)
    assert caught.value.exit_code == 7


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=f"{1 << 60} bytes are needed"):
        check_room(tmp_path, 1 << 60)


def test_files_that_the_file_system_can_share_need_no_room(
    tmp_path: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[int] = []
    monkeypatch.setattr(fcntl, "ioctl", lambda _out, request, _source: requests.append(request))
    check_room(tmp_path, 1 << 60, [HostFile(shard, 1 << 60)])
    assert requests == [0x40049409]  # FICLONE of linux/fs.h
    assert sorted(tmp_path.iterdir()) == [shard.parent]


MEMORY = """
import os, resource, sys
from pathlib import Path
from ralbuild.digests import DigestCache, scan_file
from ralbuild.image.layers import append_layer, layer_recipe
from ralbuild.image.plan import weight_layer
path, out = Path(sys.argv[1]), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
warm = path.with_name("warm"); warm.write_bytes(b"x")
def build(file):
    layer = weight_layer(file, file.stat().st_size, scan_file(file, DigestCache(None), 0))
    append_layer(layer_recipe(layer, 0), out, layer.known)
build(warm)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
build(path)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(b"x")
    os.truncate(path, 256 << 20)
    command = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "out")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 16_000  # KiB
    assert weight_layers([path], NOWHERE)[0].known is not None
