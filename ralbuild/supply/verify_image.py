"""`ralbuild verify-image`: is this image what somebody with this key built, byte for byte?

Every check runs and every failure is reported. Nothing of the image is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ralbuild.contract.bundle import object_refs
from ralbuild.contract.codec import FormatError, canonical_json, parse_json, sha256_hex
from ralbuild.contract.places import CONFIG_FILE, OBJECTS_DIR
from ralbuild.errors import ImageError
from ralbuild.image.artifacts import StoredArtifact
from ralbuild.image.facts import ImageFacts, stored_facts
from ralbuild.image.reader import StoredImage
from ralbuild.signing import PublicKey, key_id
from ralbuild.supply.layer_checks import Check, Progress, Reading
from ralbuild.supply.provenance import PROVENANCE_PREDICATE, provenance
from ralbuild.supply.sbom import LAYER_PROPERTY, SBOM_PREDICATE, SBOM_TYPE, sbom_json
from ralbuild.supply.signature import (
    BUNDLE_TYPE,
    SIGNATURE_PREDICATE,
    SIMPLE_TYPE,
    Statement,
    read_bundle_statement,
    simple_signature_is_good,
)

Requirement = Literal["signature", "sbom", "provenance"]
REQUIREMENTS: tuple[Requirement, ...] = ("signature", "sbom", "provenance")


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What the artifacts of an image came to: statements by anyone, and what was wrong with some."""

    statements: tuple[Statement, ...]
    old_signature: bool
    plain_sboms: tuple[bytes, ...]
    damaged: tuple[str, ...]

    def signed(self, predicate_type: str, digest: str) -> list[Statement]:
        """Return the statements of that type about ``digest`` that are signed by a key that was given."""
        return [
            item
            for item in self.statements
            if item.signed and item.predicate_type == predicate_type and digest in item.subjects
        ]

    def describes(self, digest: str) -> bool:
        """Tell whether a signed statement says what is in the image."""
        return any(self.signed(kind, digest) for kind in (PROVENANCE_PREDICATE, SBOM_PREDICATE))


def verify_image(
    image: StoredImage,
    keys: tuple[PublicKey, ...],
    required: frozenset[Requirement],
    progress: Progress | None = None,
) -> tuple[Check, ...]:
    """Check an image, reading every byte of it once; the result names every check, good or not.

    Args:
        image: open in its store.
        keys: public keys; one of them must have signed.
        required: what must be there and signed.
        progress: called with the number of bytes read in each step.
    """
    evidence = _collect(image, keys)
    checks = [_signature(image.digest, evidence, required)]
    checks += [Check("attestation", good=False, detail=text) for text in evidence.damaged]
    try:
        facts = stored_facts(image)
    except ImageError as error:
        return (*checks, Check("contents", good=False, detail=str(error)))
    reading = Reading(facts.model, progress, own=evidence.describes(facts.digest))
    layers = [reading.check(image, layer) for layer in image.layers]
    layers += _weights(image, reading)
    facts = replace(facts, weight_digests=reading.weight_digests)
    checks.append(_provenance(facts, evidence, required))
    checks.append(_sbom(facts, evidence, required))
    checks += [*layers, reading.model(), _labels(image, facts), _objects(image, facts)]
    return tuple(checks)


def _weights(image: StoredImage, reading: Reading) -> list[Check]:
    """Check the image that holds the weights; there is nothing to check where they are in this one."""
    try:
        weights = image.weights()
    except ImageError as error:
        return [Check("weights image", good=False, detail=error.problems[0].message)]
    if weights is None:
        return []
    name = "io.ralbuild.model.manifest"
    same = weights.labels.get(name) == image.labels.get(name)
    detail = weights.digest if same else f"holds another model: its label {name} differs"
    checks = [Check("weights image", good=same, detail=detail)]
    return checks + [reading.check(weights, layer) for layer in weights.layers]


