"""`ralbuild base`."""

from __future__ import annotations

import argparse

from ralbuild.cli.options import add_report_options, chosen_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--target", choices=("cpu",), default="cpu", help="what the base is for")
    parser.add_argument("--out", required=True, metavar="oci:DIR", help="where to write the base")
    parser.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the base in its output")
    parser.add_argument("--refresh", action="store_true", help="resolve Debian's packages again")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Build the base, or take the finished one of this version; print its digest."""
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.pipeline import write_base

    output = parse_output(options.out)
    tag = parse_tag(options.tag) if options.tag else ""
    print(write_base(options.target, output, tag, chosen_report(options), refresh=options.refresh))
    return 0
