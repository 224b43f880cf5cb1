"""`ralbuild sign`."""

from __future__ import annotations

import argparse
import json

from ralbuild.cli.options import (
    add_key_option,
    add_report_options,
    chosen_report,
    layout_path,
    signing_key,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("image", metavar="oci:DIR", help="an OCI layout folder")
    parser.add_argument("--tag", default="", help="which image, when there are several")
    add_key_option(parser, "--key", "P-256 private key (PEM)", required=True)
    parser.add_argument("--sbom", action="store_true", help="also store its bill of materials, signed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the digest")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Read every byte of the image, sign it, and print its digest; the digest does not change."""
    from ralbuild.digests import default_cache
    from ralbuild.supply.attest import sign_stored
    from ralbuild.supply.wanted import Wanted

    layout = layout_path(options.image, "image")
    wanted = Wanted(signing_key(options), sbom=options.sbom)
    report = chosen_report(options)
    with report.stage("sign") as stage:
        image = sign_stored(layout, options.tag, wanted, default_cache(), None, report.note)
        stage.summary = f"{wanted} of {image.digest[:19]}"
    if options.json:
        artifacts = [item.entry() for item in image.artifacts]
        print(json.dumps({"manifest": image.digest, "artifacts": artifacts}, indent=2))
    else:
        print(image.digest)
    return 0
