"""An upstream signature: ``model.sig`` beside the weights, as OpenSSF model signing writes it with a key.

The file is a Sigstore bundle (v0.3) around a DSSE envelope around an in-toto statement that lists a
digest for every file of the folder. Source: docs/model_signing_format.md of sigstore/model-transparency
and what its version 1.1.1 writes. Beyond that library, a file that goes into the image must be signed
even when the statement says to ignore its path.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.contract.codec import FormatError, pae, parse_json
from ralbuild.weights.files import Folder, read_small
from ralbuild.weights.findings import Findings

if TYPE_CHECKING:
    from ralbuild.signing import PublicKey

NAME = "model.sig"
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://model_signing/signature/v1.0"
PAYLOAD = "application/vnd.in-toto+json"
_GIT = (".git", ".gitattributes", ".github", ".gitignore")
"""What the signer leaves out unless told otherwise; none of it goes into an image."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


class _BundleError(Exception):
    """The file is not a signature that this version reads; the text says why."""


@dataclass(frozen=True, slots=True)
class Signed:
    """What a good signature promises: SHA-256 by file name, below the folder, and paths that it left out."""

    files: Mapping[str, str]
    ignored: tuple[str, ...]


def check_signature(folder: Folder, key: PublicKey | None, findings: Findings) -> Signed | None:
    """Check the signature itself, before any weight is read; None when there is nothing to hold files to."""
    path = folder.files.get(NAME)
    if path is None:
        if key is not None:
            findings.add("W902", "a key was given, but the folder has no signature", file=NAME)
        return None
    if key is None:
        findings.add("W901", "the publisher's signature was not checked", file=NAME)
        return None
    data = read_small(path, NAME, findings)
    if data is None:
        return None
    from ralbuild.signing import verify

    try:
        payload, signature = _open_bundle(data)
        if not verify(key, pae(PAYLOAD, payload), signature):
            findings.add("W904", "the signature was not made with this key, or was altered since", file=NAME)
            return None
        return _read_statement(payload)
    except _BundleError as error:
        findings.add("W903", str(error), file=NAME)
        return None


def _open_bundle(data: bytes) -> tuple[bytes, bytes]:
    """Return the payload and its signature."""
    bundle = _parse(data, "the bundle")
    envelope = bundle.get("dsseEnvelope")
    if not str(bundle.get("mediaType", "")).startswith("application/vnd.dev.sigstore.bundle"):
        raise _BundleError(f"needs a Sigstore bundle, found mediaType {str(bundle.get('mediaType'))[:60]!r}")
    if not isinstance(envelope, dict):
        raise _BundleError("holds no DSSE envelope")
    material = bundle.get("verificationMaterial")
    if not isinstance(material, dict) or "publicKey" not in material:
        raise _BundleError("was made with a certificate, not with a key: check it with the publisher's tool")
    if envelope.get("payloadType") != PAYLOAD:
        raise _BundleError(f"needs a payload of type {PAYLOAD}")
    signatures = envelope.get("signatures")
    if not (isinstance(signatures, list) and len(signatures) == 1 and isinstance(signatures[0], dict)):
        raise _BundleError("needs exactly one signature")
    return _base64(envelope.get("payload")), _base64(signatures[0].get("sig"))


def _base64(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise _BundleError("payload and signature must be base64") from None


def _parse(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = parse_json(data, what)
    except FormatError as error:
        raise _BundleError(f"{what} is not strict JSON: {error.message}") from None
    if not isinstance(value, dict):
        raise _BundleError(f"{what} must be a JSON object")
    return value


def _read_statement(payload: bytes) -> Signed:
    statement = _parse(payload, "the statement")
    predicate = statement.get("predicate")
    if statement.get("_type") != STATEMENT or statement.get("predicateType") != PREDICATE:
        raise _BundleError(
            f"needs the predicate {PREDICATE}, found {str(statement.get('predicateType'))[:80]!r}"
        )
    if not isinstance(predicate, dict) or not isinstance(predicate.get("resources"), list):
        raise _BundleError("the statement lists no files")
    serialization = predicate.get("serialization")
    method = serialization.get("method") if isinstance(serialization, dict) else None
    if not isinstance(serialization, dict) or method != "files":
        raise _BundleError(f"needs digests of whole files, found serialization {str(method)[:40]!r}")
    files: dict[str, str] = {}
    for item in predicate["resources"]:
        name, digest = _resource(item)
        if name in files:
            raise _BundleError(f"the statement lists {name[:80]!r} twice")
        files[name] = digest
    subjects = statement.get("subject")
    if subjects is None or not isinstance(subjects, list) or len(subjects) != 1:
        raise _BundleError("the statement needs exactly one subject")
    named = subjects[0].get("digest") if isinstance(subjects[0], dict) else None
    if not isinstance(named, dict) or named.get("sha256") != root_sha256(files.values()):
        raise _BundleError("the statement's root digest is not that of its files")
    ignored = serialization.get("ignore_paths")
    return Signed(files, tuple(map(str, ignored)) if isinstance(ignored, list) else ())


def _resource(item: Any) -> tuple[str, str]:
    name, digest = (item.get("name"), item.get("digest")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(digest, str):
        raise _BundleError("a signed file lacks its name or digest")
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _BundleError(f"{name[:80]!r} is no path below the folder")
    if item.get("algorithm") != "sha256":
        raise _BundleError(f"needs SHA-256 of every file, found {str(item.get('algorithm'))[:40]!r}")
    if not _SHA256.fullmatch(digest):
        raise _BundleError(f"the digest of {name[:80]!r} is no SHA-256")
    return name, digest


def root_sha256(digests: Iterable[str]) -> str:
    """Return the SHA-256 over files' SHA-256 digests (hex in, raw bytes hashed), in the given order.

    This is the subject of an OpenSSF model signature, where files come in the order of their names.
    """
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def compare_files(
    signed: Signed, folder: Folder, known: Mapping[str, str], shipped: frozenset[str], findings: Findings
) -> None:
    """Hold the folder to what was signed: changed, missing and unsigned files each have their finding.

    Args:
        signed: what the signature promises.
        folder: the model folder.
        known: SHA-256 of files that were read already, by name.
        shipped: names that go into the image; those must be signed whatever the statement ignores.
        findings: where to record.
    """
    there = folder.files | folder.below
    for name, wanted in sorted(signed.files.items()):
        if name not in there:
            findings.add("W905", "is signed, but not there", file=name, needed=wanted)
            continue
        found = known.get(name) or _sha256(there[name])
        if found is None:
            findings.add("W220", "cannot be read", file=name)
        elif found != wanted:
            findings.add("W906", "is not the file that was signed", file=name, found=found, needed=wanted)
    skipped = (NAME, *_GIT, *signed.ignored)
    for name in sorted(set(there) - set(signed.files)):
        passed_over = any(name == path or name.startswith(f"{path.rstrip('/')}/") for path in skipped)
        if name in shipped or not passed_over:
            findings.add("W907", "is in the folder, but was not signed", file=name)


def _sha256(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            return digest.hexdigest()
    except OSError:
        return None
