"""A file that is replaced whole: links are followed, and what is no file never becomes one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ralbuild.files import write_atomically


def test_of_a_link_the_file_that_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for text in (b"made", b"replaced"):
        write_atomically(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_bytes() == text


def test_a_pipe_a_device_and_a_folder_stay_what_they_are(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to(os.devnull)
    for name in ("pipe", "folder", "null"):
        before = (tmp_path / name).stat()
        with pytest.raises(OSError, match="no regular file"):
            write_atomically(tmp_path / name, b"x")
        assert os.path.samestat(before, (tmp_path / name).stat())
    assert sorted(os.listdir(tmp_path)) == ["folder", "null", "pipe"]
