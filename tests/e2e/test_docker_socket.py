"""An image as locked down as docker can: no network, no writable file, no capability, any user, one socket file."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from test_main_job import MODEL, TAG, build

pytestmark = [pytest.mark.real_model, pytest.mark.docker]
READY_SECONDS = 300


@pytest.fixture
def running(tmp_path: Path) -> Iterator[docker.models.containers.Container]:
    """The image in a container whose only door is `tmp_path / "ral" / "ral.sock"`."""
    build(tmp_path, "--output", "docker", "--tag", TAG)
    (tmp_path / "ral").mkdir()
    (tmp_path / "ral").chmod(0o777)
    (tmp_path / "admin").write_text("secret\n")
    engine = docker.from_env()
    container = engine.containers.run(
        TAG,
        detach=True,
        read_only=True,
        network_mode="none",
        user="12345",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        volumes={
            str(tmp_path / "ral"): {"bind": "/run/ral", "mode": "rw"},
            str(tmp_path / "admin"): {"bind": "/run/admin", "mode": "ro"},
        },
        environment={"RAL_HOST": "unix:/run/ral/ral.sock", "RAL_ADMIN_TOKEN_FILE": "/run/admin"},
    )
    try:
        yield container
    finally:
        container.remove(force=True)
        engine.images.remove(TAG, force=True)
        engine.close()


def ask(path: Path, method: str, target: str, body: object = None) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("ral", timeout=READY_SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(READY_SECONDS)
    connection.sock.connect(str(path))
    connection.request(method, target, json.dumps(body), {"authorization": "Bearer secret"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_a_container_with_nothing_but_a_socket_file_serves_unloads_wakes_and_ends(
    running: docker.models.containers.Container, tmp_path: Path
) -> None:
    path = tmp_path / "ral" / "ral.sock"
    deadline = time.monotonic() + READY_SECONDS
    while not path.exists() or ask(path, "GET", "/ready")[0] != 200:
        running.reload()
        assert running.status in ("created", "running"), running.logs().decode()
        assert time.monotonic() < deadline, running.logs().decode()
        time.sleep(0.1)
    question = {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": "What does an audit check?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    status, first = ask(path, "POST", "/v1/chat/completions", question)
    assert status == 200
    status, unloaded = ask(path, "POST", "/ral/unload")
    assert (status, unloaded["stage"]) == (200, "unloaded")
    assert int(str(unloaded["released_bytes"])) > os.stat(MODEL / "model.safetensors").st_size
    assert ask(path, "POST", "/v1/chat/completions", question)[1]["choices"] == first["choices"]
    running.kill(signal.SIGTERM)
    assert running.wait(timeout=60)["StatusCode"] == 0, running.logs().decode()
    assert not path.exists()
