"""Fetching wheels with pip: only the locked files, each failure with its reason."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from wheel_factory import make_wheel

from ralbuild.errors import HostError, ImageError
from ralbuild.image.base.fetch import fetch_wheels
from ralbuild.image.base.lockfile import LockedWheel


class Quiet:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def note(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int, unit: str) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def locked(path: Path) -> LockedWheel:
    name, version = path.name.split("-")[:2]
    return LockedWheel(name, version, (hashlib.sha256(path.read_bytes()).hexdigest(),))


def cache_of(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(exist_ok=True)
    return folder


def test_what_is_in_the_cache_is_not_fetched_again(index: Path, tmp_path: Path) -> None:
    wheels = [locked(make_wheel(index, name, {f"{name}.py": b""})) for name in ("alpha", "beta")]
    cache, first, second = cache_of(tmp_path), Quiet(), Quiet()
    found = fetch_wheels(wheels, cache, first)
    assert sorted(found) == ["alpha", "beta"]
    for path in index.iterdir():
        path.unlink()
    assert fetch_wheels(wheels, cache, second) == found
    assert (len(first.steps), second.steps) == (1, [])


def test_a_cached_file_that_was_changed_is_fetched_again(index: Path, tmp_path: Path) -> None:
    wheel = locked(make_wheel(index, "alpha", {"alpha.py": b""}))
    cache = cache_of(tmp_path)
    path = fetch_wheels([wheel], cache, Quiet())["alpha"]
    good = path.read_bytes()
    path.write_bytes(good + b"x")
    assert fetch_wheels([wheel], cache, Quiet())["alpha"].read_bytes() == good


def test_another_file_than_the_locked_one_is_an_error_with_both_digests(index: Path, tmp_path: Path) -> None:
    found = locked(make_wheel(index, "alpha", {"alpha.py": b""})).sha256[0]
    cache = cache_of(tmp_path)
    with pytest.raises(ImageError) as caught:
        fetch_wheels([LockedWheel("alpha", "1.0", ("0" * 64,))], cache, Quiet())
    text = str(caught.value)
    assert text.startswith("alpha==1.0: ")
    assert "0" * 64 in text
    assert found in text
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_another_torch_says_that_a_cpu_build_is_needed(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "torch", {"torch.py": b""}, "2.13.0+cpu")
    with pytest.raises(ImageError) as caught:
        fetch_wheels([LockedWheel("torch", "2.13.0+cpu", ("0" * 64,))], cache_of(tmp_path), Quiet())
    assert "CPU build of torch" in caught.value.problems[0].hint


@pytest.mark.parametrize(("name", "hint"), [("torch", "CPU build of torch"), ("alpha", "index settings")])
def test_a_package_that_pip_does_not_find_is_an_error_with_a_hint(
    index: Path, tmp_path: Path, name: str, hint: str
) -> None:
    assert index.is_dir()
    with pytest.raises(HostError) as caught:
        fetch_wheels([LockedWheel(name, "9", ("0" * 64,))], cache_of(tmp_path), Quiet())
    assert f"{name}==9" in str(caught.value)
    assert hint in caught.value.problems[0].hint
