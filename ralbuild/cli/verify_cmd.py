"""`ralbuild verify`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.cli.options import add_report_options, chosen_report
from ralbuild.errors import UsageError, WeightsError

if TYPE_CHECKING:
    from ralbuild.weights.findings import Finding
    from ralbuild.weights.scan import Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder, or a models--org--name root")
    parser.add_argument(
        "--rehash", action="store_true", help="read every weight byte, whatever the cache knows"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="also check this ral-config.yaml")
    parser.add_argument(
        "--format",
        choices=("text", "json", "sarif", "github"),
        default="text",
        help="how findings are printed; default: text",
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--strict", action="store_true", help="warnings are errors")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="ID",
        help="a finding that does not count; repeatable",
    )
    parser.add_argument("--fail-fast", action="store_true", help="do not read weights once an error is known")
    parser.add_argument(
        "--canary",
        nargs=2,
        metavar=("ACTION", "FILE"),
        help="write FILE or check FILE: the model's greedy tokens on the CPU",
    )
    parser.add_argument("--reference", action="store_true", help="print what every finding means, and stop")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check the folder; print every finding and what the folder holds."""
    from ralbuild.weights.rules import reference

    if options.reference:
        print(reference(), end="")
        return 0
    if options.model is None:
        raise UsageError("needs --model DIR", hint="see `ralbuild verify --help`")
    from ralbuild.pipeline import check_config, check_model
    from ralbuild.weights.findings import ordered

    if options.canary and options.canary[0] not in ("write", "check"):
        raise UsageError(f"needs write or check, found {options.canary[0]!r}", place="--canary")
    ignored = _ignored(options.ignore)
    loaded = check_config(options.config) if options.config is not None else None
    verdict = check_model(
        options.model, chosen_report(options), rehash=options.rehash, fail_fast=options.fail_fast
    )
    if loaded is not None and verdict.model is not None:
        check_config(options.config, verdict.model)
    found = verdict.findings
    if options.canary and verdict.model is not None:
        found = ordered((*_canary(options.canary[0], Path(options.canary[1]), options.model), *found))
    findings = tuple(item for item in found if item.rule.id not in ignored)
    bad = ("error", "warning") if options.strict else ("error",)
    passed = not any(item.severity in bad for item in findings)
    text = _printed(options, findings, verdict, passed=passed)
    if text:
        print(text)
    return 0 if passed else WeightsError.exit_code


def _canary(action: str, file: Path, model: Path) -> tuple[Finding, ...]:
    """Write or check the canary of a folder that has no error; return what was found."""
    from ralbuild.weights import canary
    from ralbuild.weights.files import open_folder
    from ralbuild.weights.findings import Findings

    findings = Findings()
    root = open_folder(model, findings).root
    if action == "write":
        canary.write_canary(root, file)
    else:
        canary.check_canary(root, file, findings)
    return findings.sorted()


def _ignored(words: list[str]) -> set[str]:
    from ralbuild.weights.rules import find_rule

    out: set[str] = set()
    for word in words:
        rule = find_rule(word)
        if rule is None:
            hint = "`ralbuild verify --reference` lists them all"
            raise UsageError(f"knows no finding {word!r}", place="--ignore", hint=hint)
        out.add(rule.id)
    return out


def _printed(
    options: argparse.Namespace, findings: tuple[Finding, ...], verdict: Verdict, *, passed: bool
) -> str:
    from ralbuild.weights import output

    if options.json or options.format == "json":
        return output.as_json(findings, verdict, passed=passed)
    if options.format == "sarif":
        return output.as_sarif(findings)
    if options.format == "github":
        return output.as_github(findings)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return output.as_text(findings, verdict, color=color)
