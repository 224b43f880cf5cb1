"""The bill of materials: CycloneDX 1.6, with the model as a component and every file by digest.

It is computed from the image alone, so the same image gives the same bytes, on any machine and at any
time; only the hashes of weight files are not in it where no weight byte is read (`ralbuild rebase`).
https://cyclonedx.org/docs/1.6/json/ is the reference.
"""

from __future__ import annotations

import urllib.parse
import uuid
from collections.abc import Iterable
from typing import Any

from ralbuild.contract.bundle import Kernel, ObjectRef
from ralbuild.contract.codec import canonical_json
from ralbuild.contract.manifest import WeightEntry
from ralbuild.image.facts import ImageFacts, Package
from ralbuild.image.oci import BASE_NAME

SBOM_TYPE = "application/vnd.cyclonedx+json"
SBOM_PREDICATE = "https://cyclonedx.org/bom"

_NAMESPACE = uuid.UUID("5f1c6f2e-0d0f-5f0a-9d2b-7a3f1a0f6a51")
_EPOCH = "1970-01-01T00:00:00Z"
_PREFIX = "ralbuild:"
_LAYER = "layer"
LAYER_PROPERTY = f"{_PREFIX}{_LAYER}"
"""Of a weight file: the diff id of the layer that holds it, by which the image itself names it."""

Component = dict[str, Any]

_SPDX_IDS = """
AFL-3.0 AGPL-3.0-only Apache-2.0 BSD-2-Clause BSD-3-Clause BSD-3-Clause-Clear BSL-1.0 CC-BY-2.0 CC-BY-2.5
CC-BY-3.0 CC-BY-4.0 CC-BY-NC-2.0 CC-BY-NC-3.0 CC-BY-NC-4.0 CC-BY-NC-ND-3.0 CC-BY-NC-ND-4.0 CC-BY-NC-SA-2.0
CC-BY-NC-SA-3.0 CC-BY-NC-SA-4.0 CC-BY-ND-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0 CC0-1.0 ECL-2.0 EPL-1.0 EPL-2.0
EUPL-1.1 GPL-2.0-only GPL-3.0-only ISC LGPL-2.1-only LGPL-3.0-only LPPL-1.3c MIT MPL-2.0 MS-PL NCSA OFL-1.1
OSL-3.0 PostgreSQL Unlicense WTFPL Zlib
"""
SPDX = {name.lower().removesuffix("-only"): name for name in _SPDX_IDS.split()}
SPDX |= {"odbl": "ODbL-1.0", "odc-by": "ODC-By-1.0"}
"""Licence names of model cards that are SPDX licences (https://spdx.org/licenses/), and their SPDX ids."""


def sbom_json(facts: ImageFacts) -> bytes:
    """Return the bill of materials of an image as canonical JSON."""
    model, config, base = _model(facts), _config(facts), _base(facts)
    kernels = [_kernel(kernel) for kernel in facts.bundle.kernels]
    parts = [model, config, *kernels, base]
    packages = [_package(package) for package in facts.packages]
    image = _image(facts)
    value = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, facts.digest)}",
        "version": 1,
        "metadata": _metadata(facts, image),
        "components": parts + packages,
        "dependencies": sorted(
            [
                {"ref": image["bom-ref"], "dependsOn": sorted(part["bom-ref"] for part in parts)},
                {"ref": base["bom-ref"], "dependsOn": sorted(part["bom-ref"] for part in packages)},
                *({"ref": part["bom-ref"]} for part in (model, config, *kernels, *packages)),
            ],
            key=lambda item: str(item["ref"]),
        ),
        "compositions": [
            {"aggregate": "complete", "assemblies": sorted(part["bom-ref"] for part in (image, model))},
            {"aggregate": "complete" if packages else "unknown", "assemblies": [base["bom-ref"]]},
        ],
    }
    return canonical_json(value)


def spdx_name(card: str) -> str:
    """Return the SPDX id for a model card's licence, or the card's own word where there is none."""
    return SPDX.get(card.lower(), card)


def license_choice(name: str) -> list[dict[str, Any]]:
    """Return CycloneDX's ``licenses`` for a licence as the image's label has it; empty for none."""
    if not name:
        return []
    key = "id" if name in SPDX.values() else "name"
    return [{"license": {key: name, "acknowledgement": "declared"}}]


def _metadata(facts: ImageFacts, image: Component) -> dict[str, Any]:
    tool = {"type": "application", "name": "ralbuild", "version": facts.bundle.ralbuild}
    value: dict[str, Any] = {"tools": {"components": [tool]}, "component": image}
    if facts.created and facts.created != _EPOCH:
        value["timestamp"] = facts.created  # SOURCE_DATE_EPOCH of the build
    return value


def _image(facts: ImageFacts) -> Component:
    name = urllib.parse.quote(facts.bundle.model, safe="")
    return {
        "type": "container",
        "bom-ref": "image",
        "name": facts.bundle.model,
        "version": facts.digest,
        "purl": f"pkg:oci/{name.lower()}@{urllib.parse.quote(facts.digest, safe='')}",
        "hashes": _hashes(facts.digest.removeprefix("sha256:")),
        "properties": _properties(facts.labels.items(), ""),
    }


