"""The two proxies that a release can switch: HAProxy by a runtime command, nginx by a reload.

What a release needs of one is small: start it, ask which colour it sends requests to, change that, hold
requests, and count those that a colour still answers. The switch is persisted before it is made, so
that a reload or a restart of the proxy keeps it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import shutil
import signal
import socket
import subprocess
import time
from errno import EADDRINUSE
from pathlib import Path, PurePath
from typing import Any, Protocol

from ralbuild.errors import HostError, UsageError
from ralbuild.files import write_atomically
from ralbuild.release.site import COLOURS, Settings, Site, other
from ralbuild.render import render_text

START_SECONDS = 10.0
FREE_SECONDS = 2.0
"""How long a proxy that ends may hold its address."""
UNIT_FILE = "ral-proxy.service"
FILES = (
    *("haproxy.cfg", "park.lua", "503.http", "state.map", "ha.sock", "haproxy.pid"),
    *("nginx.conf", "active.conf", "nginx.log", "nginx.pid", UNIT_FILE),
)
"""What the proxies have in a site."""
FOLDERS = ("body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Where nginx keeps what does not fit into memory."""


class Proxy(Protocol):
    """What a release asks of a proxy."""

    can_hold: bool

    def write_files(self) -> None:
        """Write the configuration; what is active stays active."""

    def check(self) -> None:
        """Let the proxy itself check its configuration; raises HostError with what it says."""

    def start(self) -> None:
        """Start it, unless it runs."""

    def stop(self) -> None:
        """Let it finish what it answers, then end."""

    def running(self) -> bool:
        """Tell whether it runs."""

    def active(self) -> str:
        """Return the colour that requests go to; empty when there is none."""

    def activate(self, colour: str) -> None:
        """Send every later request to ``colour``; empty answers 503."""

    def hold(self, held: bool) -> None:
        """Let requests wait, or let them go on."""

    def sessions(self, colour: str) -> int:
        """Return how many requests ``colour`` is answering through the proxy; 0 when that is not known."""

    def sees(self, colour: str) -> bool:
        """Tell whether the proxy itself thinks that ``colour`` answers: its checks lag behind ours."""

    def errors(self, colour: str) -> tuple[int, int]:
        """Return how many answers of ``colour`` failed, and how many there were, since the proxy started."""


def proxy_of(site: Site) -> Proxy:
    """Return the proxy that the site's settings name."""
    kinds: dict[str, type[HaProxy] | type[Nginx]] = {"haproxy": HaProxy, "nginx": Nginx}
    return kinds[site.settings.proxy](site.folder, site.settings)


def haproxy_files(folder: PurePath, settings: Settings) -> dict[str, bytes]:
    """Return HAProxy's files by name, as they look when they lie in ``folder``; nothing is active yet."""
    values = _values(folder, settings)
    return {
        "haproxy.cfg": render_text("release/haproxy.cfg.j2", values),
        "park.lua": render_text("release/park.lua.j2", values),
        "503.http": _unavailable(),
        "state.map": _state_map("", held=False),
    }


def _state_map(colour: str, *, held: bool) -> bytes:
    return f"active be_{colour or 'none'}\nhold {int(held)}\n".encode()


def _values(folder: PurePath, settings: Settings) -> dict[str, object]:
    return {
        "run": folder,
        "listen": settings.listen,
        "drain": settings.drain_seconds,
        "park": settings.park_seconds,
        "connections": settings.connections,
        "fallback": settings.on_crash == "old",
        "colours": [(name, settings.port(name), settings.port(other(name))) for name in COLOURS],
    }


def _is_taken(family: int, kind: int, protocol: int, _name: str, address: tuple[Any, ...]) -> bool:
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno == EADDRINUSE  # of any other error the proxy will speak
    return False


