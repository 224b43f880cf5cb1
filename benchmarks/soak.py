"""Hours of bad weather in minutes: `python -m benchmarks.soak --minutes 3 [--url URL --pid PID]`.

Mixed load against a running server: streams and whole answers, hang-ups by FIN and by RST at random moments
(also while queued), bodies that are too large, broken or cut, readers that are slow. At the end nothing may
be left: no request in a slot, no 500, no growing memory, and a plain request gets its usual answer.
Without --url a tiny random model is made and served.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import re
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CLIENTS = 16
_WORDS = ["The", "risk", "of", "a", "market", "is", "not", "the", "return", "of", "a", "market"]


@dataclass
class Tally:
    """What the clients saw; ``failures`` must stay empty."""

    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Client:
    """One client thread with its own random numbers."""

    def __init__(self, address: tuple[str, int], model: str, seed: int, tally: Tally) -> None:
        self._address = address
        self._model = model
        self._random = random.Random(seed)
        self._tally = tally

    def run(self, end: float) -> None:
        """Do one thing after the other until ``end`` (monotonic seconds)."""
        acts: list[Callable[[], str]] = [
            self.whole,
            self.stream,
            self.stream,
            self.hang_up,
            self.hang_up,
            self.slow_reader,
            self.oversize,
            self.malformed,
        ]
        while time.monotonic() < end:
            act = self._random.choice(acts)
            try:
                self._tally.answers[f"{act.__name__}: {act()}"] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._tally.failures.append(f"{act.__name__}: {type(error).__name__}: {error}")

    def whole(self) -> str:
        """An answer at once."""
        answer = self._post(self._body(stream=False))
        data = answer.read()
        if answer.status == 200:
            assert json.loads(data)["choices"]
        return self._status(answer)

    def stream(self) -> str:
        """A stream to its end."""
        answer = self._post(self._body(stream=True))
        data = answer.read()
        if answer.status == 200 and not data.endswith(b"data: [DONE]\n\n"):
            self._tally.failures.append(f"stream without its end: {data[-200:]!r}")
        return self._status(answer)

    def slow_reader(self) -> str:
        """A stream in small bites."""
        answer = self._post(self._body(stream=True))
        while answer.read(200):
            time.sleep(0.02)
        return self._status(answer)

    def hang_up(self) -> str:
        """Go away at a random moment, with FIN or with RST; often while still queued."""
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        connection.request("POST", "/v1/chat/completions", self._body(stream=self._random.random() < 0.5))
        assert connection.sock is not None
        time.sleep(self._random.random() ** 3)
        reset = self._random.random() < 0.5
        if reset:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sock.close()
        return "RST" if reset else "FIN"

    def oversize(self) -> str:
        """A body above the limit, announced or sent."""
        answer = self._post(b"x" * (5 << 20)) if self._random.random() < 0.2 else self._announce(5 << 20)
        return self._status(answer)

    def malformed(self) -> str:
        """What is no request."""
        broken: list[bytes] = [b"{", b"[]", b"\xff", b"{}", self._body(stream=False)[:-5]]
        broken += [json.dumps({"model": self._model, "messages": [{"role": r}]}).encode() for r in ("x", "")]
        return self._status(self._post(self._random.choice(broken)))

    def _announce(self, size: int) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("content-length", str(size))
        connection.endheaders()
        return connection.getresponse()

    def _post(self, body: bytes) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
            connection.request("POST", "/v1/chat/completions", body)
        return connection.getresponse()

    def _status(self, answer: http.client.HTTPResponse) -> str:
        if answer.status == 500:
            self._tally.failures.append("status 500")
        return str(answer.status)

    def _body(self, *, stream: bool) -> bytes:
        text = " ".join(self._random.choices(_WORDS, k=self._random.randint(1, 40)))
        fields: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": text}]}
        fields |= {
            "max_tokens": self._random.randint(1, 80),
            "stream": stream,
            "n": self._random.choice((1, 1, 2)),
        }
        return json.dumps(fields | {"stop": self._random.choice((None, "e", ["market", "xyz"]))}).encode()


def tree(process: int) -> list[int]:
    """Return a process and everything below it."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(item for child in children for item in tree(int(child)))]


def measure(process: int) -> dict[str, float]:
    """Return resident MiB by module of a process tree, their sum, and open descriptors."""
    found: dict[str, float] = {"mib": 0.0, "files": 0}
    for item in tree(process):
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            words = Path(f"/proc/{item}/cmdline").read_bytes().split(b"\0")
            name = next(word.decode() for word in words if word.startswith(b"ralbuild."))
            kib = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{item}/status").read_text())[0])
            found[name] = round(found.get(name, 0.0) + kib / 1024, 1)
            found["mib"] = round(found["mib"] + kib / 1024, 1)
            found["files"] += sum(1 for _ in Path(f"/proc/{item}/fd").iterdir())
    return found


def gauges(address: tuple[str, int]) -> dict[str, float]:
    """Return the sums that must be 0 when nothing runs."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    names = (
        "requests_running",
        "requests_waiting",
        "requests_preparing",
        "kv_cache_bytes",
        "step_failures_total",
    )
    return {name: float(re.findall(rf"^ralbuild_{name} (\S+)$", text, re.M)[0]) for name in names}


@contextlib.contextmanager
def tiny_server() -> Iterator[tuple[str, int]]:
    """Serve a tiny random model; yield its address and process id."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from runtime_fixtures import make_image, make_model, running, store_as  # type: ignore[import-not-found]
    from torch import bfloat16

    from ralbuild.contract.bundle import Engine

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        # Published weights are of two bytes; those of four keep other code of the libraries busy.
        store_as(model, bfloat16)
        image = make_image(Path(folder) / "root", model, engine=Engine(4, 512, "float32"))
        with running(image, {"RAL_THREADS": "1", "RAL_QUEUE": "6"}) as runtime:
            yield runtime.url, runtime.process.pid


def soak(url: str, process: int, minutes: float, model: str) -> dict[str, Any]:
    """Run the load and return the report; ``failures`` is empty when all is well."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    tally = Tally()
    begin = time.monotonic()
    end = begin + minutes * 60
    clients = [Client(address, model, seed, tally) for seed in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, args=(end,)) for client in clients]
    for thread in threads:
        thread.start()
    points = []
    while time.monotonic() < end:
        time.sleep(min(10.0, max(end - time.monotonic(), 0.1)))
        points.append({"seconds": round(time.monotonic() - begin), **measure(process)})
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 30
    left = gauges(address)
    while any(left.values()) and time.monotonic() < deadline:
        time.sleep(0.2)
        left = gauges(address)
    if any(left.values()):
        tally.failures.append(f"left over: {left}")
    half = points[len(points) // 2 :]
    growth = (half[-1]["mib"] - half[0]["mib"]) / max(half[-1]["seconds"] - half[0]["seconds"], 1) * 60
    return {
        "answers": dict(sorted(tally.answers.items())),
        "failures": tally.failures,
        "memory": points,
        "growth_mib_per_minute": round(growth, 2),
        "left": left,
    }


def main() -> int:
    """Print the report as JSON; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--url", help="a running server; needs --pid for its memory")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--model", default="tiny")
    chosen = parser.parse_args()
    if bool(chosen.url) != bool(chosen.pid):
        parser.error("--url and --pid go together")
    given = contextlib.nullcontext((chosen.url, chosen.pid)) if chosen.url else tiny_server()
    with given as (url, process):
        report = soak(url, process, chosen.minutes, chosen.model)
    print(json.dumps(report, indent=1))
    return bool(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