def _collect(image: StoredImage, keys: tuple[PublicKey, ...]) -> _Evidence:
    statements: list[Statement] = []
    bills: list[bytes] = []
    damaged: list[str] = []
    old_signature = False
    ids = {key_id(key) for key in keys}
    try:
        artifacts = image.artifacts()
    except ImageError as error:
        return _Evidence((), False, (), (str(error),))
    for artifact in artifacts:
        try:
            if artifact.artifact_type == BUNDLE_TYPE:
                found = [read_bundle_statement(data, keys) for _, _, data in artifact.layers]
                statements += found
                if any(item.hint in ids and not item.signed for item in found):
                    damaged.append(f"{artifact.digest} names the given key, which did not sign it")
            elif artifact.artifact_type == SBOM_TYPE:
                bills += [data for _, _, data in artifact.layers]
            elif artifact.artifact_type == SIMPLE_TYPE:
                old_signature = _old_form(artifact, image.digest, keys) or old_signature
        except FormatError as error:
            damaged.append(f"{artifact.digest}: {error}")
    return _Evidence(tuple(statements), old_signature, tuple(bills), tuple(damaged))


def _old_form(artifact: StoredArtifact, digest: str, keys: tuple[PublicKey, ...]) -> bool:
    return any(
        simple_signature_is_good(text, annotations, digest, keys)
        for kind, annotations, text in artifact.layers
        if kind == SIMPLE_TYPE
    )


def _signature(digest: str, evidence: _Evidence, required: frozenset[Requirement]) -> Check:
    forms = ["bundle"] if evidence.signed(SIGNATURE_PREDICATE, digest) else []
    forms += ["cosign 2 signature"] if evidence.old_signature else []
    if forms:
        return Check("signature", good=True, detail=f"by the given key: {' and '.join(forms)}")
    others = {item.hint for item in evidence.statements if item.predicate_type == SIGNATURE_PREDICATE}
    what = "there is none"
    if others:
        what = f"none by the given key; found one that names the key {', '.join(sorted(others))[:80]}"
    return Check("signature", good="signature" not in required, detail=what)


def _provenance(facts: ImageFacts, evidence: _Evidence, required: frozenset[Requirement]) -> Check:
    found = evidence.signed(PROVENANCE_PREDICATE, facts.digest)
    if not found:
        return _absent("provenance", evidence, PROVENANCE_PREDICATE, required)
    for item in found:
        try:
            wrong = _wrong_inputs(facts, item.predicate)
        except (KeyError, TypeError, AttributeError):
            wrong = "it does not have the parts that SLSA v1 provenance has"
        if wrong:
            return Check("provenance", good=False, detail=f"does not fit the image: {wrong}")
    builder = found[0].predicate["runDetails"]["builder"]["id"]
    return Check("provenance", good=True, detail=f"signed; built by {builder}")


def _wrong_inputs(facts: ImageFacts, predicate: Any) -> str:
    """Compare the inputs that the statement names with those that the image names."""
    expected = provenance(facts)["buildDefinition"]
    found = predicate["buildDefinition"]
    for name in ("buildType", "externalParameters"):
        if found[name] != expected[name]:
            return f"{name} differs"
    theirs = {item["name"]: item["digest"] for item in found["resolvedDependencies"]}
    for item in expected["resolvedDependencies"]:
        if theirs.get(item["name"]) != item["digest"]:
            return f"the input {item['name']} differs"
    return ""


def _sbom(facts: ImageFacts, evidence: _Evidence, required: frozenset[Requirement]) -> Check:
    found = evidence.signed(SBOM_PREDICATE, facts.digest)
    if not found:
        return _absent("sbom", evidence, SBOM_PREDICATE, required)
    expected = _parts(parse_json(sbom_json(facts), "sbom"))
    for bill in (*(item.predicate for item in found), *_plain(evidence)):
        try:
            parts, own = _parts(bill), _weight_hashes(bill)
        except (KeyError, TypeError, AttributeError):
            return Check("sbom", good=False, detail="is not a CycloneDX bill of materials")
        if parts != expected:
            odd = sorted(expected ^ parts)[0]
            return Check("sbom", good=False, detail=f"does not fit the image: {odd[0]} {odd[1]}".strip())
        for name, digest in sorted(own.items()):
            if facts.weight_digests.get(name, digest) != digest:
                return Check("sbom", good=False, detail=f"does not fit the image: the hash of {name}")
    return Check("sbom", good=True, detail=f"signed; {len(expected)} parts, as in the image")


