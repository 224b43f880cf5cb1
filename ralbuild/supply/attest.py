"""What is stored beside an image when it is signed: which artifacts, from which facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ralbuild.digests import DigestCache
from ralbuild.image.artifacts import Artifact, make_artifact
from ralbuild.image.assemble import Image
from ralbuild.image.bases import read_base_file
from ralbuild.image.disk import Note
from ralbuild.image.facts import ImageFacts, ReadFile, read_facts, stored_facts
from ralbuild.image.layers import Progress
from ralbuild.image.outputs import LayoutOutput
from ralbuild.image.own_digests import stored_weight_digests
from ralbuild.image.plan import FileEntry, ImagePlan
from ralbuild.image.reader import open_image
from ralbuild.image.stored import stored_image
from ralbuild.image.write import write_image
from ralbuild.supply.provenance import (
    PROVENANCE_PREDICATE,
    STATEMENT_MEDIA_TYPE,
    provenance,
    statement,
)
from ralbuild.supply.sbom import SBOM_PREDICATE, SBOM_TYPE, sbom_json
from ralbuild.supply.signature import bundle_artifact, signature_artifacts
from ralbuild.supply.wanted import Wanted

PREDICATE_TYPE = "in-toto.io/predicate-type"


def attest_image(
    image: Image, read_file: ReadFile, wanted: Wanted, place: str, weight_digests: Mapping[str, str]
) -> Image:
    """Return an image that is yet to be written with what is wanted beside it.

    Args:
        image: as assembled.
        read_file: finds a file that will be in it, by its absolute path.
        wanted: what to make.
        place: for messages.
        weight_digests: of the weight files themselves, by name; where one is not known, it is named by
            its layer alone.

    Raises:
        ImageError: when a file that says what is in the image is missing or wrong.
    """
    facts = read_facts(image.manifest, json.loads(image.config), read_file, place)
    facts = replace(facts, weight_digests=weight_digests)
    return replace(image, artifacts=(*image.companions, *make_artifacts(facts, wanted)))


def files_to_be(plan: ImagePlan) -> ReadFile:
    """Return what finds a file of a planned image: in its own small layers, else in its base."""
    ours = {
        f"/{entry.path}": entry.source
        for layer in (*(plan.weights.layers if plan.weights else ()), *plan.layers)
        for entry in layer.entries
        if isinstance(entry, FileEntry) and isinstance(entry.source, bytes)
    }
    base = plan.base
    return lambda path: ours[path] if path in ours or base is None else read_base_file(base, path)


def sign_stored(
    layout: Path, tag: str, wanted: Wanted, cache: DigestCache, progress: Progress | None, note: Note
) -> Image:
    """Store what is wanted beside an image of a layout, and return the image.

    Every byte of it that this machine has not hashed before is hashed first: what is signed is what is
    there. See `ralbuild.image.write.write_image` for the last three arguments.

    Raises:
        ImageError: when there is no such image of ralbuild, or a blob is damaged.
        HostError: when the layout cannot be written.
    """
    with open_image(layout, tag) as stored:
        facts = stored_facts(stored)
        if wanted.sbom or wanted.provenance:
            facts = replace(facts, weight_digests=stored_weight_digests(stored, facts.model))
        name, artifacts = stored.name, make_artifacts(facts, wanted)
    image = stored_image(layout, name)
    image = replace(image, artifacts=(*image.companions, *artifacts))
    write_image(image, (LayoutOutput(layout),), tag=name, cache=cache, progress=progress, note=note)
    return image


def make_artifacts(facts: ImageFacts, wanted: Wanted) -> tuple[Artifact, ...]:
    """Return the artifacts that are wanted; the same facts and key give the same bytes."""
    subject, key = facts.manifest_json, wanted.key
    found: list[Artifact] = []
    if key is not None:
        found += signature_artifacts(subject, facts.created, key)
    if wanted.sbom:
        bill = sbom_json(facts)
        # As it is, because that is what scanners look for; signed, because that is what can be trusted.
        found.append(make_artifact(subject, SBOM_TYPE, bill, {}))
        if key is not None:
            text = statement(facts, SBOM_PREDICATE, json.loads(bill))
            found.append(bundle_artifact(subject, text, SBOM_PREDICATE, facts.created, key))
    if wanted.provenance:
        text = statement(facts, PROVENANCE_PREDICATE, provenance(facts, wanted.builder))
        if key is not None:
            found.append(bundle_artifact(subject, text, PROVENANCE_PREDICATE, facts.created, key))
        else:
            found.append(
                make_artifact(subject, STATEMENT_MEDIA_TYPE, text, {PREDICATE_TYPE: PROVENANCE_PREDICATE})
            )
    return tuple(found)
