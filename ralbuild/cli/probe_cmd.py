"""`ralbuild probe`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.errors import GateError, UsageError
from ralbuild.files import write_atomically

if TYPE_CHECKING:
    from ralbuild.release.probe import Prober


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--probes", type=Path, metavar="FILE", help="golden prompts and guardrails: probes.yaml"
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=("smoke", "identity", "golden", "guardrail", "streaming", "limits"),
        help="only these; repeatable",
    )
    parser.add_argument("--bundle", default="", metavar="sha256:HEX", help="bundle that /ral/info must name")
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="SECONDS", help="without a byte; default: 60"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="sent as a bearer token")
    parser.add_argument(
        "--format", choices=("text", "json", "prometheus", "junit"), default="text", help="default: text"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the result there, whole or not at all"
    )
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="probe again and again")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write golden probes from this server's answers"
    )
    parser.add_argument("--prompt", action="append", help="what --record asks; repeatable")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each recorded answer; default: 32")


def run(options: argparse.Namespace) -> int:
    """Probe a server; the exit status is 0 only when every probe passed."""
    from ralbuild.config.probes import ProbeSuite, load_probes
    from ralbuild.release.probe import KINDS, Prober
    from ralbuild.release.service_client import ServiceClient

    if options.timeout <= 0 or (options.watch is not None and options.watch <= 0):
        raise UsageError("needs a number of seconds above 0", place="--timeout, --watch")
    client = ServiceClient.of(options.url, timeout=options.timeout, headers=_key_header(options.api_key_file))
    suite = load_probes(options.probes) if options.probes else ProbeSuite()
    prober = Prober(client, suite, options.bundle)
    if options.record is not None:
        return _record(prober, options)
    kinds = tuple(options.kind or KINDS)
    while True:
        ok = _once(prober, kinds, options)
        if options.watch is None:
            return 0 if ok else GateError.exit_code
        time.sleep(options.watch)


def _once(prober: Prober, kinds: tuple[str, ...], options: argparse.Namespace) -> bool:
    from ralbuild.release.probe_output import format_results, line_of

    results = []
    for result in prober.run(kinds):
        results.append(result)
        if options.format == "text":
            print(line_of(result), flush=True)
    _deliver(format_results(results, options.format, options.url), options.out)
    return all(result.ok for result in results)


def _record(prober: Prober, options: argparse.Namespace) -> int:
    import json

    from ralbuild.release.service_client import NoAnswerError

    prompts = options.prompt or ["Say hello.", "What is 2 + 2?", "Name three colours."]
    if options.record.exists():
        raise UsageError(
            "is there already", place=str(options.record), hint="choose another name, or remove it"
        )
    try:
        golden = prober.record(prompts, options.max_tokens)
    except NoAnswerError as error:
        raise GateError(str(error), place=options.url) from None
    lines = ["# Greedy answers of a server that was trusted when they were recorded.", "golden:"]
    for item in golden:
        lines.append(f"  - name: {item.name}")
        lines.append(f"    prompt: {json.dumps(item.prompt, ensure_ascii=False)}")
        lines.append(f"    max_tokens: {item.max_tokens}")
        lines.append(f"    text: {json.dumps(item.text, ensure_ascii=False)}")
    _deliver("\n".join(lines), options.record)
    plural = "" if len(golden) == 1 else "s"
    print(f"{len(golden)} golden probe{plural} written to {options.record}", file=sys.stderr)
    return 0


def _deliver(text: str, out: Path | None) -> None:
    if out is None:
        print(text, flush=True)
        return
    try:
        write_atomically(out, f"{text}\n".encode())
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", place=str(out)) from None


def _key_header(path: Path | None) -> tuple[tuple[str, str], ...]:
    if path is None:
        return ()
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", place=str(path)) from None
    return (("authorization", f"Bearer {key}"),)
