"""The benchmark of a large model's changed rule says beforehand what disk it takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import image_large


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a `docker` first on the path that says its data are in the same folder."""
    program = tmp_path / "docker"
    program.write_text(f"#!/bin/sh\necho {tmp_path}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_disk_with_too_little_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"needs 4300000 GB free, found \d+; use --gb"):
        image_large.require_room(tmp_path, 1_000_000)


def test_a_disk_with_room_is_taken(tmp_path: Path) -> None:
    image_large.require_room(tmp_path, 0)
