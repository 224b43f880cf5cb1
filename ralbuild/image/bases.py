"""`--base`: an image to build on, from a layout folder or a registry, chosen by digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.errors import UsageError
from ralbuild.image.oci import DIGEST
from ralbuild.image.plan import BaseImage
from ralbuild.image.reader import read_base
from ralbuild.image.registry.reference import Reference, parse_reference

if TYPE_CHECKING:
    from ralbuild.image.registry.connect import Registries

FORMS = "oci:DIR[@sha256:DIGEST] or HOST/NAME@sha256:DIGEST"


@dataclass(frozen=True, slots=True)
class LayoutBase:
    """An image of an OCI layout folder; ``digest`` says which, or is empty where there is one only."""

    path: Path
    digest: str = ""


BaseSource = LayoutBase | Reference


def parse_base(text: str) -> BaseSource:
    """Return the base that ``text`` names (`FORMS`).

    Raises:
        UsageError: when it is none, or a registry's image without a digest: a tag can move.
    """
    if text.startswith("oci:"):
        path, at, digest = text.removeprefix("oci:").rpartition("@")
        if at and DIGEST.fullmatch(digest):
            return LayoutBase(Path(path), digest)
        if text == "oci:":
            raise UsageError(f"needs {FORMS}, found {text!r}", place="--base")
        return LayoutBase(Path(text.removeprefix("oci:")))
    reference = parse_reference(text.removeprefix("registry:"), "--base")
    if not reference.digest:
        raise UsageError(
            f"needs a digest, found {text!r}: a tag can stand for another image tomorrow",
            place="--base",
            hint=f"{reference.name}@sha256:...; `skopeo inspect docker://{text}` prints it",
        )
    return reference


def open_base(source: BaseSource, registries: Registries) -> BaseImage:
    """Read manifest and config of the base; its layers are read when an output needs them.

    Raises:
        ImageError: when there is no such image, or what is read is not what its digest says.
    """
    if isinstance(source, LayoutBase):
        return read_base(source.path, digest=source.digest)
    from ralbuild.image.registry.base import pull_base

    return pull_base(registries.repository(source), source)
