"""Tar headers, with GNU tar and Python's tarfile as the judges."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ralbuild.contract.tarball import (
    ALIGN,
    END,
    aligned_file_header,
    directory_header,
    file_header,
    padding,
    symlink_header,
    weight_layer_header,
)

GIB = 1 << 30
NAMES = st.text(st.characters(exclude_categories=["C"], exclude_characters="/"), min_size=1, max_size=80)


def gnu_tar(folder: Path, names: list[str], *options: str) -> bytes:
    """GNU tar's archive of ``names`` in this order, two zero blocks at its end."""
    fixed = ["--format=ustar", "--owner=0", "--group=0", "--numeric-owner", "--no-recursion", "-b1"]
    command = ["tar", *fixed, *options, "-C", str(folder), "-cf", "-", "--", *names]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize("mtime", [0, 1_700_000_000])
def test_ordinary_entries_have_the_bytes_that_gnu_tar_writes(tmp_path: Path, mtime: int) -> None:
    (tmp_path / "opt").mkdir(mode=0o755)
    (tmp_path / "opt/run.sh").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "opt/run.sh").chmod(0o755)
    (tmp_path / "opt/sh").symlink_to("run.sh")
    ours = b"".join(
        [
            directory_header("opt", mtime),
            file_header("opt/run.sh", 0o755, 10, mtime),
            b"#!/bin/sh\n" + padding(10),
            symlink_header("opt/sh", "run.sh", mtime),
            END,
        ]
    )
    assert ours == gnu_tar(tmp_path, ["opt", "opt/run.sh", "opt/sh"], f"--mtime=@{mtime}")


def test_a_name_of_100_bytes_needs_no_pax_header_and_101_bytes_do() -> None:
    assert len(file_header("n" * 100, 0o644, 0, 0)) == 512
    assert len(file_header("n" * 101, 0o644, 0, 0)) == 3 * 512


@given(name=NAMES, target=NAMES, repeat=st.integers(1, 4))
def test_tarfile_reads_back_any_name_and_link_target(name: str, target: str, repeat: int) -> None:
    path = "/".join([name] * repeat)
    data = file_header(path, 0o644, 3, 7) + b"abc" + padding(3) + symlink_header(f"{path}.l", target, 7) + END
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        file, link = tar.getmembers()
        assert (file.name, file.size, file.mode, file.mtime) == (path, 3, 0o644, 7)
        assert (file.uid, file.gid, file.uname, file.gname) == (0, 0, "", "")
        assert (link.name, link.linkname, link.issym()) == (f"{path}.l", target, True)


@settings(max_examples=300)
@given(
    name=NAMES,
    size=st.integers(0, 1 << 45),
    blocks=st.integers(0, 30),
)
def test_an_aligned_file_starts_at_a_multiple_of_4096(name: str, size: int, blocks: int) -> None:
    before = blocks * 512
    header = aligned_file_header(name, 0o644, size, 0, before)
    assert (before + len(header)) % ALIGN == 0
    # tarfile takes the archive as cut off after the header, but it has read the header by then
    with tarfile.open(fileobj=io.BytesIO(header + b"x")) as tar:
        member = tar.next()
    assert member is not None
    assert (member.name, member.size, member.offset_data) == (name, size, len(header))


@pytest.mark.parametrize("size", [0, 1, 511, 512, 8 * GIB - 1, 8 * GIB, 300 * GIB])
def test_gnu_tar_lists_a_weight_layer_of_any_size(tmp_path: Path, size: int) -> None:
    archive = tmp_path / "layer.tar"
    header, trailer = weight_layer_header("model.safetensors", size, 0), padding(size) + END
    with archive.open("wb") as file:
        file.write(header)
        file.seek(len(header) + size)  # a hole: 300 GiB of weights without writing them
        file.write(trailer)
    assert archive.stat().st_size % 512 == 0
    listing = subprocess.run(
        ["tar", "--numeric-owner", "--utc", "-tvf", str(archive)], check=True, capture_output=True, text=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    assert rows == [
        ["drwxr-xr-x", "0/0", "0", "1970-01-01", "00:00", "models/"],
        ["-rw-r--r--", "0/0", str(size), "1970-01-01", "00:00", "models/model.safetensors"],
    ]
    assert listing.stderr == ""


@pytest.mark.parametrize("size", [8 * GIB, 46 * GIB])
def test_a_reader_without_pax_sees_the_size_of_a_large_file(size: int) -> None:
    """Busybox and Clair read the ustar field alone: base 256 from 8 GiB on, never 0."""
    ustar = weight_layer_header("model.safetensors", size, 0)[-512:]
    assert ustar[124] == 0x80
    assert int.from_bytes(ustar[125:136], "big") == size


def test_a_large_weight_layer_can_be_unpacked_by_gnu_tar(tmp_path: Path) -> None:
    """The content really starts where the header says: its first and last bytes come out."""
    size = 9 * GIB
    archive = tmp_path / "layer.tar"
    header = weight_layer_header("model.safetensors", size, 0)
    with archive.open("wb") as file:
        file.write(header + b"first")
        file.seek(len(header) + size - 4)
        file.write(b"last" + padding(size) + END)
    with tarfile.open(archive) as tar:
        member = tar.getmember("models/model.safetensors")
        data = tar.extractfile(member)
        assert data is not None
        assert data.read(5) == b"first"
        data.seek(-4, os.SEEK_END)
        assert data.read() == b"last"


@pytest.mark.parametrize("mtime", [-1, 8 << 30])
def test_a_time_that_no_header_can_hold_is_refused(mtime: int) -> None:
    with pytest.raises(ValueError, match=str(mtime)):
        file_header("a", 0o644, 0, mtime)
