"""What clients send, checked: the OpenAI fields that are served, and a clear no to those that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.contract.places import ROUTE_HEADER
from ralbuild.runtime.errors import ApiError

MAX_ROUTE = 256
"""Characters of a route name: it is a name and not a text, and the work per request stays bounded."""
MAX_STOPS = 16
MAX_CHOICES = 16
"""Answers to one request; each takes a slot."""
MAX_STOP_BYTES = 1024
"""Length of one stop string in UTF-8: an automaton is made of it for every request."""
_SHOWN = 80
"""Characters of a wrong value that an error repeats."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda value: value != 1,
    "logprobs": lambda value: value is not False,
    "top_logprobs": lambda value: value != 0,
    "echo": lambda value: value is not False,
    "suffix": lambda value: value != "",
    "tools": lambda value: value != [],
    "tool_choice": lambda value: value not in ("none", "auto"),
    "functions": lambda value: value != [],
    "function_call": lambda value: value not in ("none", "auto"),
    "response_format": lambda value: value != {"type": "text"},
    "logit_bias": lambda value: value != {},
    "presence_penalty": lambda value: value != 0,
    "frequency_penalty": lambda value: value != 0,
    "modalities": lambda value: value != ["text"],
    "prediction": lambda _: True,
}
"""Fields whose effect would be missing from the answer, and when they ask for it. Null never asks."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request.

    Attributes:
        model: as sent; may carry a route after the served name.
        messages: role and text pairs of a chat; empty for a completion.
        prompt: text of a completion.
        max_tokens: None when the client set no limit.
        temperature, top_p: None when the client left them out.
        seed: None when the client left it out.
        stops: stop strings.
        stream, include_usage: how to answer.
        choices: answers wanted, ``n``.
    """

    model: str
    messages: tuple[dict[str, str], ...]
    prompt: str
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    choices: int

    @property
    def input_length(self) -> int:
        """Characters of all texts that the client sent."""
        return len(self.prompt) + sum(len(message["content"]) for message in self.messages)


def parse_chat(body: bytes) -> Ask:
    """Check a chat completion request.

    Raises:
        ApiError: 400 naming the field.
    """
    plain = _object(body)
    messages = plain.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "needs a list of at least one message")
    checked = tuple(_message(item, f"messages[{index}]") for index, item in enumerate(messages))
    longest = plain.get("max_completion_tokens")
    return _ask(plain, checked, "", "max_completion_tokens" if longest is not None else "max_tokens", None)


def parse_completion(body: bytes) -> Ask:
    """Check a text completion request.

    Raises:
        ApiError: 400 naming the field.
    """
    plain = _object(body)
    prompt = plain.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        message = "needs one string; several prompts and token ids are not supported, for the rules read text"
        raise _wrong("prompt", message)
    return _ask(plain, (), prompt, "max_tokens", 16)


def find_route(served: str, model: str, header: str | None) -> str:
    """Return the route of a request: the header's, else what follows the served name and a ``/``.

    Raises:
        ApiError: 404 for another model, 400 for a route that is no name.
    """
    if model != served and not model.startswith(f"{served}/"):
        message = f"this server has {served!r}, not {model[:_SHOWN]!r}"
        raise ApiError(404, "model_not_found", message, param="model")
    route = header if header is not None else model[len(served) + 1 :]
    if len(route) > MAX_ROUTE:
        message = f"a route has at most {MAX_ROUTE} characters, this one {len(route)}"
        raise ApiError(400, "route_too_long", message, param=ROUTE_HEADER)
    return route


def _ask(
    plain: dict[str, Any],
    messages: tuple[dict[str, str], ...],
    prompt: str,
    limit: str,
    default: int | None,
) -> Ask:
    for name, asks in _UNSUPPORTED.items():
        value = plain.get(name)
        if value is not None and asks(value):
            raise ApiError(
                400, "unsupported_parameter", f"{name!r} is not supported by this server", param=name
            )
    options = plain.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", "needs an object")
    model = plain.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model", "needs the name of a model")
    choices = _integer(plain, "n", 1, MAX_CHOICES, 1)
    return Ask(
        choices=choices or 1,
        model=model,
        messages=messages,
        prompt=prompt,
        max_tokens=_integer(plain, limit, 1, 1 << 31, default),
        temperature=_float(plain, "temperature", 0.0, 2.0),
        top_p=_float(plain, "top_p", 0.0, 1.0),
        seed=_integer(plain, "seed", -(1 << 63), (1 << 63) - 1, None),
        stops=_stops(plain.get("stop")),
        stream=_flag(plain, "stream"),
        include_usage=_flag(options or {}, "include_usage"),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        plain = parse_json(body, "")
    except FormatError as error:
        raise ApiError(400, "invalid_json", f"the body cannot be read: {error.message}") from None
    if not isinstance(plain, dict):
        raise ApiError(400, "invalid_json", "the body is not a JSON object")
    return plain


def _message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise _wrong(where, "needs an object with role and content")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        found = repr(role[:_SHOWN]) if isinstance(role, str) else "no string"
        raise _wrong(f"{where}.role", f"needs one of {known}; found {found}")
    return {"role": _ROLES[role], "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "needs a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _wrong(f"{where}[{index}]", 'needs a part of the form {"type": "text", "text": "..."}')
        texts.append(text)
    return "".join(texts)


def _stops(value: Any) -> tuple[str, ...]:
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list) or len(items) > MAX_STOPS:
        raise _wrong("stop", f"needs a string or a list of at most {MAX_STOPS} strings")
    if not all(isinstance(item, str) and item for item in items):
        raise _wrong("stop", "needs strings that are not empty")
    if any(len(item.encode()) > MAX_STOP_BYTES for item in items):
        raise _wrong("stop", f"needs strings of at most {MAX_STOP_BYTES} bytes")
    return tuple(dict.fromkeys(items))


def _integer(plain: dict[str, Any], name: str, least: int, most: int, default: int | None) -> int | None:
    value = plain.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"needs a whole number from {least} to {most}")
    return value


def _float(plain: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = plain.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"needs a number from {least:g} to {most:g}")
    return float(value)


def _flag(plain: dict[str, Any], name: str) -> bool:
    value = plain.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "needs true or false")
    return bool(value)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{param}: {message}", param=param)
