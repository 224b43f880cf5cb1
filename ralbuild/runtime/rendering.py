"""The model's chat template, rendered by a process of its own that can be ended at any time.

A template is a program that came with the model. In this process it could take all memory or hold
the interpreter for minutes, whatever its loops are limited to; a child has limits that the kernel keeps.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.runtime.errors import ApiError, ModelMismatchError
from ralbuild.runtime.log import log_event

RENDER_SECONDS = 5.0
"""Longest that one rendering may take; usual templates need a millisecond."""
START_SECONDS = 60.0
"""Longest that the child may take to start and to compile the template."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HEAD = 8
"""Bytes of a frame's length."""


class Renderer(Protocol):
    """What turns messages into a prompt's text."""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt's text, or raise ApiError."""


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text and the special tokens that it may name."""

    text: str
    tokens: Mapping[str, str]


class TemplateProcess:
    """Renders in up to ``count`` children, each used by one thread at a time."""

    def __init__(self, source: TemplateSource, count: int, *, seconds: float = RENDER_SECONDS) -> None:
        """Start the first child.

        Raises:
            ModelMismatchError: when the text is not a template.
        """
        self._source = source
        self._seconds = seconds
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(count - 1):
            self._idle.put(None)
        self._idle.put(self._start())

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt text for ``messages``, ending where the answer begins.

        Raises:
            ApiError: 400 when the template refuses the conversation, 500 ``template_limit`` when it takes
                more time, memory or output than a rendering may.
        """
        child = self._idle.get()
        try:
            child = child or self._start()
            reply = child.ask([dict(message) for message in messages], self._seconds)
        except BaseException as error:
            if child is not None:
                child.kill()
            child = None
            if isinstance(error, _LostError):
                log_event("template ended", reason=error)
                raise ApiError(500, "template_limit", f"the model's chat template {error}") from None
            raise
        finally:
            self._idle.put(child)
        if "text" in reply:
            return str(reply["text"])
        if "limit" in reply:
            raise ApiError(500, "template_limit", f"the model's chat template {reply['limit']}")
        message = f"the model's chat template refuses these messages: {reply['error']}"
        raise ApiError(400, "chat_template_error", message, param="messages")

    def close(self) -> None:
        """End the children that wait."""
        while not self._idle.empty():
            child = self._idle.get_nowait()
            if child is not None:
                child.kill()

    def _start(self) -> _Child:
        child = _Child()
        try:
            reply = child.ask({"text": self._source.text, "tokens": dict(self._source.tokens)}, START_SECONDS)
        except _LostError as error:
            child.kill()
            raise ModelMismatchError(f"cannot be compiled: it {error}", place="chat template") from None
        if reply:
            child.kill()
            raise ModelMismatchError(f"is not a chat template: {reply['error']}", place="chat template")
        return child


class _LostError(Exception):
    """The child gave no answer; the text is a predicate for `the template`."""


class _Child:
    """One ``python -m ralbuild.runtime.chat``: a frame in, a frame out."""

    def __init__(self) -> None:
        # A group of its own: Ctrl-C in a terminal must not end it before the requests that need it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ralbuild.runtime.chat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    def ask(self, value: Any, seconds: float) -> dict[str, Any]:
        """Send a value and return the answer, or raise `_LostError`."""
        deadline = time.monotonic() + seconds
        data = json.dumps(value).encode()
        pending = memoryview(len(data).to_bytes(_HEAD, "big") + data)
        try:
            while pending:
                self._wait(self._in, select.POLLOUT, deadline)
                pending = pending[os.write(self._in, pending[: 1 << 16]) :]
            size = int.from_bytes(self._read(_HEAD, deadline), "big")
            answer: dict[str, Any] = json.loads(self._read(size, deadline))
        except OSError:
            raise _LostError("ended its process") from None
        return answer

    def kill(self) -> None:
        """End the process and forget it."""
        self._process.kill()
        self._process.communicate()

    def _read(self, size: int, deadline: float) -> bytes:
        out = bytearray()
        while len(out) < size:
            self._wait(self._out, select.POLLIN, deadline)
            chunk = os.read(self._out, min(size - len(out), 1 << 16))
            if not chunk:
                raise _LostError("ended its process, perhaps for lack of memory")
            out += chunk
        return bytes(out)

    def _wait(self, file: int, event: int, deadline: float) -> None:
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(file, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise _LostError("takes too long")


def find_template(files: Mapping[str, bytes]) -> TemplateSource | None:
    """Return the model's chat template, or None: ``chat_template.jinja`` beats the tokenizer's config.

    Raises:
        ModelMismatchError: when a file is not what its name says.
    """
    config = _table(files, "tokenizer_config.json")
    extra = _table(files, "special_tokens_map.json")
    source = _from_config(config)
    if "chat_template.jinja" in files:
        try:
            source = files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            message = f"is not UTF-8: byte {error.start}"
            raise ModelMismatchError(message, place="chat_template.jinja") from None
    if source is None:
        return None
    tokens = {name: _content(config.get(name, extra.get(name))) for name in _TOKEN_NAMES}
    return TemplateSource(source, {name: value for name, value in tokens.items() if value is not None})


def _table(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = parse_json(files.get(name, b"{}"), name)
    except FormatError as error:
        raise ModelMismatchError(error.message, place=error.where) from None
    if not isinstance(found, dict):
        raise ModelMismatchError("is not a JSON object", place=name)
    return found


def _from_config(config: Mapping[str, Any]) -> str | None:
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None
