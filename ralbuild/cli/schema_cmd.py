"""`ralbuild schema`."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--markdown", action="store_true", help="print the reference page instead")


def run(options: argparse.Namespace) -> int:
    """Print the schema for editors, or the reference made from it."""
    from ralbuild.config.schema import config_reference, config_schema

    print(
        config_reference() if options.markdown else json.dumps(config_schema(), indent=2, sort_keys=True),
        end="",
    )
    print("" if options.markdown else "\n", end="")
    return 0
