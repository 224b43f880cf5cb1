"""`ralbuild debug`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ralbuild.cli.options import add_config_option
from ralbuild.errors import UsageError

MAX_TEXT_BYTES = 16 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_option(parser)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="take its tokens; without it a token is a character"
    )
    parser.add_argument("--route", default="", help="a route name, such as finance.retail")
    parser.add_argument("--text", metavar="FILE", help="the model's text; - or nothing reads standard input")
    parser.add_argument("--kernel", metavar="NAME", help="run this user kernel over the text instead")
    parser.add_argument(
        "--break",
        dest="breaks",
        action="append",
        metavar="RULE",
        help="stop where this rule matches: its id, line, line:column, kind or text; repeatable",
    )
    parser.add_argument("--step", action="store_true", help="on a terminal, stop after every token")
    parser.add_argument("--json", action="store_true", help="print a JSON line per token")


def run(options: argparse.Namespace) -> int:
    """Step through a text, or run a kernel over it."""
    from ralbuild.debug.rules import load_rules

    rules = load_rules(options.config, options.model)
    text = _text(options.text)
    as_json = options.json or not sys.stdout.isatty()
    if options.kernel is not None:
        from ralbuild.compile.lint import lint_kernel
        from ralbuild.debug.kernel import find_kernel, run_kernel
        from ralbuild.debug.show import show_launches

        if options.model is None:
            raise UsageError("--kernel needs --model: a kernel reads token ids", place="--kernel")
        spec = find_kernel(rules, options.kernel, rules.loaded.config.max_seq_len)
        for defect in lint_kernel(spec):
            _note(f"warning: {defect.problem}")
        launches = run_kernel(spec, rules, options.route, text, _note)
        if as_json:
            for launch in launches:
                print(json.dumps(launch.plain(), ensure_ascii=False))
        else:
            show_launches(launches)
        return 0
    from ralbuild.debug.show import as_json as json_lines
    from ralbuild.debug.show import show
    from ralbuild.debug.trace import find_rules, trace

    breaks = frozenset[int]().union(*(find_rules(rules, wanted) for wanted in options.breaks or ()))
    steps = trace(rules, options.route, text)
    if as_json:
        for line in json_lines(steps, breaks):
            print(line)
        return 0
    asks = (options.step or bool(breaks)) and sys.stdin.isatty()
    show(steps, breaks, _ask if asks else None, step_all=options.step)
    return 0


def _text(name: str | None) -> str:
    if name is None and sys.stdin.isatty():
        raise UsageError("needs a text", place="--text", hint="give --text FILE, or write to standard input")
    try:
        if name in (None, "-"):
            data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        else:
            with Path(str(name)).open("rb") as file:
                data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=name or "--text") from None
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"needs at most {MAX_TEXT_BYTES} bytes", place=name or "--text")
    return data.decode("utf-8", "replace")


def _note(text: str) -> None:
    from ralbuild.report import printable

    print(printable(text), file=sys.stderr)


def _ask() -> str:
    try:
        return input("debug> ")
    except EOFError:
        return "q"
