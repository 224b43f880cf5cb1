"""Keys and signatures: what cosign and OpenSSF model signing make and check.

We sign with ECDSA on P-256 and SHA-256; the same key and bytes always give the same signature
(RFC 6979), so signing keeps a build reproducible. Signatures of others may use the larger curves,
with the hash of their size. Only this module imports cryptography.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ralbuild.contract.codec import sha256_hex
from ralbuild.digests import open_regular
from ralbuild.errors import UsageError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

_KEY_LIMIT = 1 << 16
_MAKE_ONE = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out sign.key"
_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
_DETERMINISTIC = ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


def load_private_key(path: Path, password: bytes | None = None) -> PrivateKey:
    """Return the P-256 private key of a PEM file.

    Raises:
        UsageError: when there is no such key in it, or ``password`` does not open it.
    """
    data = _read(path)
    if b"SIGSTORE PRIVATE KEY" in data or b"COSIGN PRIVATE KEY" in data:
        raise UsageError(
            "is a key in cosign's own encrypted format", place=str(path), hint=f"make a PEM key: {_MAKE_ONE}"
        )
    try:
        key = serialization.load_pem_private_key(data, password)
    except TypeError:
        what = "needs a password" if password is None else "is not encrypted, but a password is set"
        raise UsageError(what, place=str(path), hint="RALBUILD_KEY_PASSWORD holds it") from None
    except (ValueError, UnsupportedAlgorithm):
        what = "is not a private key in PEM format" + (", or the password is wrong" if password else "")
        raise UsageError(what, place=str(path), hint=_MAKE_ONE) from None
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise UsageError("is not a key for ECDSA on P-256", place=str(path), hint=_MAKE_ONE)
    return key


def load_public_key(path: Path) -> PublicKey:
    """Return the public key of a PEM file: ECDSA on P-256, P-384 or P-521.

    Raises:
        UsageError: when there is no such key in it.
    """
    hint = "openssl pkey -in sign.key -pubout -out sign.pub"
    data = _read(path)
    if b"PRIVATE KEY" in data:
        raise UsageError("needs a public key in PEM format, found a private one", place=str(path), hint=hint)
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError("is not a public key in PEM format", place=str(path), hint=hint) from None
    if not isinstance(key, PublicKey) or key.curve.name not in _HASHES:
        raise UsageError("is not a key for ECDSA on P-256, P-384 or P-521", place=str(path), hint=hint)
    return key


def sign(key: PrivateKey, data: bytes) -> bytes:
    """Return the DER signature of ``data``; the same key and data give the same bytes."""
    return key.sign(data, _DETERMINISTIC)


def verify(key: PublicKey, data: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` is one of ``data`` by ``key``."""
    try:
        key.verify(signature, data, ec.ECDSA(_HASHES[key.curve.name]))
    except InvalidSignature:
        return False
    return True


def key_id(key: PublicKey) -> str:
    """Return the SHA-256, in hex, of the key's DER form: its name in bundles and messages."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return sha256_hex(key.public_bytes(serialization.Encoding.DER, form))


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_KEY_LIMIT)
    except OSError as error:
        raise UsageError(f"the key cannot be read: {error.strerror}", place=str(path)) from None
