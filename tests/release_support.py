"""What release tests share: a host that runs stand-in servers as processes, a load of four kinds of client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from ralbuild.engine import Box, Launch
from ralbuild.release.journal import Journal
from ralbuild.release.machine import Release
from ralbuild.release.planning import Wishes, plan_up
from ralbuild.release.proxy import proxy_of
from ralbuild.release.site import FORMAT, Settings, Site
from ralbuild.release.source import Found
from ralbuild.report import make_report

SERVER = Path(__file__).with_name("release_server.py")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class ProcessHost:
    """`ContainerHost` with processes for containers; its state is files, so that it survives the tool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def add_image(self, name: str, **env: str) -> Found:
        image = f"sha256:{name * 8}"
        labels = {
            "io.ralbuild.bundle": f"sha256:{name}",
            "io.ralbuild.target": "cpu",
            "io.ralbuild.model": "tiny",
            "io.ralbuild.weights.memory": "1000",
            "io.ralbuild.weights.bytes": "1000",
        }
        env = {"BUNDLE": labels["io.ralbuild.bundle"], **env}
        (self.folder / f"{image}.image").write_text(json.dumps({"labels": labels, "env": env}))
        return Found(image, labels)

    def find(self, image: str) -> dict[str, str] | None:
        path = self.folder / f"{image}.image"
        return json.loads(path.read_text())["labels"] if path.exists() else None

    def identify(self, image: str) -> str:
        return image if self.find(image) is not None else ""

    def load(self, chunks: Iterator[bytes]) -> str:
        raise NotImplementedError

    pull = load

    def labelled(self, label: str, value: str) -> list[Box]:
        boxes = [(path.stem, json.loads(path.read_text())) for path in sorted(self.folder.glob("*.box"))]
        return [Box(name, box["image"]) for name, box in boxes if box["labels"].get(label) == value]

    def discard(self, image: str) -> bool:
        (self.folder / f"{image}.image").unlink(missing_ok=True)
        return True

    def start(self, launch: Launch) -> None:
        self.remove(launch.name)
        env = json.loads((self.folder / f"{launch.image}.image").read_text())["env"]
        env |= {"RAL_HOST": "127.0.0.1", "RAL_PORT": str(launch.port)}
        self._spawn(launch.name, {"env": env, "image": launch.image, "labels": launch.labels})

    def start_again(self, name: str) -> None:
        self._spawn(name, json.loads((self.folder / f"{name}.box").read_text()))

    def _spawn(self, name: str, box: dict[str, Any]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-S", str(SERVER)],
                env={**os.environ, **box["env"]},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.folder / f"{name}.box").write_text(json.dumps({**box, "pid": process.pid}))

    def _pid(self, name: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            pid = json.loads((self.folder / f"{name}.box").read_text())["pid"]
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            stat = Path(f"/proc/{pid}/stat").read_text()
            return 0 if stat.rsplit(")", 1)[1].split()[0] == "Z" else pid
        return 0

    def status(self, name: str) -> tuple[str, int]:
        if not (self.folder / f"{name}.box").exists():
            return "missing", 0
        return ("running", 0) if self._pid(name) else ("exited", 81)

    def logs(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def keep(self, name: str) -> None: ...

    def stop(self, name: str, seconds: int) -> None:
        self._end(name, signal.SIGTERM, seconds)

    def remove(self, name: str) -> None:
        self._end(name, signal.SIGKILL, 5)
        (self.folder / f"{name}.box").unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        self._end(name, signal.SIGKILL, 5)

    def _end(self, name: str, number: int, seconds: float) -> None:
        if pid := self._pid(name):
            os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while self._pid(name) and time.monotonic() < deadline:
                time.sleep(0.02)

    def running(self) -> list[str]:
        return sorted(box.stem for box in self.folder.glob("*.box") if self._pid(box.stem))

    def stop_all(self) -> None:
        for box in self.folder.glob("*.box"):
            self.remove(box.stem)


@dataclass
class World:
    """A site with its proxy and host."""

    site: Site
    host: ProcessHost

    @property
    def proxy(self) -> Any:
        return proxy_of(self.site)

    @property
    def port(self) -> int:
        return int(self.site.settings.listen.rpartition(":")[2])

    def begin(self, found: Found, **wishes: Any) -> Release:
        plan = plan_up(self.site, self.host, self.proxy, "oci:x", found, Wishes(**wishes))
        return self.release(Journal.begin(self.site.folder, plan))

    def release(self, journal: Journal) -> Release:
        return Release(self.site, journal, self.host, self.proxy, make_report("plain", quiet=True))

    def up(self, found: Found, **wishes: Any) -> None:
        self.begin(found, **wishes).run()

    def interrupted(self) -> Release:
        journal = Journal.read(self.site.folder)
        assert journal is not None
        return self.release(journal)


@contextlib.contextmanager
def world(folder: Path, proxy: str = "haproxy", **changes: Any) -> Iterator[World]:
    listen, blue, green = free_ports(3)
    values = {
        "drain_seconds": 10,
        "park_seconds": 20,
        "watch_seconds": 1,
        "on_crash": "old",
        "connections": 500,
        "runtime_rules": False,
    }
    values |= changes
    settings = Settings(
        format=FORMAT, proxy=proxy, listen=f"127.0.0.1:{listen}", blue=blue, green=green, **values
    )
    site = Site.create(folder / "site", settings)
    host = ProcessHost(folder / "host")
    door = proxy_of(site)
    door.write_files()
    door.check()
    door.start()
    try:
        yield World(site, host)
    finally:
        if pid := door.pid():
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for number in (*children, pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
        host.stop_all()


@dataclass
class Load:
    """Clients of four kinds that ask until they are told to stop; what failed, and who answered when."""

    port: int
    failures: list[str] = field(default_factory=list)
    answers: list[tuple[float, float, str]] = field(default_factory=list)
    """Start, end and colour of each answer."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Load:
        kinds = [self._long_stream, self._short_stream, self._keep_alive, self._fresh, self._openai]
        self._threads = [
            threading.Thread(target=self._loop, args=(kind,)) for kind in kinds for _ in range(2)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def wait_for(self, count: int) -> None:
        """Wait until so many requests were answered."""
        deadline = time.monotonic() + 120
        while len(self.answers) < count:
            assert time.monotonic() < deadline, len(self.answers)
            time.sleep(0.05)

    def _loop(self, kind: Any) -> None:
        local: dict[str, Any] = {}
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                colour = kind(local)
            except Exception as error:
                with self._lock:
                    self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                local.clear()
                continue
            with self._lock:
                self.answers.append((began, time.monotonic(), colour))
            time.sleep(0.1)  # a bounded load: clients that never rest would starve the release itself

    def _ask(self, connection: http.client.HTTPConnection, words: int, stream: bool) -> str:
        content = " ".join(["word"] * words)
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "stream": stream}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, f"{response.status} {data[:200]!r}"
        assert not stream or data.endswith(b"data: [DONE]\n\n"), f"cut: {data[-80:]!r}"
        return response.getheader("x-ral-colour") or ""

    def _connection(self, local: dict[str, Any]) -> http.client.HTTPConnection:
        if "connection" not in local:
            local["connection"] = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        return local["connection"]

    def _long_stream(self, local: dict[str, Any]) -> str:
        return self._ask(self._connection(local), 100, True)

    def _short_stream(self, local: dict[str, Any]) -> str:
        return self._ask(self._connection(local), 5, True)

    def _keep_alive(self, local: dict[str, Any]) -> str:
        return self._ask(self._connection(local), 5, False)

    def _fresh(self, _: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            return self._ask(connection, 5, False)
        finally:
            connection.close()

    def _openai(self, local: dict[str, Any]) -> str:
        if "client" not in local:
            local["client"] = openai.OpenAI(
                base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60
            )
        messages = [{"role": "user", "content": "one two three"}]
        raw = local["client"].chat.completions.with_raw_response.create(
            model="tiny", messages=messages, stream=True
        )
        finish = [chunk.choices[0].finish_reason for chunk in raw.parse()]
        assert finish[-1] == "stop"
        return raw.headers["x-ral-colour"]
