"""Signatures of an image that lies in a registry, read without the image."""

from __future__ import annotations

import io
from typing import IO

from ralbuild.contract.codec import FormatError
from ralbuild.image.artifacts import read_artifact
from ralbuild.image.registry.client import Repository
from ralbuild.image.store import FILE_LIMIT
from ralbuild.signing import PublicKey
from ralbuild.supply.signature import BUNDLE_TYPE, SIGNATURE_PREDICATE, read_bundle_statement


def is_signed(repository: Repository, digest: str, keys: tuple[PublicKey, ...]) -> bool:
    """Tell whether one of ``keys`` signed the manifest ``digest``, which names every other byte by digest.

    What else refers to the image, such as signatures of others, is passed over.

    Raises:
        ImageError: when the registry does not answer, or has other bytes than it says.
    """
    entries = repository.referrers(digest)
    manifests = {str(entry.get("digest")) for entry in entries}

    def open_blob(path: str) -> IO[bytes]:
        name = "sha256:" + path.rpartition("/")[2]  # stores open "blobs/sha256/HEX"
        if name in manifests:
            return io.BytesIO(repository.get_manifest(name)[0])
        return io.BytesIO(repository.get_blob(name, FILE_LIMIT))

    place = f"{repository.registry.host}/{repository.name}"
    for entry in entries:
        artifact = read_artifact(open_blob, entry, digest, place)
        if artifact is None or artifact.artifact_type != BUNDLE_TYPE:
            continue
        for _, _, data in artifact.layers:
            try:
                found = read_bundle_statement(data, keys)
            except FormatError:
                continue
            if found.signed and found.predicate_type == SIGNATURE_PREDICATE and digest in found.subjects:
                return True
    return False
