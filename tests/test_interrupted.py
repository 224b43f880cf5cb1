"""A builder that is killed, a registry or an engine without room: nothing is published, the next run succeeds."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from image_cases import NOWHERE, make_image, write_weights
from registry_cases import NAME, client
from registry_server import ALWAYS, FakeRegistry, Handler, serve, sha256, times

from ralbuild.errors import ImageError
from ralbuild.image.archive import archive_chunks
from ralbuild.image.assemble import Image
from ralbuild.image.outputs import DockerOutput, RegistryOutput
from ralbuild.image.registry.reference import Reference
from ralbuild.image.write import WrittenImage, write_image

FULL_DISK = "write /var/lib/x: no space left on device"


@dataclass
class Child:
    """A process that does one thing and may be killed from any thread of this one."""

    action: Callable[[], object]
    pid: int = 0
    started: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Return 0, 1 after an exception, or minus the signal."""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.action()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        self.started.set()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        self.started.wait(10)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Image, Image]:
    folder = tmp_path_factory.mktemp("images")
    write_weights(folder / "model", (200_000, 50_000))
    return make_image(folder / "model", "old"), make_image(folder / "model", "new")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """More bytes than the sockets on the way hold."""
    return make_image(tmp_path_factory.mktemp("image") / "model")


def push(image: Image, registry: FakeRegistry) -> WrittenImage:
    output = RegistryOutput(Reference(registry.host, NAME, "v1"))
    with client() as run:
        return write_image(image, [output], cache=NOWHERE, registries=run.registries)


def published(registry: FakeRegistry) -> str:
    """Return the digest of what the tag names, after looking that every blob of it is there."""
    if (NAME, "v1") not in registry.manifests:
        return ""
    data = registry.manifests[NAME, "v1"][0]
    manifest = json.loads(data)
    for item in (manifest["config"], *manifest["layers"]):
        assert sha256(registry.blobs[item["digest"]]) == item["digest"]
        assert (NAME, item["digest"]) in registry.linked
    return sha256(data)


@pytest.mark.parametrize(
    ("before", "share", "first"),
    [("nothing", 0.0, 1), ("an image", 0.5, 2), ("nothing", 0.5, 3), ("an image", 0.0, 4)],
)
def test_a_push_killed_at_any_request_publishes_nothing_and_the_next_one_succeeds(
    images: tuple[Image, Image], before: str, share: float, first: int
) -> None:
    """The n-th request is the last thing that the client does: before its body was read, or half of it.

    The cases share the requests: each of them takes every fourth.
    """
    old, new = images
    outcomes = set()
    for number in itertools.count(first, 4):
        with serve() as registry:
            if before == "an image":
                push(old, registry)
            child = Child(lambda registry=registry: push(new, registry))
            left = [number]

            def fault(handler: Handler, child: Child = child, left: list[int] = left) -> bool:
                left[0] -= 1
                if left[0] == 0:
                    handler.rfile.read(int(int(handler.headers.get("Content-Length") or 0) * share))
                    child.kill()
                    handler.close_connection = True
                return left[0] <= 0

            registry.faults.append(fault)
            status = child.run()
            registry.faults.clear()
            assert status in (0, -signal.SIGKILL)
            found = published(registry)
            if status:
                assert found == (old.digest if before == "an image" else "")
            outcomes.add(found)
            assert push(new, registry).manifest_digest == new.digest
            assert published(registry) == new.digest
        if status == 0:
            break
    assert number > 4
    assert outcomes == {old.digest if before == "an image" else "", new.digest}


@pytest.mark.parametrize(("method", "path"), [("POST", "uploads"), ("PUT", "uploads"), ("PUT", "manifests")])
def test_a_registry_without_room_gets_no_image_and_the_next_push_succeeds(
    images: tuple[Image, Image], method: str, path: str
) -> None:
    old, new = images
    with serve() as registry:
        push(old, registry)

        def refuse(handler: Handler) -> None:
            handler.body()
            handler.refuse(507, "UNKNOWN: no space left on device")

        registry.faults.append(times(ALWAYS, method, path, refuse))
        with pytest.raises(ImageError, match="no space left on device"):
            push(new, registry)
        registry.faults.clear()
        assert published(registry) == old.digest
        push(new, registry)
        assert published(registry) == new.digest


@dataclass
class FakeEngine:
    """As much of a docker engine as `docker load` needs; an image exists once its whole archive came."""

    loads: list[bytes] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    full: bool = False
    after: int = 0
    then: Callable[[], None] = lambda: None


class EngineHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: FakeEngine

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        path = re.sub(r"^/v1\.\d+", "", self.path)
        if path == "/version":
            self.answer(200, {"ApiVersion": "1.41", "MinAPIVersion": "1.12"})
        elif path == "/_ping":
            self.answer(200, "OK")
        elif match := re.fullmatch(r"/images/(.+)/json", path):
            name = self.engine.images.get(match[1].replace("%3A", ":"))
            if name is None:
                self.answer(404, {"message": f"No such image: {match[1]}"})
            else:
                self.answer(200, {"Id": name, "Config": {"Labels": {}}})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        data, complete = self.chunks()
        if not complete:
            self.close_connection = True
        elif self.engine.full:
            self.answer(200, {"errorDetail": {"message": FULL_DISK}, "error": FULL_DISK})
        else:
            self.engine.loads.append(data)
            match = re.search(rb'"Config":"blobs/sha256/([0-9a-f]{64})"', data)
            assert match is not None
            name = f"sha256:{match[1].decode()}"
            self.engine.images[name] = name
            self.answer(200, {"stream": f"Loaded image ID: {name}\n"})

    def chunks(self) -> tuple[bytes, bool]:
        out = bytearray()
        while size := int(self.rfile.readline().strip() or b"-1", 16):
            if size < 0:
                return bytes(out), False
            data = self.rfile.read(size)
            self.rfile.readline()
            out += data
            if self.engine.after and len(out) >= self.engine.after:
                self.engine.then()
        self.rfile.readline()
        return bytes(out), True


class UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "engine", 0

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        return self.socket.accept()[0], ("client", 0)


@contextmanager
def run_engine(folder: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine()
    server = UnixServer(str(folder / "e.sock"), type("Bound", (EngineHandler,), {"engine": engine}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/e.sock")
    with run_engine(tmp_path) as found:
        yield found


def load(image: Image) -> WrittenImage:
    return write_image(image, [DockerOutput()], cache=NOWHERE)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
def test_a_load_killed_on_its_way_leaves_no_image_and_the_next_one_succeeds(
    image: Image, engine: FakeEngine, share: float
) -> None:
    data = b"".join(archive_chunks(image, ""))
    child = Child(lambda: load(image))
    engine.after, engine.then = max(1, int(len(data) * share)), child.kill
    assert child.run() == -signal.SIGKILL
    assert engine.images == {}
    engine.after = 0
    load(image)
    assert engine.loads == [data]
    assert list(engine.images) == [image.config_digest]


def test_an_engine_without_room_is_named_and_the_next_load_succeeds(image: Image, engine: FakeEngine) -> None:
    engine.full = True
    with pytest.raises(ImageError, match="no space left on device") as caught:
        load(image)
    assert caught.value.problems[0].place == "--output docker"
    assert engine.images == {}
    engine.full = False
    load(image)
    assert list(engine.images) == [image.config_digest]
