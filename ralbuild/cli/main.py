"""`ralbuild`: finds the verb, and turns an error into text and an exit status.

Nothing heavy is imported before a verb runs, so that `ralbuild --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ralbuild import __version__
from ralbuild.errors import HostError, RalError, UsageError

VERBS = {
    "init": "write a config to start from",
    "doctor": "say what this machine has and lacks",
    "schema": "print the JSON Schema of the config",
    "verify": "check a model folder",
    "import": "convert a GGUF file to a model folder",
    "rules": "compile the signed rules of the serving side",
    "explain": "print which rules a route gets, and in what order",
    "debug": "step through a text, or run a user kernel, on the CPU",
    "debug-proxy": "try the rules before a server that exists",
    "compile": "compile rules and kernels into .ral_cache",
    "simulate": "run the compiled kernels on the CPU and compare",
    "render": "write the Dockerfile, entrypoint and build context",
    "base": "build the base image: Debian, Python, locked packages",
    "image": "build the image: the main job",
    "push": "push an image of a layout to a registry",
    "inspect": "show what an image holds",
    "diff": "show what changed between two images, and what that moves",
    "rebase": "put an image on another base without reading its weights",
    "sign": "sign an image, or store its bill of materials",
    "verify-image": "check an image's signature, provenance and every byte",
    "run": "run an image without docker",
    "probe": "ask a running server what it must answer",
    "release": "switch a docker host to another image, blue-green",
}
"""Every verb is the module `ralbuild.cli.<verb>_cmd` (``_`` for ``-``) with `add_arguments` and `run`."""

EXIT_CODES = (
    "exit codes: 0 done, 1 a bug in ralbuild, 2 usage or config, 3 weights, 4 compile, 5 cache, "
    "6 image or registry, 7 this machine, 8 release gate failed, 9 rolled back, 130 interrupted"
)


_GARBAGE = 50_000
"""Objects made since the last collection that start the next one; Python's own number is 700."""


class _Help(argparse.HelpFormatter):
    """Shows the default of every option that has one, unless its help says it in words."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if (
            isinstance(default, bool | list | None)
            or default in ("", argparse.SUPPRESS)
            or "default:" in text
        ):
            return text
        return f"{text}; default: %(default)s"


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line the way every other error is reported."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see `{self.prog} --help`")


def program() -> NoReturn:
    """Run the command of this process and end it."""
    # Imports are most of a short command, and their objects all stay: there is no garbage to look for.
    gc.set_threshold(_GARBAGE)
    # No command multiplies matrices; NumPy's library for that would start a thread for every processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        sys.exit(main())
    finally:
        gc.freeze()  # the interpreter's end would go through all that was imported, several times


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of tensors go to terminals of any encoding
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except RalError as error:
        _print_error(error, as_json="--json" in arguments)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left; there is nobody to tell
        _drop_output()
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()  # what is buffered cannot be written either
        _print_error(
            HostError("no space left on device", place=error.filename or "standard output"), as_json=False
        )
        return HostError.exit_code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: object) -> NoReturn:  # noqa: ARG001
    raise KeyboardInterrupt


def _dispatch(arguments: list[str]) -> int:
    parser = _Parser(
        prog="ralbuild",
        description="Turn model weights, rules and Triton kernels into an immutable container image.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ralbuild {__version__}")
    verbs = parser.add_subparsers(title="commands", dest="verb", metavar="COMMAND", parser_class=_Parser)
    named = next((word for word in arguments if not word.startswith("-")), None)
    for verb, summary in VERBS.items():
        child = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if verb == named:
            module = importlib.import_module(f"ralbuild.cli.{verb.replace('-', '_')}_cmd")
            module.add_arguments(child)
            if hasattr(module, "complete"):  # a verb with verbs of its own, of which one may be left out
                at = arguments.index(verb) + 1
                arguments = [*arguments[:at], *module.complete(arguments[at:])]
            child.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.print_help()
        return 0
    return int(options.run(options))


def _print_error(error: RalError, *, as_json: bool) -> None:
    if as_json:
        problems = [
            {"place": item.place, "message": item.message, "hint": item.hint} for item in error.problems
        ]
        print(json.dumps({"error": problems, "exit_code": error.exit_code}), file=sys.stderr)
        return
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    red, dim, off = ("\x1b[1;31m", "\x1b[2m", "\x1b[0m") if color else ("", "", "")
    for item in error.problems:
        print(f"{red}error:{off} {_printable(str(item))}", file=sys.stderr)
        if item.hint:
            print(f"{dim}  hint: {_printable(item.hint)}{off}", file=sys.stderr)


def _printable(text: str) -> str:
    from ralbuild.report import printable

    return printable(text)


if __name__ == "__main__":
    program()
