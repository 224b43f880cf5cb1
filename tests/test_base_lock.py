"""The lock of the base's Python packages: exact, hashed, and what the project says it needs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ralbuild.errors import ImageError
from ralbuild.image.base.lock import changes
from ralbuild.image.base.lockfile import LockedWheel, format_lock, load_lock, normalised, parse_lock
from ralbuild.image.base.targets import TARGETS
from ralbuild.pins import load_pins

A, B = "a" * 64, "b" * 64
ROOT = Path(__file__).parent.parent


def test_the_shipped_lock_holds_everything_that_the_runtime_extra_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {wheel.name: wheel.version for wheel in load_lock("cpu").wheels}
    for text in [*project["optional-dependencies"]["runtime"], *TARGETS["cpu"].roots]:
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text} is locked to {version}"


def test_torch_is_locked_to_a_build_without_cuda() -> None:
    assert Version(load_lock("cpu").version("torch")).local == "cpu"
    assert not [
        wheel.name for wheel in load_lock("cpu").wheels if wheel.name.startswith(("nvidia", "triton"))
    ]


def test_the_lock_for_cuda_has_what_its_target_names_and_no_compiler() -> None:
    target = TARGETS["cuda"]
    locked = {wheel.name: wheel.version for wheel in load_lock("cuda").wheels}
    for text in target.roots:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text
    assert {name: locked[name] for name in target.replaced} == dict(target.replaced)
    assert not {"triton", "nvidia-cuda-nvcc-cu12"} & locked.keys()
    assert target.cuda == load_pins().cuda.version


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_package_of_the_shipped_locks_has_a_size(target: str) -> None:
    assert [wheel.name for wheel in load_lock(target).wheels if not wheel.size] == []


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_shipped_lock_is_as_the_generator_writes_it(target: str) -> None:
    text = (ROOT / f"ralbuild/data/base-{target}.lock").read_text()
    comment = "".join(text.splitlines(keepends=True)[:2])
    assert format_lock(parse_lock(text, "lock").wheels, comment) == text


def test_a_lock_survives_writing_and_reading() -> None:
    wheels = (LockedWheel("b-c", "1.0+cpu", (A, B), 1_234_567), LockedWheel("z", "2", (B,)))
    assert parse_lock(format_lock(reversed(wheels), "# made by a test"), "lock").wheels == wheels


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch>=2.0 --hash=sha256:" + A,
        "torch==2.13.0",
        "torch==2.13.0 --hash=sha256:abc",
        "torch==2.13.0 --hash=md5:" + A,
        "-r other.txt",
    ],
)
def test_a_line_that_is_not_exact_and_hashed_is_refused_and_shown(line: str) -> None:
    with pytest.raises(ImageError) as caught:
        parse_lock(f"idna==3.20 --hash=sha256:{A}\n{line}\n", "my.lock")
    assert "my.lock" in str(caught.value)
    assert line in str(caught.value)


def test_an_empty_lock_is_refused() -> None:
    with pytest.raises(ImageError, match="empty"):
        parse_lock("# nothing\n", "lock")


@pytest.mark.parametrize("name", ["Jinja2", "typing_extensions", "ruamel.yaml", "a__b-.c"])
def test_names_compare_as_packaging_compares_them(name: str) -> None:
    assert normalised(name) == canonicalize_name(name)


def test_a_package_that_is_locked_twice_is_refused() -> None:
    with pytest.raises(ImageError, match="names a-b twice"):
        parse_lock(f"a-b==1 --hash=sha256:{A}\nA_B==2 --hash=sha256:{B}\n", "lock")


def test_changes_name_each_package_once() -> None:
    old = [LockedWheel("a", "1", (A,)), LockedWheel("b", "1", (A,)), LockedWheel("c", "1", (A,))]
    new = [LockedWheel("a", "2", (B,)), LockedWheel("b", "1", (B,)), LockedWheel("d", "1", (A,))]
    assert changes(old, new) == ["  a 1 -> 2", "  b 1, another file", "- c 1", "+ d 1"]
    assert changes(old, old) == []


def test_changes_say_sizes_where_they_are_known() -> None:
    old = [LockedWheel("a", "1", (A,), 2_500_000), LockedWheel("b", "1", (A,))]
    new = [LockedWheel("a", "2", (B,), 1_204_000_000), LockedWheel("b", "1", (A,), 7)]
    assert changes(old, new) == ["  a 1 -> 2 (1,204.0 MB, was 2.5 MB)"]
