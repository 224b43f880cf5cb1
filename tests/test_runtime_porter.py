"""The first moments: `/health` is answered while the server is still being imported, and nothing is lost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from ralbuild.runtime.listening import bind
from ralbuild.runtime.porter import Porter


def read(client: socket.socket) -> bytes:
    out = b""
    while data := client.recv(1 << 16):
        out += data
    return out


@pytest.mark.parametrize("path", ["/health", "/v2/health/live"])
def test_a_probe_is_answered_and_every_other_connection_is_handed_over_unread(path: str) -> None:
    listener = bind({"RAL_HOST": "127.0.0.1", "RAL_PORT": "0"})
    address = listener.getsockname()
    porter = Porter(listener)
    silent, asking, cut = (socket.create_connection(address) for _ in range(3))
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n\r\n"
    asking.sendall(request)
    cut.sendall(b"GET /hea")
    with socket.create_connection(address) as probe:
        probe.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        head, _, body = read(probe).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body) == {"status": "ok"}
    assert f"content-length: {len(body)}".encode() in head
    held = {client.getpeername(): client for client in porter.leave()}
    assert set(held) == {client.getsockname() for client in (silent, asking, cut)}
    assert held[asking.getsockname()].recv(1000) == request
    assert held[cut.getsockname()].recv(1000) == b"GET /hea"
    for client in (*held.values(), silent, asking, cut, listener):
        client.close()


def test_a_client_that_goes_at_once_harms_nobody() -> None:
    listener = bind({"RAL_HOST": "127.0.0.1", "RAL_PORT": "0"})
    porter = Porter(listener)
    for _ in range(20):
        socket.create_connection(listener.getsockname()).close()
    with socket.create_connection(listener.getsockname()) as probe:
        probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read(probe).startswith(b"HTTP/1.1 200 ")
    for client in porter.leave():
        client.close()
    listener.close()


def test_imports_let_a_probe_in_between_and_the_server_gets_the_usual_turns_back() -> None:
    usual, listener = sys.getswitchinterval(), bind({"RAL_HOST": "127.0.0.1", "RAL_PORT": "0"})
    porter = Porter(listener)
    assert sys.getswitchinterval() < usual / 10  # a probe takes five turns
    porter.leave()
    assert sys.getswitchinterval() == usual
    listener.close()


def test_nothing_heavy_is_imported_before_the_port_is_open() -> None:
    code = "import sys, ralbuild.runtime.__main__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"asyncio", "dataclasses", "inspect", "json", "pathlib", "subprocess", "uvicorn", "starlette"}
    # `typing` brings `re`: together a tenth of what is imported before the port is open.
    heavy |= {"typing", "re"}
    assert not heavy & set(done.stdout.split())
