"""`ralbuild verify`."""

from __future__ import annotations

import argparse
import json

from ralbuild.cli.options import add_model_option, add_report_options, chosen_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model_option(parser)
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check the folder; print what it holds."""
    from ralbuild.contract.codec import to_plain
    from ralbuild.pipeline import verify_model

    report = chosen_report(options)
    model = verify_model(options.model, report, rehash=options.rehash)
    if options.json:
        print(json.dumps(to_plain(model.manifest), indent=2))
        return 0
    manifest = model.manifest
    size = f"{manifest.parameters:,} parameters in {manifest.tensors} tensors"
    print(f"{manifest.architecture}, {size}, {manifest.dtype}")
    for item in (*manifest.weights, *manifest.files):
        print(f"  sha256:{item.sha256}  {item.size:>14,}  {item.path}")
    return 0
