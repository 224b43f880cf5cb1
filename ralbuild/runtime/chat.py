"""Chat templates, rendered in Jinja's immutable sandbox as transformers does. The only door to jinja2.

``python -m ralbuild.runtime.chat`` is the process that `ralbuild.runtime.rendering` starts and ends.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
"""Address space of the process; Python and Jinja take about 50 MiB of it."""
MAX_OUTPUT = 1 << 24
"""Most characters of a prompt's text: four times what a body may bring."""
ORPHAN_SECONDS = 60
"""After this long the process ends itself: the service, which would have ended it, must be gone."""
_HEAD = 8


class TemplateRefusalError(Exception):
    """The template cannot be compiled, or refuses the conversation."""


class _Generation(Extension):
    """``{% generation %}`` marks an assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One model's template and the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, ValueError, RecursionError, SyntaxError) as error:
            raise TemplateRefusalError(str(error)) from None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt text for ``messages``, ending where the answer begins.

        Raises:
            TemplateRefusalError: when the template refuses the conversation, or fails on it.
            MemoryError: when the text is longer than `MAX_OUTPUT` characters.
        """
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # whatever a program of somebody else's can raise
            raise TemplateRefusalError(str(error)) from None
        if len(text) > MAX_OUTPUT:
            raise MemoryError
        return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _answer(template: ChatTemplate, messages: Any) -> dict[str, str]:
    try:
        return {"text": template.render(messages)}
    except TemplateRefusalError as error:
        return {"error": str(error)[:1000]}
    except MemoryError:
        return {"limit": "takes too much memory"}


def _receive(source: BinaryIO) -> Any:
    head = source.read(_HEAD)
    if len(head) < _HEAD:  # the service has ended
        sys.exit(0)
    return json.loads(source.read(int.from_bytes(head, "big")))


def _send(target: BinaryIO, value: dict[str, str]) -> None:
    data = json.dumps(value).encode()
    target.write(len(data).to_bytes(_HEAD, "big") + data)
    target.flush()


def main() -> None:
    """Compile the first frame's template, then render the messages of every further one."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = _receive(source)
    signal.alarm(ORPHAN_SECONDS)
    try:
        template = ChatTemplate(first["text"], first["tokens"])
    except TemplateRefusalError as error:
        _send(target, {"error": str(error)})
        return
    except MemoryError:
        _send(target, {"error": "it takes too much memory"})
        return
    _send(target, {})
    while True:
        signal.alarm(0)
        messages = _receive(source)
        signal.alarm(ORPHAN_SECONDS)
        _send(target, _answer(template, messages))


if __name__ == "__main__":
    main()
