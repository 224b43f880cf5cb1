"""`ralbuild verify`."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.cli.options import add_check_options, add_report_options, chosen_checks, chosen_report
from ralbuild.errors import UsageError, WeightsError

if TYPE_CHECKING:
    from ralbuild.checking import Checks
    from ralbuild.weights.canary import Canary
    from ralbuild.weights.scan import ScannedModel, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="model folder, or a models--org--name root")
    add_check_options(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="also check this ral-config.yaml")
    parser.add_argument(
        "--format",
        choices=("text", "json", "sarif", "github"),
        default="text",
        help="how findings are printed; default: text",
    )
    parser.add_argument("--json", action="store_true", help="the same as --format json")
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
    from ralbuild.checking import check_model

    recorded = _recorded(*options.canary) if options.canary else None
    checks = replace(chosen_checks(options), own_digests=True)
    if options.config is not None:
        _check_config(options.config)  # a mistake in it is known before weights are read
    verdict = check_model(options.model, chosen_report(options), checks, fail_fast=options.fail_fast)
    if options.config is not None and verdict.model is not None:
        _check_config(options.config, verdict.model)
    if options.canary:
        verdict = _with_canary(verdict, recorded, Path(options.canary[1]), options.model, checks)
    passed = verdict.passed(strict=checks.strict)
    _print(options, verdict, passed=passed)
    return 0 if passed else WeightsError.exit_code


def _check_config(path: Path, model: ScannedModel | None = None) -> None:
    from ralbuild.pipeline.checks import check_config  # what a build would say of the two

    check_config(path, model)


def _recorded(action: str, file: str) -> Canary | None:
    """Return the canary to check against, or None to write one; called before weights are read.

    Raises:
        WeightsError: when ``file`` is to be checked and is no canary.
        HostError: when it is to be written and cannot be.
    """
    from ralbuild.weights.canary import check_place, read_canary

    if action == "check":
        return read_canary(Path(file))
    if action != "write":
        raise UsageError(f"needs write or check, found {action!r}", place="--canary")
    check_place(Path(file))
    return None


def _with_canary(
    verdict: Verdict, recorded: Canary | None, file: Path, model: Path, checks: Checks
) -> Verdict:
    """Write the canary of a folder without error, or compare it; return the verdict with what was found.

    Raises:
        WeightsError: when errors are ignored that leave no model to run.
    """
    from ralbuild.weights import canary
    from ralbuild.weights.files import open_folder
    from ralbuild.weights.findings import Findings, ordered

    if verdict.model is None:
        if verdict.failed:
            return verdict
        raise WeightsError("no canary: the errors that are ignored leave no model to run", place=str(model))
    findings = Findings(checks.ignored)
    root = open_folder(model, findings).root
    if recorded is None:
        canary.write_canary(root, file)
    else:
        canary.compare_canaries(recorded, canary.record(root), findings)
    return replace(verdict, findings=ordered((*findings.sorted(), *verdict.findings)))


def _print(options: argparse.Namespace, verdict: Verdict, *, passed: bool) -> None:
    """Print the verdict: a table on a terminal, plain lines elsewhere, or the format that was asked for."""
    from ralbuild.weights import output

    if options.json or options.format == "json":
        print(output.as_json(verdict, passed=passed))
    elif options.format == "sarif":
        print(output.as_sarif(verdict.findings))
    elif options.format == "github":
        lines = output.as_github(verdict.findings)
        print(lines, end="\n" if lines else "")
    elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from ralbuild.report import print_findings

        print_findings(verdict.findings, sys.stdout)
        print(output.footer(verdict))
    else:
        print(output.as_text(verdict))
