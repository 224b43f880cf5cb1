"""The unit for systemd starts the proxy as `ralbuild release` does, and lets it finish its answers."""

from __future__ import annotations

import configparser
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from release_support import world


def verified(unit: Path) -> str:
    """Return what systemd's own checker finds wrong in the unit."""
    command = ["systemd-analyze", "verify", "--recursive-errors=no", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "\n".join(line for line in done.stderr.splitlines() if unit.name in line)


@pytest.mark.parametrize("proxy", ["haproxy", "nginx"])
def test_what_the_unit_starts_is_the_proxy_and_its_signal_ends_it(tmp_path: Path, proxy: str) -> None:
    with world(tmp_path, proxy=proxy) as w:
        unit = w.site.folder / "ral-proxy.service"
        assert verified(unit) == ""
        planted = tmp_path / "ral-planted.service"
        planted.write_text(unit.read_text().replace("Type=forking", "Type=forkin"))
        assert "forkin" in verified(planted)
        parsed = configparser.ConfigParser(interpolation=None)
        parsed.optionxform = str  # type: ignore[assignment,method-assign]
        parsed.read(unit)
        service = parsed["Service"]
        w.proxy.stop()
        wait(lambda: not w.proxy.running())
        subprocess.run(shlex.split(service["ExecStart"]), check=True, stdin=subprocess.DEVNULL)
        wait(w.proxy.running)
        assert int(Path(service["PIDFile"]).read_text()) == w.proxy.pid()
        reload = service["ExecReload"].replace("$MAINPID", str(w.proxy.pid()))
        subprocess.run(shlex.split(reload), check=True)
        time.sleep(0.5)
        assert w.proxy.running()
        os.kill(w.proxy.pid(), signal.Signals[service["KillSignal"]])
        wait(lambda: not w.proxy.running())


def wait(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)
