"""`ralbuild compile`."""

from __future__ import annotations

import argparse
import json

from ralbuild.cli.options import (
    add_build_options,
    add_report_options,
    build_request,
    chosen_report,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_build_options(parser)
    parser.add_argument("--check-repro", action="store_true", help="compile every kernel twice and compare")
    parser.add_argument("--json", action="store_true", help="print the bundle as JSON")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compile into the cache; print the bundle's digest."""
    from ralbuild.pipeline.compiling import compile_model, save_plan

    report = chosen_report(options)
    compiled = compile_model(build_request(options), report)
    report.note(f"the plan for people is {save_plan(compiled, options.cache)}")
    if options.json:
        print(json.dumps(json.loads(compiled.bundle_json), indent=2, sort_keys=True))
    else:
        print(f"sha256:{compiled.bundle_sha256}")
    return 0
