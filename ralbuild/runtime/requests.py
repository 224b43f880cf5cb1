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
MAX_LOGIT_BIAS = 300
"""Tokens that one request may bias."""
MAX_TOP_LOGPROBS = 20
_SHOWN = 80
"""Characters of a wrong value that an error repeats."""
_CALLS = ("tool_calls", "function_call")
"""What the assistant may have said beside its text: without it the model would see another conversation."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda value: value != 1,
    "echo": lambda value: value is not False,
    "suffix": lambda value: value != "",
    "tools": lambda value: value != [],
    "tool_choice": lambda value: value not in ("none", "auto"),
    "functions": lambda value: value != [],
    "function_call": lambda value: value not in ("none", "auto"),
    "response_format": lambda value: value != {"type": "text"},
    "modalities": lambda value: value != ["text"],
    "prediction": lambda _: True,
    # What other servers of this API know beyond OpenAI's fields.
    "add_generation_prompt": lambda value: value is not True,
    "allowed_token_ids": lambda value: value != [],
    "bad_words": lambda value: value != [],
    "bad_words_ids": lambda value: value != [],
    "chat_template": lambda _: True,
    "chat_template_kwargs": lambda value: value != {},
    "continue_final_message": lambda value: value is not False,
    "documents": lambda value: value != [],
    "grammar": lambda value: value != "",
    "guided_choice": lambda _: True,
    "guided_grammar": lambda _: True,
    "guided_json": lambda _: True,
    "guided_regex": lambda _: True,
    "ignore_eos": lambda value: value is not False,
    "include_stop_str_in_output": lambda value: value is not False,
    "json_schema": lambda _: True,
    "length_penalty": lambda value: value != 1,
    "logits_processors": lambda value: value != [],
    "min_tokens": lambda value: value != 0,
    "mirostat": lambda value: value != 0,
    "no_repeat_ngram_size": lambda value: value != 0,
    "prompt_logprobs": lambda _: True,
    "repeat_penalty": lambda value: value != 1,
    "skip_special_tokens": lambda value: value is not True,
    "stop_token_ids": lambda value: value != [],
    "structured_outputs": lambda _: True,
    "truncate_prompt_tokens": lambda _: True,
    "typical_p": lambda value: value != 1,
    "use_beam_search": lambda value: value is not False,
    "xtc_probability": lambda value: value != 0,
}
"""Fields whose effect would be missing from the answer, and when they ask for it. Null never asks."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The sampling values of a request; None where the client left one out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request.

    Attributes:
        model: as sent; may carry a route after the served name.
        messages: role and text pairs of a chat; empty for a completion.
        prompt: text of a completion.
        max_tokens: None when the client set no limit.
        wishes: how to sample.
        logprobs: alternatives to report with each token; None reports nothing.
        stops: stop strings.
        stream, include_usage: how to answer.
        choices: answers wanted, ``n``.
    """

    model: str
    messages: tuple[dict[str, str], ...]
    prompt: str
    max_tokens: int | None
    wishes: Wishes
    logprobs: int | None
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
    limit = "max_completion_tokens" if longest is not None else "max_tokens"
    return _ask(plain, checked, "", limit, None, _chat_logprobs(plain))


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
    # OpenAI's older API: `logprobs` is the number of alternatives itself.
    return _ask(plain, (), prompt, "max_tokens", 16, _integer(plain, "logprobs", 0, MAX_TOP_LOGPROBS, None))


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
    logprobs: int | None,
) -> Ask:
    for name, asks in _UNSUPPORTED.items():
        value = plain.get(name)
        if value is not None and asks(value):
            raise _unsupported(name)
    options = plain.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", "needs an object")
    if _flag(options or {}, "continuous_usage_stats"):
        raise _unsupported("stream_options.continuous_usage_stats")
    model = plain.get("model")
    if not isinstance(model, str) or not model:
        raise _wrong("model", "needs the name of a model")
    return Ask(
        model=model,
        messages=messages,
        prompt=prompt,
        max_tokens=_integer(plain, limit, 1, 1 << 31, default),
        wishes=_wishes(plain),
        logprobs=logprobs,
        stops=_stops(plain.get("stop")),
        stream=_flag(plain, "stream"),
        include_usage=_flag(options or {}, "include_usage"),
        choices=_integer(plain, "n", 1, MAX_CHOICES, 1) or 1,
    )


def _wishes(plain: dict[str, Any]) -> Wishes:
    top_k = _integer(plain, "top_k", -1, (1 << 31) - 1, None)
    return Wishes(
        temperature=_float(plain, "temperature", 0.0, 2.0),
        top_k=0 if top_k == -1 else top_k,  # both are in use for "all"
        top_p=_float(plain, "top_p", 0.0, 1.0),
        min_p=_float(plain, "min_p", 0.0, 1.0),
        repetition_penalty=_float(plain, "repetition_penalty", 0.01, 10.0),
        presence_penalty=_float(plain, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_float(plain, "frequency_penalty", -2.0, 2.0),
        seed=_integer(plain, "seed", -(1 << 63), (1 << 63) - 1, None),
        logit_bias=_logit_bias(plain.get("logit_bias")),
    )


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise _wrong("logit_bias", f"needs an object of at most {MAX_LOGIT_BIAS} token ids")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 9 or int(key) in out:
            raise _wrong("logit_bias", f"needs token ids as keys, each once; found {key[:_SHOWN]!r}")
        out[int(key)] = _number(bias, f"logit_bias.{key}", -100.0, 100.0)
    return tuple(sorted(out.items()))


def _chat_logprobs(plain: dict[str, Any]) -> int | None:
    """Return the number of alternatives that a chat asks for; None when it wants no log probabilities."""
    wanted = _flag(plain, "logprobs")
    most = _integer(plain, "top_logprobs", 0, MAX_TOP_LOGPROBS, None)
    if most and not wanted:
        raise _wrong("top_logprobs", "needs logprobs to be true")
    return (most or 0) if wanted else None


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
    for name in _CALLS:
        if item.get(name):
            raise _unsupported(f"{where}.{name}")
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
    return None if value is None else _number(value, name, least, most)


def _number(value: Any, name: str, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"needs a number from {least:g} to {most:g}")
    return float(value)


def _flag(plain: dict[str, Any], name: str) -> bool:
    value = plain.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "needs true or false")
    return bool(value)


def _unsupported(param: str) -> ApiError:
    message = f"{param!r} is not supported by this server"
    return ApiError(400, "unsupported_parameter", message, param=param)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, "invalid_value", f"{param}: {message}", param=param)
