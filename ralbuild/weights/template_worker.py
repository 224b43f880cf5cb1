"""Renders a model's chat template: a program of its own, and the only one here that imports jinja2.

`ralbuild.weights.template` starts it with a request on standard input. Jinja's sandbox keeps the
template from Python, but bounds neither time nor memory; the process's limits do.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

MOST_TEXT = 1 << 20
_DAYS = (datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2031, 11, 12, 13, 14, 15, tzinfo=UTC))


def main() -> None:
    """Read the request, render every conversation on two dates, write the answers."""
    request = json.load(sys.stdin.buffer)
    json.dump(_answers(request), sys.stdout)


def _answers(request: dict[str, Any]) -> dict[str, Any]:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks an assistant's text for training; here it is only its body."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    used: set[str] = set()
    day = [_DAYS[0]]

    def chance(*_: Any, **__: Any) -> str:
        used.add("chance")
        return ""

    def clock(form: str) -> str:
        return day[0].strftime(form)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], autoescape=False
    )
    environment.filters.update(tojson=_tojson, random=chance)
    environment.globals.update(raise_exception=refuse, strftime_now=clock, lipsum=chance)
    try:
        template = environment.from_string(request["source"])
    except Exception as error:  # Python's own compiler has a say too, such as 20 loops in loops at most
        return {"parse": _fault(error)}

    def render(messages: list[Any], *, prompt: bool) -> dict[str, str]:
        try:
            text = template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **request["tokens"],
            )
        except Exception as error:  # a template may raise anything
            return _fault(error)
        return {"text": text} if len(text) <= MOST_TEXT else {"limit": f"writes {len(text)} characters"}

    out: dict[str, Any] = {}
    for number, today in enumerate(_DAYS):
        day[0] = today
        for name, messages in request["conversations"].items():
            out[f"{name}/{number}"] = render(messages, prompt=False)
            out[f"{name}+/{number}"] = render(messages, prompt=True)
    out["used"] = sorted(used)
    return out


def _fault(error: BaseException) -> dict[str, str]:
    name = type(error).__name__
    if name == "SecurityError":
        return {"escape": str(error)[:300]}
    if isinstance(error, MemoryError | RecursionError | OverflowError):
        return {"limit": f"{name}: {str(error)[:300]}"}
    return {"error": f"{name}: {str(error)[:300]}"}


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


if __name__ == "__main__":
    main()