def _plain(evidence: _Evidence) -> list[Any]:
    out = []
    for data in evidence.plain_sboms:
        try:
            out.append(parse_json(data, "sbom"))
        except FormatError:
            out.append(None)
    return out


def _parts(bill: Any) -> set[tuple[str, str, str]]:
    """Return name, version and hashes of every component, at every depth; of a weight file, its layer."""
    return {
        (str(part["name"]), str(part.get("version", "")), _layer_of(part) or _hashes_of(part))
        for part in _components(bill)
    }


def _weight_hashes(bill: Any) -> dict[str, str]:
    """Return the hash of every weight file that the bill gives one of."""
    found = [part for part in _components(bill) if _layer_of(part) and part.get("hashes")]
    return {str(part["name"]): str(part["hashes"][0]["content"]) for part in found}


def _components(bill: Any) -> Iterator[Any]:
    todo = [bill["metadata"]["component"], *bill["components"]]
    while todo:
        part = todo.pop()
        yield part
        todo += part.get("components", [])


def _hashes_of(part: Any) -> str:
    return canonical_json(part.get("hashes", [])).decode()


def _layer_of(part: Any) -> str:
    return next((str(i["value"]) for i in part.get("properties", []) if i["name"] == LAYER_PROPERTY), "")


def _absent(name: Requirement, evidence: _Evidence, kind: str, required: frozenset[Requirement]) -> Check:
    others = any(item.predicate_type == kind for item in evidence.statements)
    what = "there is none by the given key" if others else "there is none that is signed"
    return Check(name, good=name not in required, detail=what)


def _labels(image: StoredImage, facts: ImageFacts) -> Check:
    """Compare what the labels say with what the image holds."""
    bundle = facts.bundle
    expected = {
        "io.ralbuild.version": bundle.ralbuild,
        "io.ralbuild.target": bundle.target,
        "io.ralbuild.model": bundle.model,
        "io.ralbuild.model.manifest": f"sha256:{bundle.manifest.sha256}",
        "io.ralbuild.model.parameters": str(facts.model.parameters),
        "io.ralbuild.bundle": f"sha256:{facts.bundle_sha256}",
        "io.ralbuild.config": f"sha256:{bundle.config_sha256}",
        "io.ralbuild.rules": str(len(bundle.rules)),
    }
    for name, value in expected.items():
        if facts.labels.get(name) != value:
            found = facts.labels.get(name)
            return Check("labels", good=False, detail=f"{name} needs {value}, found {found}")
    wanted = f"RAL_BUNDLE_SHA256={facts.bundle_sha256}"
    settings: Mapping[str, Any] = image.config.get("config") or {}
    if wanted not in (settings.get("Env") or []):
        return Check("labels", good=False, detail=f"the environment needs {wanted}")
    return Check("labels", good=True, detail=f"{len(expected)} labels fit the contents")


def _objects(image: StoredImage, facts: ImageFacts) -> Check:
    """Look at every object that the bundle names, and at the config that it was made from."""
    try:
        wanted = {f"{OBJECTS_DIR}/{ref.sha256}": ref.sha256 for ref in object_refs(facts.bundle)}
        wanted[CONFIG_FILE] = facts.bundle.config_sha256
        for name, sha256 in wanted.items():
            data = image.read_file(name)
            if data is None or sha256_hex(data) != sha256:
                what = "is missing" if data is None else "is another file"
                return Check("contents", good=False, detail=f"{name} {what}")
    except ImageError as error:
        return Check("contents", good=False, detail=str(error))
    return Check("contents", good=True, detail=f"{len(wanted)} compiled files, each by its digest")