class _Daemon:
    """A proxy as a process of this user, with a pid file."""

    program = ""
    pid_name = ""
    config_name = ""
    stop_signal = reload_signal = signal.SIGTERM
    """What lets it finish its answers and end, and what makes it read its files again."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings

    def pid(self) -> int:
        """Return the process that the pid file names, when it is the proxy of this folder; else 0."""
        try:
            number = int((self.folder / self.pid_name).read_text())
            command = Path(f"/proc/{number}/cmdline").read_bytes()
        except (OSError, ValueError):
            return 0
        ours = self.program.encode() in command.split(b"\0", 1)[0] and bytes(self.folder) in command
        return number if ours else 0

    def running(self) -> bool:
        return self.pid() != 0

    def _tool(self) -> str:
        found = shutil.which(self.program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if found is None:
            hint = f"install it: apt-get install {self.program}"
            raise HostError(f"{self.program} is not installed", place="release", hint=hint)
        return found

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            [self._tool(), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise HostError(f"{self.program} refuses: {' | '.join(said[-3:])}", place=str(self.folder))

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid := self.pid():
                os.kill(pid, number)

    def _check_address(self) -> None:
        """Raise HostError when another program listens where this one will.

        HAProxy does not notice: the kernel would hand half of the connections to each of two proxies. One
        that is ending may hold the address for a moment longer.
        """
        host, _, port = self.settings.listen.rpartition(":")
        found = socket.getaddrinfo(
            host.strip("[]*") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        deadline = time.monotonic() + FREE_SECONDS
        while _is_taken(*found[0]):
            if time.monotonic() > deadline:
                hint = "stop what listens there, or choose another address: `ralbuild release init --listen`"
                raise HostError("is in use by another program", place=self.settings.listen, hint=hint)
            time.sleep(0.05)

    def stop(self) -> None:
        self._signal(self.stop_signal)

    def _arguments(self) -> tuple[str, ...]:
        """Return what starts it as a daemon."""
        return "-c", str(self.folder / self.config_name)

    def _write_unit(self) -> None:
        """Write a unit with which systemd starts it as we do."""
        values = {
            "run": self.folder,
            "pid": self.folder / self.pid_name,
            "tool": self._tool(),
            "arguments": self._arguments(),
            "stop": self.stop_signal.name,
            "reload": self.reload_signal.name.removeprefix("SIG"),
            "drain": self.settings.drain_seconds,
        }
        unit = render_text("release/proxy.service.j2", values)
        write_atomically(self.folder / UNIT_FILE, unit, durable=True)


class HaProxy(_Daemon):
    """HAProxy 2.4 or later: requests follow a map that one command on its socket changes."""

    program = "haproxy"
    pid_name = "haproxy.pid"
    config_name = "haproxy.cfg"
    stop_signal, reload_signal = signal.SIGUSR1, signal.SIGUSR2
    can_hold = True

    def write_files(self) -> None:
        for name, data in haproxy_files(self.folder, self.settings).items():
            if name != "state.map" or not (self.folder / name).exists():
                write_atomically(self.folder / name, data, durable=True)
        self._write_unit()

    def check(self) -> None:
        self._run("-c", "-f", str(self.folder / self.config_name))

    def _arguments(self) -> tuple[str, ...]:
        pid = str(self.folder / self.pid_name)
        return "-W", "-D", "-f", str(self.folder / self.config_name), "-p", pid

    def start(self) -> None:
        if self.running():
            return
        self._check_address()
        self._run(*self._arguments())
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(HostError):
                self._ask("show info")
                return
            time.sleep(0.05)
        raise HostError("haproxy does not answer on its socket", place=str(self.folder))

    def active(self) -> str:
        return self._map()[0]

    def activate(self, colour: str) -> None:
        _, held = self._map()
        self._persist(colour, held)
        self._set("active", f"be_{colour or 'none'}")

    def hold(self, held: bool) -> None:
        colour, _ = self._map()
        self._persist(colour, held)
        self._set("hold", str(int(held)))

    def sessions(self, colour: str) -> int:
        return sum(int(row["scur"] or 0) for row in self._servers(colour))

    def sees(self, colour: str) -> bool:
        return any(row["status"].startswith("UP") for row in self._servers(colour))

    def errors(self, colour: str) -> tuple[int, int]:
        rows = self._servers(colour)
        failed = sum(
            int(row["hrsp_5xx"] or 0) + int(row["econ"] or 0) + int(row["eresp"] or 0) for row in rows
        )
        return failed, sum(int(row["stot"] or 0) for row in rows)

    def _servers(self, colour: str) -> list[dict[str, str]]:
        text = self._ask("show stat").removeprefix("# ")
        rows = csv.DictReader(io.StringIO(text))
        return [row for row in rows if row["pxname"] == f"be_{colour}" and row["svname"] == "s"]

    def _map(self) -> tuple[str, bool]:
        """Return what the map file says: it is written before the proxy is told."""
        try:
            pairs = dict(line.split() for line in (self.folder / "state.map").read_text().splitlines())
        except (OSError, ValueError):
            return "", False
        colour = pairs.get("active", "").removeprefix("be_")
        return (colour if colour in COLOURS else ""), pairs.get("hold") == "1"

    def _persist(self, colour: str, held: bool) -> None:
        write_atomically(self.folder / "state.map", _state_map(colour, held=held), durable=True)

    def _set(self, key: str, value: str) -> None:
        said = self._ask(f"set map {self.folder}/state.map {key} {value}").strip()
        if said:
            raise HostError(f"haproxy refuses to set {key}: {said}", place=str(self.folder))

    def _ask(self, command: str) -> str:
        parts = []
        try:
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(5)
                link.connect(str(self.folder / "ha.sock"))
                link.sendall(command.encode() + b"\n")
                while data := link.recv(65536):
                    parts.append(data)
        except OSError as error:
            hint = "run `ralbuild release proxy start`"
            raise HostError(f"haproxy does not answer: {error}", place=str(self.folder), hint=hint) from None
        return b"".join(parts).decode()


class Nginx(_Daemon):
    """nginx: the active colour is an included file, and a reload makes it count. It cannot hold requests."""

    program = "nginx"
    pid_name = "nginx.pid"
    config_name = "nginx.conf"
    stop_signal, reload_signal = signal.SIGQUIT, signal.SIGHUP
    can_hold = False

    def write_files(self) -> None:
        values = _values(self.folder, self.settings)
        text = render_text("release/nginx.conf.j2", values)
        write_atomically(self.folder / self.config_name, text, durable=True)
        self._write_unit()
        if not (self.folder / "active.conf").exists():
            self._persist("")

    def check(self) -> None:
        self._run("-t", "-q", *self._arguments())

    def start(self) -> None:
        if self.running():
            return
        self._check_address()
        self._run(*self._arguments())
        deadline = time.monotonic() + START_SECONDS
        while not self.running():
            if time.monotonic() > deadline:
                raise HostError("nginx did not start; see nginx.log", place=str(self.folder))
            time.sleep(0.05)

    def active(self) -> str:
        try:
            text = (self.folder / "active.conf").read_text()
        except OSError:
            return ""
        return next((colour for colour in COLOURS if f"be_{colour};" in text), "")

    def activate(self, colour: str) -> None:
        self._persist(colour)
        self._signal(self.reload_signal)

    def hold(self, held: bool) -> None:
        if held:
            raise UsageError("nginx cannot hold requests", place="--mode in-place", hint="use haproxy")

    def sessions(self, colour: str) -> int:  # noqa: ARG002 - nginx does not count by upstream
        return 0

    def sees(self, colour: str) -> bool:  # noqa: ARG002 - it does not check
        return True

    def errors(self, colour: str) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0

    def _persist(self, colour: str) -> None:
        if not colour:
            text = "location / { error_page 418 = @none; return 418; }\n"
        else:
            text = (
                "location / {\n"
                f"    proxy_pass http://be_{colour};\n"
                "    proxy_http_version 1.1;\n"
                '    proxy_set_header Connection "";\n'
                "    proxy_set_header Host $http_host;\n"
                "    proxy_buffering off;\n"
                "    proxy_read_timeout 1h;\n"
                "    proxy_connect_timeout 2s;\n"
                f"    add_header x-ral-colour {colour} always;\n"
                "    error_page 502 504 = @none;\n"
                "}\n"
            )
        write_atomically(self.folder / "active.conf", text.encode(), durable=True)


def _unavailable() -> bytes:
    body = (
        b'{"error":{"message":"no server answers","type":"server_error","param":null,"code":"unavailable"}}'
    )
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
