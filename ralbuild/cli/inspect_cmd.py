"""`ralbuild inspect`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ralbuild.contract.bundle import Bundle
    from ralbuild.image.reader import StoredImage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "image", help="an OCI layout folder or an archive; oci: or archive: may stand before it"
    )
    parser.add_argument("--tag", default="", help="which image, when there are several")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print digests, labels, layers, and the compiled rules and kernels."""
    from ralbuild.contract.bundle import read_bundle
    from ralbuild.contract.codec import FormatError
    from ralbuild.contract.places import BUNDLE_FILE
    from ralbuild.errors import ImageError
    from ralbuild.image.reader import open_image

    path = Path(options.image.removeprefix("oci:").removeprefix("archive:"))
    with open_image(path, options.tag) as image:
        data = image.read_file(BUNDLE_FILE)
        if data is None:
            raise ImageError(f"holds no {BUNDLE_FILE}", place=str(path), hint="is it an image of ralbuild?")
        try:
            bundle = read_bundle(data)
        except FormatError as error:
            raise ImageError(str(error), place=str(path)) from None
        answer = _answer(image, bundle)
    print(json.dumps(answer, indent=2) if options.json else _text(answer))
    return 0


def _answer(image: StoredImage, bundle: Bundle) -> dict[str, Any]:
    from ralbuild.contract.codec import to_plain

    config = image.config.get("config") or {}
    return {
        "name": image.name,
        "manifest": image.digest,
        "config": image.config_digest,
        "user": config.get("User", ""),
        "entrypoint": config.get("Entrypoint", []),
        "labels": image.labels,
        "layers": [
            {"name": layer.name, "kind": layer.kind, "digest": layer.digest, "size": layer.size}
            for layer in image.layers
        ],
        "routes": to_plain(bundle.routes),
        "rules": to_plain(bundle.rules),
        "kernels": [
            {"name": kernel.name, "user": kernel.user, "archs": [item.arch for item in kernel.objects]}
            for kernel in bundle.kernels
        ],
    }


def _text(answer: dict[str, Any]) -> str:
    from ralbuild.report import format_bytes

    lines = [f"image     {answer['manifest']}", f"config    {answer['config']}"]
    if answer["name"]:
        lines.append(f"name      {answer['name']}")
    lines.append(f"user      {answer['user']}, entrypoint {' '.join(answer['entrypoint'])}")
    lines += ["", "layers"]
    for layer in answer["layers"]:
        lines.append(
            f"  {layer['digest'][7:19]}  {format_bytes(layer['size']):>8}  {layer['kind']:<8} {layer['name']}"
        )
    lines += ["", "labels"]
    lines += [f"  {name} = {value}" for name, value in sorted(answer["labels"].items())]
    lines += ["", "routes, first match wins"]
    lines += [f"  {item['priority']:>6}  {item['match']!r} -> {item['action']}" for item in answer["routes"]]
    lines += ["     any  default", "", f"compiled rules ({len(answer['rules'])})"]
    for rule in answer["rules"]:
        lines.append(f"  {rule['kind']:<8} {rule['text']!r}  {rule['source']}, {rule['place']}")
    lines += ["", "kernels"]
    lines += [f"  {item['name']}: {', '.join(item['archs'])}" for item in answer["kernels"]] or ["  none"]
    return "\n".join(lines)
