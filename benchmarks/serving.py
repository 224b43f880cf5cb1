"""Servers as child processes, and clients that time their streams. Nothing here knows whose server it is."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

QUESTIONS = (
    "Explain how a bank decides about a loan, step by step.",
    "Write a long story about a ship that crosses the ocean in winter.",
    "List the risks of a compliance audit and explain each of them.",
    "Describe the history of the city of Paris in detail.",
    "How does a computer add two numbers? Explain it to a child.",
    "Explain what gravity is and how it was discovered.",
    "Write a guide for people who want to plant a garden.",
    "What should a company know before it enters a new market?",
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: seconds to its first text and to its end, and its tokens."""

    first: float
    total: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """Answers that were asked for at the same time."""

    answers: tuple[Answer, ...]
    wall: float
    cpu: float

    @property
    def speed(self) -> float:
        """Tokens a second, all clients together."""
        return sum(answer.tokens for answer in self.answers) / self.wall

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of processor time a token."""
        return 1000 * self.cpu / sum(answer.tokens for answer in self.answers)

    @property
    def first(self) -> float:
        """Mean seconds to the first text."""
        return sum(answer.first for answer in self.answers) / len(self.answers)


class Server:
    """A server on a free port of the loopback interface; ``{port}`` in its arguments is that port."""

    def __init__(
        self, command: Sequence[str], model: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.model = model
        self.port = _free_port()
        words = [word.replace("{port}", str(self.port)) for word in command]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAL_")}
        changed = {key: value.replace("{port}", str(self.port)) for key, value in (env or {}).items()}
        self._log = log.open("w")
        self._path = log
        self.began = time.perf_counter()
        self._process = subprocess.Popen(words, env=clean | changed, stdout=self._log, stderr=self._log)

    def wait_answer(self, tokens: int) -> float:
        """Ask until an answer comes; return the seconds from the process's start to its first text."""
        while self._process.poll() is None:
            begin = time.perf_counter()
            try:
                return begin - self.began + self.ask(QUESTIONS[0], tokens).first
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
        raise self._ended()

    def wait_health(self) -> float:
        """Ask for /health until it answers with 200; return the seconds from the process's start."""
        while self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return time.perf_counter() - self.began
            except OSError:
                time.sleep(0.001)
            finally:
                connection.close()
        raise self._ended()

    def ask(self, question: str, tokens: int) -> Answer:
        """Stream one greedy answer.

        Raises:
            OSError, HTTPException: when the server is not there or does not answer with 200.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"status {response.status}: {response.read()[:200]!r}")
            return _read_stream(response, begin)
        finally:
            connection.close()

    def ask_together(self, clients: int, tokens: int) -> Round:
        """Ask ``clients`` different questions at once."""
        cpu, begin = self.cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = tuple(pool.map(lambda question: self.ask(question, tokens), QUESTIONS[:clients]))
        return Round(answers, time.perf_counter() - begin, self.cpu_seconds() - cpu)

    def cpu_seconds(self) -> float:
        """Return the processor time of the process and its children until now."""
        total = 0
        for pid in _family(self._process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def peak_mb(self) -> float:
        """Return the largest resident memory that the process and its children have had."""
        kilobytes = 0
        for pid in _family(self._process.pid):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            kilobytes += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)
        return kilobytes / 1024

    def _ended(self) -> SystemExit:
        return SystemExit(f"the server ended:\n{self._path.read_text()[-2000:]}")

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _read_stream(lines: Iterable[bytes], begin: float) -> Answer:
    first = 0.0
    pieces = tokens = 0
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise http.client.HTTPException(str(event["error"]))
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        choices = event.get("choices") or [{}]
        if choices[0].get("delta", {}).get("content"):
            first = first or time.perf_counter() - begin
            pieces += 1
    if not first:
        raise http.client.HTTPException("the answer is empty")
    return Answer(first, time.perf_counter() - begin, tokens or pieces)


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    out = [pid]
    for parent in out:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:  # it has ended
            continue
        out.extend(int(child) for child in children)
    return [item for item in out if Path(f"/proc/{item}/stat").exists()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
