"""`ralbuild base`."""

from __future__ import annotations

import argparse

from ralbuild.cli.options import add_registry_options, add_report_options, chosen_report, registry_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--target", choices=("cpu",), default="cpu", help="what the base is for")
    parser.add_argument(
        "--out",
        required=True,
        metavar="FORM",
        help="where to write it, as of `ralbuild image --output`",
    )
    parser.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the base in its output")
    parser.add_argument("--refresh", action="store_true", help="resolve Debian's packages again")
    add_registry_options(parser)
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Build the base, or take the finished one of this version; print its digest."""
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.pipeline.writing import write_base

    output = parse_output(options.out)
    tag = parse_tag(options.tag) if options.tag else ""
    registry, report = registry_options(options), chosen_report(options)
    print(write_base(options.target, output, tag, registry, report, refresh=options.refresh))
    return 0
