"""Finished bases in the user's cache: found again, made once, and never half-made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from base_sources import Quiet

from ralbuild.errors import HostError, UsageError
from ralbuild.image.base import build_base, ensure_base
from ralbuild.image.base.lockfile import Lock, LockedWheel
from ralbuild.image.base.store import BaseStore
from ralbuild.image.base.targets import TARGETS
from ralbuild.image.reader import read_base

HERE = Path(__file__).parent
MOMENTS = (
    "unpacking Debian packages and wheels",
    "compiling bytecode",
    "running the base once and writing its layers",
)
LOCK = Lock((LockedWheel("a", "1", ("0" * 64,)),), "1" * 64)


def start(tmp_path: Path, what: str = "ensure") -> subprocess.Popen[str]:
    # The parts that are downloaded come from the real cache; what is made goes to this one.
    code = (
        "import os, base_small_build, base_sources\n"
        f"if {what != 'cached'}: base_sources.small_sources()\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path / 'cache')!r}\n"
        "base_small_build.main()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    command = [sys.executable, "-c", code, str(tmp_path), what]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.splitlines()


def finished(tmp_path: Path) -> list[str]:
    """Names of complete bases."""
    folder = tmp_path / "cache/ralbuild/base"
    return [path.name for path in folder.iterdir() if len(path.name) == 64] if folder.exists() else []


def test_two_at_once_make_one_base_and_the_third_fetches_nothing(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    steps = [finish(first), finish(second)]
    path = steps[0][-1]
    assert steps[1][-1] == path
    assert sum(MOMENTS[0] in lines for lines in steps) == 1
    assert finish(start(tmp_path, "cached")) == [path]
    assert finished(tmp_path) == [Path(path).name]
    base = read_base(Path(path))
    labels = base.config["config"]["Labels"]
    assert labels["io.ralbuild.base.contract"] == "1"
    assert labels["io.ralbuild.base.python"].startswith("3.11.")
    assert [layer.name.split()[0] for layer in base.layers] == ["Debian", "torch", "Python", "list"]


def test_a_killed_build_leaves_no_base_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    for moment in MOMENTS:
        process = start(tmp_path)
        assert process.stdout is not None
        assert any(line.strip() == moment for line in process.stdout)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert finished(tmp_path) == []
    path = finish(start(tmp_path))[-1]
    assert read_base(Path(path)).layers
    assert finish(start(tmp_path, "build")) == ["fetch refresh=True", path]
    assert not list(Path(path).parent.glob(".work*"))


def test_a_base_that_does_not_run_is_not_kept(tmp_path: Path) -> None:
    process = start(tmp_path, "broken")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "the finished base does not run" in err
    assert finished(tmp_path) == []


def test_a_full_disk_is_an_error_with_the_bytes_needed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    code = (
        "import base_small_build, base_sources, subprocess, os\n"
        "base_sources.small_sources()\n"
        f"subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', {str(tmp_path / 'cache')!r}], check=True)\n"
        f"os.environ['XDG_CACHE_HOME'] = {str(tmp_path / 'cache')!r}\n"
        "base_small_build.main()"
    )
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        code,
        str(tmp_path),
        "ensure",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "HostError" in done.stderr
    assert f"the disk is too full: {TARGETS['cpu'].room} bytes are needed" in done.stderr


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(HostError):
        ensure_base("cpu", Quiet())


def test_a_pointer_to_nothing_is_no_base(tmp_path: Path) -> None:
    store = BaseStore(tmp_path)
    assert store.newest("cpu", LOCK) is None
    store.point("cpu", LOCK, "a" * 64)
    assert store.newest("cpu", LOCK) is None
    (tmp_path / ("a" * 64)).mkdir()
    assert store.newest("cpu", LOCK) is None
    (tmp_path / ("a" * 64) / "index.json").write_text(json.dumps({}))
    assert store.newest("cpu", LOCK) == tmp_path / ("a" * 64)
    assert store.newest("cpu", Lock(LOCK.wheels, "2" * 64)) is None


@pytest.mark.parametrize("text", ["", "../../etc", "a" * 63, "A" * 64, "\xff"])
def test_a_damaged_pointer_is_no_base(tmp_path: Path, text: str) -> None:
    store = BaseStore(tmp_path)
    store.point("cpu", LOCK, "a" * 64)
    next(tmp_path.glob("cpu-*")).write_bytes(text.encode("latin-1"))
    assert store.newest("cpu", LOCK) is None


@pytest.mark.parametrize("make", [ensure_base, build_base])
def test_a_target_without_a_base_is_a_usage_error(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match="rocm"):
        make("rocm", Quiet())
