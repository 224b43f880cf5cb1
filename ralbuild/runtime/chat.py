"""Chat templates, rendered in Jinja's immutable sandbox as transformers does. The only door to jinja2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.runtime.errors import ApiError, ModelMismatchError

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
        except jinja2.TemplateError as error:
            raise ModelMismatchError(f"is not a chat template: {error}", place="chat template") from None
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt text for ``messages``, ending where the answer begins.

        Raises:
            ApiError: 400 when the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise ApiError(400, "chat_template_error", message, param="messages") from None


def find_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """Return the model's chat template, or None: ``chat_template.jinja`` beats the tokenizer's config.

    Raises:
        ModelMismatchError: when a file is not what its name says.
    """
    try:
        config = parse_json(files.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
        extra = parse_json(files.get("special_tokens_map.json", b"{}"), "special_tokens_map.json")
    except FormatError as error:
        raise ModelMismatchError(error.message, place=error.where) from None
    source = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else _from_config(config)
    if source is None:
        return None
    tokens = {name: _content(config.get(name, extra.get(name))) for name in _TOKEN_NAMES}
    return ChatTemplate(source, {name: value for name, value in tokens.items() if value is not None})


def _from_config(config: Mapping[str, Any]) -> str | None:
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = {str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


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
