"""`ralbuild inspect`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.cli.options import add_rules_options, signed_rules, stored_path
from ralbuild.errors import ImageError

if TYPE_CHECKING:
    from ralbuild.image.facts import ImageFacts
    from ralbuild.image.reader import StoredImage
    from ralbuild.supply.runtime_rules import Checked

_BESIDE = {
    "https://sigstore.dev/cosign/sign/v1": "signature",
    "https://cyclonedx.org/bom": "signed bill of materials",
    "https://slsa.dev/provenance/v1": "signed provenance",
    "application/vnd.cyclonedx+json": "bill of materials",
    "application/vnd.in-toto+json": "provenance, not signed",
    "application/vnd.dev.cosign.simplesigning.v1+json": "signature for cosign 1 and 2",
}
_COMPANIONS = {"weights": "image of the weights", "modelpack": "ModelPack manifest"}
_SIMULATED = "io.ralbuild.simulated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "image", help="an OCI layout folder or an archive; oci: or archive: may stand before it"
    )
    parser.add_argument("--tag", default="", help="which image, when there are several")
    add_rules_options(parser, "also show this signed file of the serving side")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")


def run(options: argparse.Namespace) -> int:
    """Print digests, layers, the trust boundary, rules and kernels, what lies beside it, and labels."""
    from ralbuild.image.facts import stored_facts
    from ralbuild.image.reader import open_image

    later = signed_rules(options)
    with open_image(stored_path(options.image), options.tag) as image:
        answer = _answer(image, stored_facts(image), later)
    if options.html is not None:
        from ralbuild.cli.pages import inspect_page, write_page

        write_page(options.html, inspect_page(answer))
    print(json.dumps(answer, indent=2) if options.json else "\n".join(_text(answer)))
    return 0


def _answer(image: StoredImage, facts: ImageFacts, later: Checked | None) -> dict[str, Any]:
    from ralbuild.contract.codec import to_plain
    from ralbuild.image.boundary import NO_RUNTIME_RULES, trust_boundary
    from ralbuild.image.plan import WEIGHTS_LABEL

    said = later.summary if later is not None else NO_RUNTIME_RULES
    config, bundle = image.config.get("config") or {}, facts.bundle
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
        "weights_image": image.labels.get(WEIGHTS_LABEL, ""),
        "boundary": to_plain(trust_boundary(facts, said)),
        "routes": to_plain(bundle.routes),
        "rules": to_plain(bundle.rules),
        "runtime_rules": to_plain(later.rules.rules) if later is not None else None,
        "kernels": [
            {"name": kernel.name, "user": kernel.user, "archs": [item.arch for item in kernel.objects]}
            for kernel in bundle.kernels
        ],
        "sbom": _bill(facts),
        "simulated": image.labels.get(_SIMULATED, ""),
        "artifacts": _artifacts(image),
    }


def _artifacts(image: StoredImage) -> list[dict[str, str]]:
    """Return what lies beside the image; what cannot be read is said and does not hide the rest."""
    try:
        found = [
            *((_COMPANIONS.get(item.suffix, item.suffix), item.digest) for item in image.companions()),
            *((_beside(item.artifact_type, item.annotations), item.digest) for item in image.artifacts()),
        ]
    except ImageError as error:
        return [{"what": f"something damaged: {error}", "digest": ""}]
    return [{"what": what, "digest": digest} for what, digest in found]


def _bill(facts: ImageFacts) -> dict[str, Any]:
    """Return what a bill of materials of this image lists, in numbers."""
    kinds = [package.kind for package in facts.packages]
    return {
        "model files": len(facts.model.weight_files) + len(facts.model.files),
        "model license": facts.license or "not known",
        "Debian packages": kinds.count("deb"),
        "Python packages": kinds.count("pypi"),
        "kernels": len(facts.bundle.kernels),
        "rules": len(facts.bundle.rules),
    }


def _beside(kind: str, annotations: Any) -> str:
    kind = str(annotations.get("dev.sigstore.bundle.predicateType", kind))
    return _BESIDE.get(kind, kind)


def _text(answer: dict[str, Any]) -> Iterator[str]:
    from ralbuild.cli import text

    columns = text.width()
    facts = [
        (name, text.digest(answer[key], columns))
        for name, key in (("image", "manifest"), ("config", "config"))
    ]
    facts += [("name", answer["name"])] if answer["name"] else []
    weights = answer["weights_image"]
    facts += [("weights", text.digest(weights, columns))] if weights else []
    facts += [("user", answer["user"]), ("entrypoint", " ".join(answer["entrypoint"]))]
    facts += [("simulated", answer["simulated"])] if answer["simulated"] else []
    yield from text.rows(facts, columns, 0)
    yield from ("", "layers, from the lowest")
    yield from _layers(answer["layers"], columns)
    for by, title in (("image", "decided by the image"), ("serving", "left to the serving side")):
        yield from ("", title)
        yield from text.rows([(i["what"], i["detail"]) for i in answer["boundary"] if i["by"] == by], columns)
    yield from ("", "routes, first match wins")
    for item in answer["routes"]:
        yield text.cut(f"  {item['priority']:>6}  {item['match']!r} -> {item['action']}", columns)
    yield from ("     any  default", "", f"compiled rules ({len(answer['rules'])})")
    for rule in answer["rules"]:
        yield text.cut(f"  {rule['kind']:<8} {rule['text']!r}  {rule['source']}, {rule['place']}", columns)
    if answer["runtime_rules"] is not None:
        yield from ("", f"rules of the serving side, after them ({len(answer['runtime_rules'])})")
        for rule in answer["runtime_rules"]:
            yield text.cut(f"  {rule['kind']:<8} {rule['text']!r}  {rule['place']}", columns)
    yield from ("", "kernels")
    kernels = [(item["name"], ", ".join(item["archs"])) for item in answer["kernels"]]
    yield from text.rows(kernels or [("none", "")], columns)
    yield from ("", "bill of materials")
    yield from text.rows([(name, str(value)) for name, value in answer["sbom"].items()], columns)
    yield from ("", "beside the image")
    beside = [(item["what"], item["digest"][:19]) for item in answer["artifacts"]]
    yield from text.rows(beside or [("nothing", "")], columns)
    yield from ("", "labels")
    yield from text.rows(sorted(answer["labels"].items()), columns)


def _layers(layers: list[dict[str, Any]], columns: int) -> Iterator[str]:
    from ralbuild.cli import text
    from ralbuild.report import format_bytes

    largest = max((layer["size"] for layer in layers), default=0)
    for layer in layers:
        line = f"  {layer['digest'][7:19]}  {format_bytes(layer['size']):>8}  {layer['kind']:<8}"
        name = text.cut(layer["name"], columns - len(line) - 1)
        room = 44 if columns >= 90 else 0
        yield f"{line} {name:<{room}} {text.bar(layer['size'], largest, columns)}".rstrip()
