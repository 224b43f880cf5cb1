"""Where a proxy listens is its own: not another program's, not a colour's, and not moved under a running one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import ralbuild
from release_support import free_ports


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Another program, which lets others share its address as HAProxy does."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other


@pytest.mark.parametrize("proxy", ["haproxy", "nginx"])
def test_an_address_that_another_program_has_is_refused(
    tmp_path: Path, listener: socket.socket, proxy: str
) -> None:
    port = listener.getsockname()[1]
    words = ("--site", tmp_path / "s", "--proxy", proxy, "--listen", f"127.0.0.1:{port}")
    done = ralbuild("release", "init", *words, cwd=tmp_path)
    assert done.code == 7
    assert f"127.0.0.1:{port}: is in use by another program" in done.err
    pid = tmp_path / "s" / f"{proxy}.pid"  # nginx makes an empty one when it checks its configuration
    assert not pid.exists() or not pid.read_text()


def test_a_colours_port_is_no_address_for_clients(tmp_path: Path) -> None:
    done = ralbuild("release", "init", "--listen", "127.0.0.1:18002", cwd=tmp_path)
    assert done.code == 2
    assert "--listen: 18002 is a port of --ports" in done.err
    assert not (tmp_path / "ral-release").exists()


def test_a_running_proxys_site_cannot_be_moved_and_keeps_its_settings(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    where = ("--site", tmp_path / "s")
    assert ralbuild("release", "init", *where, "--listen", address, cwd=tmp_path).code == 0
    try:
        moved = ralbuild("release", "init", *where, "--listen", "127.0.0.1:1", cwd=tmp_path)
        assert moved.code == 2
        assert f"its proxy runs; cannot change listen {address} to 127.0.0.1:1" in moved.err
        assert json.loads((tmp_path / "s/release.json").read_text())["listen"] == address
        again = ralbuild("release", "init", *where, "--listen", address, "--watch", "1", cwd=tmp_path)
        assert again.code == 0, again.err
    finally:
        assert ralbuild("release", "proxy", *where, "stop", cwd=tmp_path).code == 0
