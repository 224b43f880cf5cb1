"""`ralbuild image`: the main job."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ralbuild.cli.options import (
    add_base_option,
    add_build_options,
    add_report_options,
    base_folder,
    build_request,
    chosen_report,
)

if TYPE_CHECKING:
    from ralbuild.image.assemble import Image
    from ralbuild.image.write import WrittenImage
    from ralbuild.pipeline import Compiled
    from ralbuild.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_build_options(parser)
    add_base_option(parser)
    parser.add_argument(
        "--output",
        action="append",
        metavar="FORM",
        help="oci:DIR or archive:FILE, may be given several times; default: oci:./ral-image",
    )
    parser.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the image in its outputs")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be written, and write no image"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="run every kernel's PTX first; write nothing if one is wrong"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the digest")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Build an image; print its manifest digest and nothing else on standard output."""
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.pipeline import build_image, plan_only

    report = chosen_report(options)
    outputs = tuple(parse_output(text) for text in options.output or ["oci:./ral-image"])
    tag = parse_tag(options.tag) if options.tag else ""
    request = build_request(options, base=base_folder(options))
    if options.dry_run:
        compiled, image = plan_only(request, report)
        print(_json(compiled, image, None, report) if options.json else _table(image))
        return 0
    compiled, image, written = build_image(request, outputs, tag, report)
    print(_json(compiled, image, written, report) if options.json else image.digest)
    if not options.json and not options.quiet and sys.stderr.isatty() and not options.output:
        print("next: ralbuild run oci:./ral-image", file=sys.stderr)
    return 0


def _table(image: Image) -> str:
    from ralbuild.report import format_bytes

    lines = [f"{image.digest}  (not written)"]
    for layer in image.layers:
        item = layer.descriptor
        lines.append(f"  {item.digest[:19]}  {format_bytes(item.size):>8}  {item.kind:<8} {item.name}")
    return "\n".join(lines)


def _json(compiled: Compiled, image: Image, written: WrittenImage | None, report: Report) -> str:
    reused = {layer.digest for layer in written.layers if layer.reused} if written else set()
    answer = {
        "manifest": image.digest,
        "config": image.config_digest,
        "bundle": f"sha256:{compiled.bundle_sha256}",
        "written": written.bytes_written if written else 0,
        "summary": {stage.name: stage.summary for stage in report.stages},
        "seconds": {stage.name: round(stage.seconds, 3) for stage in report.stages},
        "layers": [
            {
                "name": layer.descriptor.name,
                "kind": layer.descriptor.kind,
                "digest": layer.descriptor.digest,
                "size": layer.descriptor.size,
                "reused": layer.descriptor.digest in reused,
            }
            for layer in image.layers
        ],
    }
    return json.dumps(answer, indent=2)
