"""Whether the libraries of a tree find theirs: planted faults, each of which the loader itself sees too."""

from __future__ import annotations

import contextlib
import random
import subprocess
from pathlib import Path

import pytest
from base_sources import small_sources
from elf_factory import AARCH64, make_library

from ralbuild.errors import ImageError
from ralbuild.image.base.dynamic import DamagedElfError, read_dynamic
from ralbuild.image.base.libraries import check_libraries
from ralbuild.image.base.rootfs import make_rootfs
from ralbuild.image.treepython import python_command

PACKAGE = "opt/ral/packages/thing"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian part of a base: a real loader, C library and zlib."""
    folder = tmp_path_factory.mktemp("libraries") / "tree"
    folder.mkdir()
    make_rootfs(small_sources().archives, folder)
    return folder


@pytest.fixture
def package(tree: Path) -> Path:
    """An empty folder of the tree."""
    folder = tree / PACKAGE
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def loader_says(tree: Path, library: Path) -> str:
    loader, *options, _ = python_command(tree)
    command = [loader, *options, "--list", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def refusal(tree: Path, **options: frozenset[str]) -> str:
    with pytest.raises(ImageError) as caught:
        check_libraries(tree, **options)
    return str(caught.value)


def test_a_tree_without_faults_passes_and_every_library_is_looked_at(tree: Path, package: Path) -> None:
    found = [
        path
        for path in tree.rglob("*")
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"
    ]
    assert check_libraries(tree).files == len(found) > 50


def test_a_library_that_is_not_there_is_named_with_who_needs_it(tree: Path, package: Path) -> None:
    path = make_library(package / "_core.so", needed=["libz.so.1", "libgone.so.7"])
    assert "libgone.so.7: cannot open shared object file" in loader_says(tree, path)
    assert refusal(tree) == f"{PACKAGE}/_core.so: needs libgone.so.7, which is in no folder that it looks in"


def test_an_older_library_lacks_the_version_that_is_asked_of_it(tree: Path, package: Path) -> None:
    path = make_library(
        package / "new.so", needed=["libz.so.1"], wanted={"libz.so.1": ["ZLIB_1.2.9", "ZLIB_9.9"]}
    )
    assert "version `ZLIB_9.9' not found" in loader_says(tree, path)
    assert refusal(tree) == (
        f"{PACKAGE}/new.so: needs ZLIB_9.9 of libz.so.1, which the one in the base does not have"
    )


def test_a_version_that_is_there_or_only_weakly_wanted_is_no_fault(tree: Path, package: Path) -> None:
    make_library(package / "a.so", needed=["libz.so.1"], wanted={"libz.so.1": ["ZLIB_1.2.9"]})
    weak = make_library(package / "b.so", needed=["libz.so.1"], wanted={"libz.so.1": ["ZLIB_9.9"]}, weak=True)
    assert "weak version `ZLIB_9.9' not found" in loader_says(tree, weak)
    check_libraries(tree)


@pytest.mark.parametrize("kind", ["runpath", "rpath"])
@pytest.mark.parametrize("text", ["$ORIGIN/../lib", "/nowhere:${ORIGIN}/../lib"])
def test_a_library_is_found_where_its_user_says(tree: Path, package: Path, kind: str, text: str) -> None:
    make_library(package / "lib/libpart.so.1")
    user = make_library(package / "core/user.so", needed=["libpart.so.1"], **{kind: text})
    assert "not found" not in loader_says(tree, user)
    check_libraries(tree)


def test_a_library_beside_its_user_is_not_found_without_being_asked_for_there(
    tree: Path, package: Path
) -> None:
    make_library(package / "libpart.so.1")
    user = make_library(package / "user.so", needed=["libpart.so.1"])
    assert "libpart.so.1: cannot open shared object file" in loader_says(tree, user)
    assert f"{PACKAGE}/user.so: needs libpart.so.1" in refusal(tree)


def test_a_library_for_another_processor_does_not_count(tree: Path, package: Path) -> None:
    make_library(package / "libpart.so.1", machine=AARCH64)
    make_library(package / "user.so", needed=["libpart.so.1"], runpath="$ORIGIN")
    assert f"{PACKAGE}/user.so: needs libpart.so.1" in refusal(tree)


def test_what_the_machine_brings_is_told_and_nothing_else_is_excused(tree: Path, package: Path) -> None:
    make_library(package / "gpu.so", needed=["libcuda.so.1"])
    assert "needs libcuda.so.1" in refusal(tree)
    assert check_libraries(tree, system=frozenset({"libcuda.so.1"})).system == ("libcuda.so.1",)
    make_library(package / "more.so", needed=["libnvrtc.so.12"])
    assert refusal(tree, system=frozenset({"libcuda.so.1"})).startswith(f"{PACKAGE}/more.so: needs libnvrtc")


def test_a_link_that_leads_out_of_the_tree_finds_nothing(tree: Path, package: Path, tmp_path: Path) -> None:
    outside = make_library(tmp_path / "libpart.so.1")
    (package / "libpart.so.1").symlink_to(outside)
    make_library(package / "user.so", needed=["libpart.so.1"], runpath="$ORIGIN")
    assert "needs libpart.so.1" in refusal(tree)


def test_a_damaged_library_is_refused_by_name(tree: Path, package: Path) -> None:
    path = make_library(package / "cut.so", needed=["libz.so.1"])
    path.write_bytes(path.read_bytes()[:-40])
    assert refusal(tree).startswith(f"{PACKAGE}/cut.so: is a damaged ELF file")


def test_many_faults_are_counted(tree: Path, package: Path) -> None:
    for i in range(30):
        make_library(package / f"{i:02}.so", needed=["libgone.so.7"])
    lines = refusal(tree).splitlines()
    assert (len(lines), lines[-1]) == (21, "base: and 10 more")


def test_no_bytes_make_the_reader_fail_in_another_way(tmp_path: Path) -> None:
    path = make_library(
        tmp_path / "x.so",
        needed=["libz.so.1"],
        runpath="$ORIGIN",
        wanted={"libz.so.1": ["A", "B"]},
        defined=["C", "D"],
    )
    good = path.read_bytes()
    rng = random.Random(6)
    read = 0
    for _ in range(600):
        data = bytearray(good[: rng.choice([len(good), rng.randrange(len(good))])])
        for _ in range(rng.randrange(1, 6)):
            if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        with contextlib.suppress(DamagedElfError):
            read += read_dynamic(path) is not None
    assert 0 < read < 600
