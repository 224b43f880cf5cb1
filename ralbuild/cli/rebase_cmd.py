"""`ralbuild rebase`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ralbuild.cli.options import (
    add_key_option,
    add_report_options,
    chosen_report,
    layout_path,
    signing_key,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ralbuild.image.assemble import Image
    from ralbuild.supply.wanted import Wanted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("image", metavar="oci:IMAGE", help="an OCI layout folder that `ralbuild image` wrote")
    parser.add_argument("--tag", default="", help="which image, when the layout holds several")
    parser.add_argument("--base", required=True, metavar="oci:BASE", help="an OCI layout folder")
    parser.add_argument(
        "--output",
        action="append",
        required=True,
        metavar="FORM",
        help="oci:DIR or archive:FILE, may be given several times; the image's own layout is fine",
    )
    parser.add_argument(
        "--output-tag", default="", metavar="NAME[:TAG]", help="its name there; default: the same"
    )
    add_key_option(parser, "--sign", "sign the new image with this P-256 key (PEM)")
    parser.add_argument("--sbom", action="store_true", help="store its bill of materials beside it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the digest")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Swap the base; print the new image's manifest digest."""
    from ralbuild.digests import default_cache
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.image.reader import open_image, read_base
    from ralbuild.image.rebase import rebase_image
    from ralbuild.image.write import write_image
    from ralbuild.report import format_bytes
    from ralbuild.supply.wanted import Wanted

    folder, base_folder = layout_path(options.image, "image"), layout_path(options.base, "--base")
    outputs = [parse_output(text) for text in options.output]
    wanted = Wanted(signing_key(options), sbom=options.sbom)
    wanted.check_outputs(outputs)
    report = chosen_report(options)
    with open_image(folder, options.tag) as stored:
        image = rebase_image(stored, folder, read_base(base_folder))
        name, old = stored.name, stored.digest
    tag = parse_tag(options.output_tag) if options.output_tag else name
    image = _attested(image, folder, options.tag, base_folder, wanted) if wanted else image
    with report.stage("rebase") as stage:
        written = write_image(image, outputs, tag=tag, cache=default_cache(), note=report.note)
        moved = sum(layer.reused for layer in written.layers)
        stage.summary = f"{format_bytes(written.bytes_written)} written, {moved} layers there already"
    answer = {"manifest": image.digest, "was": old, "written": written.bytes_written}
    print(json.dumps(answer, indent=2) if options.json else image.digest)
    return 0


def _attested(image: Image, folder: Path, tag: str, base: Path, wanted: Wanted) -> Image:
    from ralbuild.contract.places import BASE_MANIFEST
    from ralbuild.image.reader import open_image
    from ralbuild.supply.attest import attest_image

    with open_image(folder, tag) as ours, open_image(base) as theirs:
        return attest_image(
            image,
            lambda path: (theirs if path == BASE_MANIFEST else ours).read_file(path),
            wanted,
            str(folder),
            {},  # no weight byte is read for this
        )
