"""Where an image comes from: an in-toto statement with a SLSA v1 provenance predicate.

https://slsa.dev/spec/v1.0/provenance and https://github.com/in-toto/attestation are the references. No
clock is in it: the same inputs give the same statement. With ``SOURCE_DATE_EPOCH`` that date is in it.
"""

from __future__ import annotations

from typing import Any

from ralbuild.contract.codec import canonical_json
from ralbuild.image.facts import ImageFacts
from ralbuild.pins import load_pins
from ralbuild.supply.wanted import LOCAL_BUILDER

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
STATEMENT_MEDIA_TYPE = "application/vnd.in-toto+json"
PROVENANCE_PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:ralbuild:build:image:v1"
"""docs/supply.md says what its parameters mean."""

_EPOCH = "1970-01-01T00:00:00Z"


def statement(facts: ImageFacts, predicate_type: str, predicate: Any) -> bytes:
    """Return the in-toto statement that ``predicate`` is true of the image, as canonical JSON."""
    value = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": facts.bundle.model, "digest": {"sha256": facts.digest.removeprefix("sha256:")}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    }
    return canonical_json(value)


def provenance(facts: ImageFacts, builder: str = LOCAL_BUILDER) -> dict[str, Any]:
    """Return the SLSA v1 predicate of an image that was just built.

    Args:
        facts: of the image.
        builder: URI that names who ran the build and what can be trusted of it.
    """
    metadata = {}
    if facts.created != _EPOCH:
        metadata = {"startedOn": facts.created, "finishedOn": facts.created}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": _parameters(facts),
            "internalParameters": _toolchain(),
            "resolvedDependencies": _dependencies(facts),
        },
        "runDetails": {
            "builder": {"id": builder, "version": {"ralbuild": facts.bundle.ralbuild}},
            "metadata": metadata,
            "byproducts": [
                {"name": "bundle.json", "digest": {"sha256": facts.bundle_sha256}},
                {"name": "model manifest", "digest": {"sha256": facts.bundle.manifest.sha256}},
            ],
        },
    }


def _parameters(facts: ImageFacts) -> dict[str, Any]:
    bundle = facts.bundle
    return {
        "archs": sorted({item.arch for kernel in bundle.kernels for item in kernel.objects}),
        "config": {"sha256": bundle.config_sha256},
        "model": bundle.model,
        "packing": facts.labels.get("io.ralbuild.packing", ""),
        "sourceDateEpoch": facts.created,
        "target": bundle.target,
    }


def _toolchain() -> dict[str, Any]:
    pins = load_pins().toolchain
    return {
        "ptxas": {"version": pins.ptxas_version, "sha256": pins.ptxas_sha256},
        "triton": {"least": pins.triton_least, "below": pins.triton_below},
    }


def _dependencies(facts: ImageFacts) -> list[dict[str, Any]]:
    """Return every input by digest: base, model files, config, kernel sources.

    A weight file is there when its own digest is known, as it is in a build that is asked for this.
    """
    found = [_dependency("ral-config.yaml", facts.bundle.config_sha256)]
    if facts.base_digest:
        found.append(_dependency("base", facts.base_digest.removeprefix("sha256:")))
    found += [_dependency(f"model/{name}", sha256) for name, sha256 in facts.weight_digests.items()]
    found += [_dependency(f"model/{file.path}", file.sha256) for file in facts.model.files]
    found += [_dependency(f"kernel/{kernel.name}", kernel.source_sha256) for kernel in facts.bundle.kernels]
    return sorted(found, key=lambda item: str(item["name"]))


def _dependency(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}
