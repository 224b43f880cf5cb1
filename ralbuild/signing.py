"""Public keys and the signatures made with them. The only door to cryptography, which is an optional extra.

One kind of key is taken: an elliptic curve of NIST (P-256, P-384, P-521) as PEM, which is what both
cosign and OpenSSF model signing use. Signatures are ECDSA in DER, over the hash of the curve's size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ralbuild.errors import HostError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

EXTRA = "install the extra: pip install 'ralbuild[signing]'"
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key that `load_public_key` accepted; ``pem`` is its normal form (SubjectPublicKeyInfo)."""

    pem: bytes
    handle: EllipticCurvePublicKey = field(repr=False, compare=False)


def load_public_key(data: bytes, place: str) -> PublicKey:
    """Read a PEM public key; ``place`` names it in errors.

    Raises:
        UsageError: when it is no public key, or not one of the three curves.
        HostError: when the extra ``signing`` is not installed.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise HostError(f"signatures need cryptography: {error}", hint=EXTRA) from None
    if b"PRIVATE KEY" in data[:1000]:
        hint = "give the public half: openssl ec -in KEY -pubout"
        raise UsageError("needs a public key, found a private one", place=place, hint=hint)
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(
            "is not a public key in PEM form", place=place, hint="it begins with -----BEGIN PUBLIC KEY-----"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        kind = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__
        raise UsageError(f"needs a key on P-256, P-384 or P-521, found {kind}", place=place)
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(pem, key)


def verify(key: PublicKey, message: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` (ECDSA, DER) over ``message`` was made with the private half of ``key``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    sizes: dict[int, hashes.HashAlgorithm] = {
        256: hashes.SHA256(),
        384: hashes.SHA384(),
        521: hashes.SHA512(),
    }
    try:
        key.handle.verify(signature, message, ec.ECDSA(sizes[key.handle.curve.key_size]))
    except InvalidSignature:
        return False
    return True


def pae(kind: str, payload: bytes) -> bytes:
    """Return what a DSSE envelope signs: the pre-authentication encoding of its type and payload."""
    name = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)
