"""`ralbuild base lock` against a package index on loopback, whose wheels are made here."""

from __future__ import annotations

import functools
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from wheel_factory import make_wheel

from ralbuild.cli.main import main
from ralbuild.image.base import targets
from ralbuild.image.base.lockfile import read_lock
from ralbuild.image.base.targets import BaseTarget


class Index:
    """A folder of wheels behind the simple repository API (PEP 503), with digests in its links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, version: str, *requires: str) -> Path:
        path = make_wheel(
            self.folder,
            name.replace("-", "_"),
            {f"{name}.py": b"raise SystemExit('imported')\n"},
            version,
            requires=requires,
        )
        page = self.folder / "simple" / name
        page.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with (page / "index.html").open("a") as file:
            file.write(f'<a href="/{path.name}#sha256={digest}">{path.name}</a>\n')
        return path


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    folder = tmp_path / "index"
    folder.mkdir()
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        small = BaseTarget(
            name="cuda",
            roots=("torch==2.0", "server"),
            unused=frozenset({"triton"}),
            replaced={"nvidia-blas-cu12": "12.2.5", "nvidia-sparse-cu12": "12.2.1"},
            room=1,
            about="Made by a test.",
        )
        monkeypatch.setitem(targets.TARGETS, "cuda", small)
        yield Index(folder)
        server.shutdown()
        thread.join()


@pytest.fixture
def full(index: Index) -> Index:
    """An index with everything: torch declares libraries of 12.1 exactly, and a compiler."""
    nvidia = 'nvidia-blas-cu12==12.1.3; platform_system == "Linux" and platform_machine == "x86_64"'
    index.add("torch", "2.0", nvidia, "nvidia-sparse-cu12==12.1.0", "triton==3.0", "windows; extra == 'w'")
    index.add("triton", "3.0")
    for version in ("12.1.3", "12.2.5", "12.4.5"):
        index.add("nvidia-blas-cu12", version)
    index.add("nvidia-sparse-cu12", "12.1.0")
    index.add("nvidia-sparse-cu12", "12.2.1", "nvidia-blas-cu12")
    index.add("server", "1.0")
    return index


def lock(path: Path, *more: str) -> int:
    return main(["base", "lock", "--target", "cuda", "--lock", str(path), "--quiet", *more])


def test_the_lock_has_the_replacements_and_not_what_they_replace(
    full: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.lock"
    assert lock(path) == 0
    wheels = {wheel.name: wheel for wheel in read_lock(path).wheels}
    assert {name: wheel.version for name, wheel in wheels.items()} == {
        "nvidia-blas-cu12": "12.2.5",
        "nvidia-sparse-cu12": "12.2.1",
        "server": "1.0",
        "torch": "2.0",
    }
    for name, wheel in wheels.items():
        file = full.folder / f"{name.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
        assert wheel.sha256 == (hashlib.sha256(file.read_bytes()).hexdigest(),)
        assert wheel.size == file.stat().st_size
    assert [line[:2] for line in capsys.readouterr().out.splitlines()] == ["+ "] * 4


def test_what_stands_in_for_a_declared_package_is_said(
    full: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["base", "lock", "--target", "cuda", "--lock", str(tmp_path / "my.lock")]) == 0
    said = capsys.readouterr().err
    assert "nvidia-blas-cu12 12.2.5 instead of 12.1.3, which torch declares" in said
    assert "nvidia-sparse-cu12 12.2.1 instead of 12.1.0, which torch declares" in said


def test_the_same_index_gives_the_same_bytes_and_a_newer_one_the_difference(
    full: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.lock"
    assert lock(path) == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert lock(path) == 0
    assert (path.read_bytes(), capsys.readouterr().out) == (before, "no change\n")
    full.add("server", "1.1", "extra-thing>=1")
    full.add("extra-thing", "3.0")
    assert lock(path, "--dry-run") == 0
    assert path.read_bytes() == before
    shown = capsys.readouterr().out
    size = r"\(0\.0 MB(, was 0\.0 MB)?\)"
    assert re.fullmatch(rf"\+ extra-thing 3\.0 {size}\n  server 1\.0 -> 1\.1 {size}\n", shown)
    assert lock(path) == 0
    assert capsys.readouterr().out == shown
    assert path.read_bytes() != before


def test_a_library_older_than_the_one_torch_was_built_for_is_refused(
    full: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full.add("torch", "2.1", "nvidia-blas-cu12==12.4.5")
    newer = BaseTarget(
        "cuda", ("torch==2.1",), frozenset(), 1, "Too new.", replaced={"nvidia-blas-cu12": "12.2.5"}
    )
    monkeypatch.setitem(targets.TARGETS, "cuda", newer)
    path = tmp_path / "my.lock"
    assert lock(path) == 6
    said = capsys.readouterr().err
    assert "torch 2.1 declares nvidia-blas-cu12 12.4.5, found 12.2.5" in said
    assert "earlier torch" in said
    assert not path.exists()


def test_a_replacement_that_needs_more_than_is_locked_is_refused(
    full: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full.add("nvidia-blas-cu12", "12.3.0", "nvidia-jit-cu12")
    target = targets.TARGETS["cuda"]
    wishes = BaseTarget("cuda", target.roots, target.unused, 1, "", replaced={"nvidia-blas-cu12": "12.3.0"})
    monkeypatch.setitem(targets.TARGETS, "cuda", wishes)
    assert lock(tmp_path / "my.lock") == 6
    assert "nvidia-blas-cu12 12.3.0 needs nvidia-jit-cu12" in capsys.readouterr().err


def test_no_solution_leaves_the_lock_as_it_was(
    index: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.lock"
    path.write_text(f"torch==1.0 --hash=sha256:{'a' * 64}\n")
    before = path.read_bytes()
    assert lock(path) == 7
    assert "torch==2.0" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_lock_that_cannot_be_written_or_read_is_an_error_with_its_place(
    full: Index, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lock(tmp_path / "no" / "such" / "my.lock") == 7
    assert "my.lock" in capsys.readouterr().err
    (tmp_path / "binary.lock").write_bytes(b"\xff\xfe")
    assert lock(tmp_path / "binary.lock") == 6
    assert "binary.lock" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["base"], "--out"),
        (["base", "lock", "--out", "oci:x"], "--out"),
        (["base", "--out", "oci:x", "--dry-run"], "--dry-run"),
    ],
)
def test_options_of_the_other_verb_are_refused(
    words: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert place in capsys.readouterr().err


def test_a_lock_of_ones_own_must_name_what_the_labels_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.lock"
    path.write_text(f"torch==1.0 --hash=sha256:{'a' * 64}\n")
    assert main(["base", "--out", f"oci:{tmp_path / 'base'}", "--lock", str(path)]) == 6
    assert "does not lock transformers" in capsys.readouterr().err
    assert not (tmp_path / "base").exists()
