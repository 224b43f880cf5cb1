"""`ralbuild verify-image`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.cli.options import add_report_options, chosen_report, stored_path
from ralbuild.errors import ImageError, UsageError

if TYPE_CHECKING:
    from ralbuild.image.reader import StoredImage
    from ralbuild.supply.layer_checks import Check
    from ralbuild.supply.verify_image import Requirement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("image", metavar="oci:DIR", help="an OCI layout folder")
    parser.add_argument("--tag", default="", help="which image, when there are several")
    parser.add_argument(
        "--key",
        type=Path,
        action="append",
        required=True,
        metavar="PUB",
        help="public key (PEM) that must have signed; several: any of them",
    )
    parser.add_argument(
        "--require",
        default="signature",
        metavar="LIST",
        help="what must be there and signed: signature,sbom,provenance; default: signature",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Check signature, provenance, bill of materials, every digest and the labels; 6 when one is not good."""
    from ralbuild.image.reader import open_image
    from ralbuild.report import format_bytes
    from ralbuild.signing import load_public_key
    from ralbuild.supply.verify_image import verify_image

    required = _required(options.require)
    keys = tuple(load_public_key(path) for path in options.key)
    report = chosen_report(options)
    with report.stage("verify") as stage, open_image(stored_path(options.image), options.tag) as image:
        digest, total, done = image.digest, _size(image), 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            report.progress(done, total, "B")

        checks = verify_image(image, keys, required, count)
        stage.summary = f"{len(checks)} checks, {format_bytes(done)} read"
    print(_json(digest, checks) if options.json else _text(digest, checks))
    return 0 if all(check.good for check in checks) else ImageError.exit_code


def _size(image: StoredImage) -> int:
    """Return the bytes that will be read; without the weights when they are not there, which a check says."""
    with contextlib.suppress(ImageError):
        image = image.mounted()
    return sum(layer.size for layer in image.layers)


def _required(text: str) -> frozenset[Requirement]:
    from ralbuild.supply.verify_image import REQUIREMENTS

    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = sorted(set(words) - set(REQUIREMENTS))
    if unknown or not words:
        found = repr(unknown[0]) if unknown else "nothing"
        raise UsageError(f"needs a list of {', '.join(REQUIREMENTS)}, found {found}", place="--require")
    return frozenset(name for name in REQUIREMENTS if name in words)


def _json(digest: str, checks: tuple[Check, ...]) -> str:
    answer = {
        "manifest": digest,
        "good": all(check.good for check in checks),
        "checks": [{"name": item.name, "good": item.good, "detail": item.detail} for item in checks],
    }
    return json.dumps(answer, indent=2)


def _text(digest: str, checks: tuple[Check, ...]) -> str:
    from ralbuild.report import printable

    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    green, red, off = ("\x1b[32m", "\x1b[1;31m", "\x1b[0m") if color else ("", "", "")
    lines = [f"image {digest}"]
    for check in checks:
        mark = f"{green}ok{off}    " if check.good else f"{red}FAILED{off}"
        lines.append(f"  {mark}  {printable(check.name)}: {printable(check.detail)}")
    bad = sum(not check.good for check in checks)
    lines.append("the image is good" if not bad else f"REFUSED: {bad} of {len(checks)} checks failed")
    return "\n".join(lines)
