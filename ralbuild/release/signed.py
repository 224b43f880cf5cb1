"""The signature of an image, checked before anything of it is loaded or pulled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ralbuild.errors import GateError, UsageError
from ralbuild.image.reader import open_image
from ralbuild.image.registry.connect import open_registries
from ralbuild.image.registry.reference import parse_reference
from ralbuild.release.source import Source
from ralbuild.signing import PublicKey, load_public_key
from ralbuild.supply.registry_signature import is_signed
from ralbuild.supply.verify_image import verify_image

_UNCHANGED = "nothing was changed"


def check_signature(source: Source, paths: Sequence[Path]) -> str:
    """Check that one of the keys in ``paths`` signed the image; return what was done.

    Of a layout or an archive every byte is read. Of a registry only the signature is: it names the manifest's
    digest, by which the engine pulls and checks the rest.

    Raises:
        GateError: naming what does not hold.
        UsageError: for an image of the engine, which keeps no signatures.
    """
    keys = tuple(load_public_key(path) for path in paths)
    if source.kind == "docker":
        hint = "release the layout, the archive or the image of a registry: signatures lie beside it there"
        raise UsageError(f"cannot be checked in {source.reference}", place="--key", hint=hint)
    if source.kind == "registry":
        return _check_in_registry(source, keys)
    with open_image(Path(source.place), source.name) as image:
        checks = verify_image(image, keys, frozenset(("signature",)))
    bad = next((check for check in checks if not check.good), None)
    if bad is not None:
        raise GateError(f"{bad.name}: {bad.detail}", place=source.reference, hint=_UNCHANGED)
    return f"{len(checks)} checks"


def _check_in_registry(source: Source, keys: tuple[PublicKey, ...]) -> str:
    reference = parse_reference(source.place, "IMAGE")
    with open_registries() as registries:
        if not is_signed(registries.repository(reference), reference.digest, keys):
            message = "signature: none by a key that was given"
            raise GateError(message, place=source.reference, hint=_UNCHANGED)
    return "signature of the manifest"