def _model(facts: ImageFacts) -> Component:
    model, engine = facts.model, facts.bundle.engine
    card = {
        "modelParameters": {
            "approach": {"type": "self-supervised"},
            "task": "text-generation",
            "architectureFamily": model.model_type,
            "modelArchitecture": model.architecture,
            "inputs": [{"format": "text"}],
            "outputs": [{"format": "text"}],
        }
    }
    # The digest of the canonical list of files stands for the model: it changes with every byte of them.
    value: Component = {
        "type": "machine-learning-model",
        "bom-ref": "model",
        "name": facts.bundle.model,
        "hashes": _hashes(facts.bundle.manifest.sha256),
        "modelCard": card,
        "components": [
            *(_weight(file, layer.sha256, facts) for layer in model.weights for file in layer.files),
            *(_file(f"model/{file.path}", file.path, file.sha256, file.size) for file in model.files),
        ],
        "properties": _properties(
            {
                "model.dtype": model.dtype,
                "model.parameters": model.parameters,
                "model.tensors": model.tensors,
                "model.vocabulary": model.vocab_size,
                "model.tokenizer": model.tokenizer_sha256,
                "model.hash": "sha256 of the canonical JSON list of its files, an object of the bundle",
                "engine.dtype": engine.dtype,
                "engine.max_seq_len": engine.max_seq_len,
            }.items()
        ),
    }
    licences = license_choice(facts.license)
    return value | ({"licenses": licences} if licences else {})


def _config(facts: ImageFacts) -> Component:
    bundle = facts.bundle
    tables = (("transducer", bundle.transducer), ("bans", bundle.bans), ("vocabulary", bundle.vocab))
    kinds = sorted({rule.kind for rule in bundle.rules})
    counts = {f"rules.{kind}": sum(rule.kind == kind for rule in bundle.rules) for kind in kinds}
    return {
        "type": "data",
        "bom-ref": "rules",
        "name": "compiled rules",
        "hashes": _hashes(facts.bundle_sha256),
        "components": [
            _file("rules/ral-config.yaml", "ral-config.yaml", bundle.config_sha256, None),
            *(_object(f"rules/{name}", f"{name} table", ref) for name, ref in tables),
        ],
        "properties": _properties({**counts, "routes": len(bundle.routes)}.items()),
    }


def _kernel(kernel: Kernel) -> Component:
    parts = []
    for item in kernel.objects:
        for form, ref in (("cubin", item.cubin), ("ptx", item.ptx)):
            parts.append(_object(f"kernel/{kernel.name}/{item.arch}.{form}", f"{item.arch}.{form}", ref))
    origin = "user" if kernel.user else "built-in"
    return {
        "type": "application",
        "bom-ref": f"kernel/{kernel.name}",
        "name": kernel.name,
        "components": parts,
        "properties": _properties(
            {
                "kernel.entry": kernel.entry,
                "kernel.origin": origin,
                "kernel.source": kernel.source_sha256,
            }.items()
        ),
    }


def _base(facts: ImageFacts) -> Component:
    digest = facts.base_digest
    value: Component = {
        "type": "container",
        "bom-ref": "base",
        "name": facts.annotations.get(BASE_NAME) or "base",
        "version": digest or "unknown",
    }
    if digest:
        value["hashes"] = _hashes(digest.removeprefix("sha256:"))
    return value


def _package(package: Package) -> Component:
    version = urllib.parse.quote(package.version, safe="")
    if package.kind == "deb":
        purl = f"pkg:deb/{package.distribution}/{package.name}@{version}?arch={package.architecture}"
    else:
        purl = f"pkg:pypi/{package.name}@{version}"
    value: Component = {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
    }
    if package.file:
        value["properties"] = _properties({"package.file": package.file}.items())
    if len(package.sha256) == 1:  # of several files that the lock allows, the list does not say which it was
        value["hashes"] = _hashes(package.sha256[0])
    return value


def _object(ref: str, name: str, target: ObjectRef) -> Component:
    return _file(ref, name, target.sha256, target.size)


def _file(ref: str, name: str, sha256: str, size: int | None) -> Component:
    value: Component = {"type": "file", "bom-ref": ref, "name": name, "hashes": _hashes(sha256)}
    return value if size is None else value | {"properties": _properties([("size", size)])}


def _weight(file: WeightEntry, layer: str, facts: ImageFacts) -> Component:
    """Return a weight file: by its own hash where that is known, and by the layer that holds it."""
    properties = _properties([("size", file.size), (_LAYER, f"sha256:{layer}")])
    value: Component = {"type": "file", "bom-ref": f"model/{file.path}", "name": file.path}
    own = facts.weight_digests.get(file.path)
    return value | ({"hashes": _hashes(own)} if own else {}) | {"properties": properties}


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _properties(items: Iterable[tuple[str, object]], prefix: str = _PREFIX) -> list[dict[str, str]]:
    return [{"name": f"{prefix}{name}", "value": str(value)} for name, value in sorted(items)]
