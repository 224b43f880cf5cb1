"""`ralbuild render`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ralbuild.cli.options import (
    add_base_option,
    add_build_options,
    add_report_options,
    build_request,
    chosen_base,
    chosen_report,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_build_options(parser)
    add_base_option(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="new folder for the build context"
    )
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Write Dockerfile, entrypoint and everything that they copy; weights are hard links."""
    from ralbuild.pipeline import render_context

    request = build_request(options, base=chosen_base(options))
    print(render_context(request, options.out, chosen_report(options)) / "Dockerfile")
    return 0
