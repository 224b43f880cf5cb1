"""`ralbuild debug-proxy`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ralbuild.cli.options import add_config_option
from ralbuild.errors import RalError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_option(parser)
    parser.add_argument("--upstream", required=True, metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument("--model", type=Path, metavar="DIR", help="take its tokenizer, for limits in tokens")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="port to listen on; default: 8001")
    parser.add_argument("--observe", action="store_true", help="report only; change nothing")
    parser.add_argument(
        "--show-text", action="store_true", help="put texts into the reports, before and after: may be secret"
    )
    parser.add_argument("--json", action="store_true", help="report as JSON lines on standard output")


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted; the config is read again whenever it changes."""
    from ralbuild.debug.proxy import LiveRules, Options, make_app, serve

    upstream = _upstream(options.upstream)
    if not 0 < options.port < 65536:
        raise UsageError(f"needs a port between 1 and 65535, found {options.port}", place="--port")
    live = LiveRules(options.config, options.model, _complain)
    live.current()
    app = make_app(
        live, Options(upstream, options.observe, options.show_text), _tell_json if options.json else _tell
    )
    print(f"http://{options.host}:{options.port} -> {upstream}", file=sys.stderr, flush=True)
    serve(app, options.host, options.port)
    return 0


def _upstream(text: str) -> str:
    """Return the server's root; a URL that ends in /v1 means the same."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"needs a URL such as http://127.0.0.1:8000, found {text!r}", place="--upstream")
    return text.rstrip("/").removesuffix("/v1")


def _complain(error: RalError) -> None:
    print(f"the config has mistakes; the rules before them stay:\n{error}", file=sys.stderr, flush=True)


def _tell_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, ensure_ascii=False), flush=True)


def _tell(report: dict[str, Any]) -> None:
    from ralbuild.report import printable

    lines = [f"route {report['route'] or '(none)'}, profile {report['profile']}"]
    lines += [f"  request: {change}" for change in report["request"]]
    lines += [
        f"  {item['count']} x {item['kind']} {item['text']!r}  {item['place']}" for item in report["rules"]
    ]
    if report["bans_that_would_refuse"]:
        lines.append(
            f"  {report['bans_that_would_refuse']} x a banned phrase that the image would not generate"
        )
    for item in report.get("choices", ()):
        lines += [f"  [{item['index']}] - {item['before']}", f"  [{item['index']}] + {item['after']}"]
    if len(lines) == 1:
        lines.append("  nothing changed")
    print("\n".join(map(printable, lines)), file=sys.stderr, flush=True)
