"""Signatures of images and statements in the two forms that cosign knows, made and read without it.

New form (cosign 3): an in-toto statement in a DSSE envelope in a Sigstore bundle, stored as a referrer.
Old form (cosign 1 and 2): a "simple signing" text, stored under the name ``sha256-<digest>.sig``.
Both are made with a key; no certificate, no transparency log, no network.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.codec import FormatError, canonical_json, pae, parse_json
from ralbuild.image.artifacts import Artifact, make_artifact, make_tagged_artifact
from ralbuild.image.oci import digest_of
from ralbuild.signing import PrivateKey, PublicKey, key_id, sign, verify
from ralbuild.supply.provenance import STATEMENT_MEDIA_TYPE, STATEMENT_TYPE

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
BUNDLE_CONTENT = "dev.sigstore.bundle.content"
BUNDLE_PREDICATE = "dev.sigstore.bundle.predicateType"
SIGNATURE_PREDICATE = "https://sigstore.dev/cosign/sign/v1"
SIMPLE_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
SIMPLE_SIGNATURE = "dev.cosignproject.cosign/signature"


@dataclass(frozen=True, slots=True)
class Statement:
    """An in-toto statement and who vouches for it.

    Attributes:
        predicate_type, predicate: what it says.
        subjects: ``sha256:`` digests of what it says it about.
        signed: by one of the keys that were asked for.
        hint: SHA-256 (hex) of the key that the bundle names; empty when it names none.
    """

    predicate_type: str
    predicate: Any
    subjects: tuple[str, ...]
    signed: bool
    hint: str


def signature_artifacts(subject: bytes, created: str, key: PrivateKey) -> tuple[Artifact, ...]:
    """Return the signature of an image in both forms.

    Args:
        subject: the image's manifest.
        created: the image's own date, RFC 3339.
        key: to sign with.
    """
    digest = digest_of(subject)
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"digest": {"sha256": digest.removeprefix("sha256:")}}],
        "predicateType": SIGNATURE_PREDICATE,
        "predicate": {},
    }
    modern = bundle_artifact(subject, canonical_json(statement), SIGNATURE_PREDICATE, created, key)
    text = simple_signing(digest)
    annotations = {SIMPLE_SIGNATURE: _base64(sign(key, text))}
    return modern, make_tagged_artifact(subject, SIMPLE_TYPE, text, annotations, "sig")


def bundle_artifact(
    subject: bytes, statement: bytes, predicate_type: str, created: str, key: PrivateKey
) -> Artifact:
    """Return a statement about the image, signed, as the referrer that cosign 3 would store."""
    annotations = {
        BUNDLE_CONTENT: "dsse-envelope",
        BUNDLE_PREDICATE: predicate_type,
        "org.opencontainers.image.created": created,
    }
    return make_artifact(subject, BUNDLE_TYPE, sigstore_bundle(statement, key), annotations)


def sigstore_bundle(statement: bytes, key: PrivateKey) -> bytes:
    """Return a Sigstore bundle 0.3 that holds ``statement`` in a DSSE envelope signed by ``key``."""
    signature = sign(key, pae(STATEMENT_MEDIA_TYPE, statement))
    hint = _base64(bytes.fromhex(key_id(key.public_key())))
    value = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": _base64(statement),
            "payloadType": STATEMENT_MEDIA_TYPE,
            "signatures": [{"sig": _base64(signature)}],
        },
    }
    return canonical_json(value)


def simple_signing(digest: str) -> bytes:
    """Return the text that the old form signs."""
    value = {
        "critical": {
            "identity": {"docker-reference": ""},
            "image": {"docker-manifest-digest": digest},
            "type": "cosign container image signature",
        },
        "optional": None,
    }
    return canonical_json(value)


def read_bundle_statement(data: bytes, keys: tuple[PublicKey, ...]) -> Statement:
    """Read a Sigstore bundle that holds a statement, and tell whether one of ``keys`` signed it.

    Raises:
        FormatError: when it is something else.
    """
    value = parse_json(data, "bundle")
    try:
        envelope = value["dsseEnvelope"]
        payload, kind = _decoded(envelope["payload"]), envelope["payloadType"]
        signatures = [_decoded(item["sig"]) for item in envelope["signatures"]]
        hint = str(value.get("verificationMaterial", {}).get("publicKey", {}).get("hint", ""))
    except (KeyError, TypeError, AttributeError):
        raise FormatError("bundle", "holds no DSSE envelope") from None
    if kind != STATEMENT_MEDIA_TYPE:
        raise FormatError("bundle", f"holds {str(kind)[:80]!r}, not an in-toto statement")
    signed_bytes = pae(kind, payload)
    signed = any(verify(key, signed_bytes, signature) for key in keys for signature in signatures)
    return read_statement(payload, signed=signed, hint=_hex(hint))


def read_statement(data: bytes, *, signed: bool = False, hint: str = "") -> Statement:
    """Read an in-toto statement, version 1.

    Raises:
        FormatError: when it is something else.
    """
    value = parse_json(data, "statement")
    try:
        if value["_type"] != STATEMENT_TYPE:
            raise FormatError("statement", f"is of the type {str(value['_type'])[:80]!r}")
        subjects = tuple(f"sha256:{item['digest']['sha256']}" for item in value["subject"])
        return Statement(str(value["predicateType"]), value.get("predicate"), subjects, signed, hint)
    except (KeyError, TypeError):
        raise FormatError("statement", "is not an in-toto statement") from None


def simple_signature_is_good(
    text: bytes, annotations: Mapping[str, Any], digest: str, keys: tuple[PublicKey, ...]
) -> bool:
    """Tell whether a layer of the old form is a signature of the image ``digest`` by one of ``keys``.

    Raises:
        FormatError: when it is no such layer.
    """
    value = parse_json(text, "signature")
    try:
        signature = _decoded(annotations[SIMPLE_SIGNATURE])
        named = value["critical"]["image"]["docker-manifest-digest"]
        kind = value["critical"]["type"]
    except (KeyError, TypeError):
        raise FormatError("signature", "is not a signature of an image") from None
    good = any(verify(key, text, signature) for key in keys)
    return good and named == digest and kind == "cosign container image signature"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decoded(text: Any) -> bytes:
    if not isinstance(text, str):
        raise FormatError("bundle", "needs text in base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise FormatError("bundle", "holds bad base64") from None


def _hex(hint: str) -> str:
    try:
        return base64.b64decode(hint, validate=True).hex()
    except (binascii.Error, ValueError):
        return hint
