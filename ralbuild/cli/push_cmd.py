"""`ralbuild push`: from a layout folder to a registry."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ralbuild.cli.options import add_registry_options, add_report_options, chosen_report, registry_options
from ralbuild.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("source", metavar="oci:DIR", help="layout that holds the image")
    parser.add_argument("target", metavar="registry:HOST/NAME[:TAG]", help="where to push it")
    parser.add_argument("--name", default="", help="which image of the layout; needed where it has several")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the digest")
    add_registry_options(parser)
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Push; print the image's manifest digest and nothing else on standard output."""
    from ralbuild.image.outputs import parse_target
    from ralbuild.pipeline.writing import push_image

    for text, scheme in ((options.source, "oci:"), (options.target, "registry:")):
        if not text.startswith(scheme):
            raise UsageError(f"needs {scheme}..., found {text!r}", place="push", hint="ralbuild push --help")
    target = parse_target(options.target.removeprefix("registry:"))
    folder = Path(options.source.removeprefix("oci:"))
    report = chosen_report(options)
    written = push_image(folder, options.name, target, registry_options(options), report)
    if not options.json:
        print(written.manifest_digest)
        return 0
    sent = {layer.digest for layer in written.layers if not layer.reused}
    answer = {
        "manifest": written.manifest_digest,
        "names": list(written.names),
        "sent": written.bytes_written,
        "seconds": {stage.name: round(stage.seconds, 3) for stage in report.stages},
        "layers": [
            {"name": item.name, "digest": item.digest, "size": item.size, "sent": item.digest in sent}
            for item in written.layers
        ],
    }
    print(json.dumps(answer, indent=2))
    return 0
