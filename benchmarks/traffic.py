"""Clients of four kinds that ask a server without pause while something is done to it.

The real openai client with long streams, with short streams, and without streaming on a connection that
is kept; and plain HTTP on a new connection for every request. No client tries again.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openai

LONG, SHORT = 24, 3
"""Tokens of an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got, and when."""

    kind: str
    began: float
    ended: float
    text: str

    @property
    def is_long(self) -> bool:
        """True when the text has all tokens of a long answer."""
        return self.kind in ("long stream", "new connection")


class Traffic:
    """A context in which the clients ask; afterwards `answers` and `failures` say what became of it.

    Args:
        port: of the server, on this machine.
        model: its name.
        question: what every request asks, greedily.
        each: clients of every kind.
        pause: seconds that a client rests after an answer.
    """

    def __init__(self, port: int, model: str, question: str, *, each: int = 1, pause: float = 0.3) -> None:
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self._port, self._model, self._question, self._pause = port, model, question, pause
        self._stop = threading.Event()
        kinds: dict[str, Callable[[openai.OpenAI], str]] = {
            "long stream": lambda client: self._stream(client, LONG),
            "short stream": lambda client: self._stream(client, SHORT),
            "kept connection": self._kept,
            "new connection": self._fresh,
        }
        self._threads = [
            threading.Thread(target=self._run, args=item) for item in kinds.items() for _ in range(each)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    @property
    def longest(self) -> float:
        """Seconds that the slowest request took."""
        return max(answer.ended - answer.began for answer in self.answers)

    def wait_after(self, moment: float, seconds: float = 60) -> None:
        """Wait until a request that began after ``moment`` was answered.

        Raises:
            TimeoutError: when none was within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not any(answer.began > moment for answer in self.answers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:.0f} s; failures: {self.failures[-3:]}")
            time.sleep(0.1)

    def wait_for(self, count: int) -> None:
        """Wait until so many requests were answered, or one failed."""
        while len(self.answers) < count and not self.failures:
            time.sleep(0.1)

    def ask(self) -> str:
        """Return one long answer."""
        return self._kept(self._client(), LONG)

    def _client(self) -> openai.OpenAI:
        url = f"http://127.0.0.1:{self._port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)

    def _run(self, kind: str, request: Callable[[openai.OpenAI], str]) -> None:
        client = self._client()
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                text = request(client)
            except Exception as error:  # whatever a client can raise is a failed request
                self.failures.append(f"{kind}: {type(error).__name__}: {error}")
            else:
                self.answers.append(Answer(kind, began, time.monotonic(), text))
            time.sleep(self._pause)

    def _body(self, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._question}]
        return {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": tokens}

    def _stream(self, client: openai.OpenAI, tokens: int) -> str:
        chunks = list(client.chat.completions.create(**self._body(tokens), stream=True))
        # The client hides [DONE]; a stream that was cut has no reason to have finished.
        if not chunks or chunks[-1].choices[0].finish_reason not in ("stop", "length"):
            raise ValueError(f"a stream was cut after {len(chunks)} events")
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def _kept(self, client: openai.OpenAI, tokens: int = SHORT) -> str:
        answer = client.chat.completions.create(**self._body(tokens), stream=False)
        return str(answer.choices[0].message.content)

    def _fresh(self, _: openai.OpenAI) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            data = json.dumps(self._body(LONG))
            connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise ValueError(f"{response.status} {body[:200]!r}")
            return str(json.loads(body)["choices"][0]["message"]["content"])
        finally:
            connection.close()
