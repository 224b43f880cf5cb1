"""Where a release's image comes from, and getting it into the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ralbuild.errors import ImageError, UsageError
from ralbuild.image.archive import archive_chunks
from ralbuild.image.reader import open_image
from ralbuild.image.stored import stored_image
from ralbuild.release.containers import ContainerHost
from ralbuild.release.references import HINT, is_by_digest

FORMS = "oci:DIR, archive:FILE, docker:NAME or REGISTRY/NAME@sha256:DIGEST"
_CHUNK = 1 << 20
_NEEDED = ("io.ralbuild.bundle", "io.ralbuild.target", "io.ralbuild.model", "io.ralbuild.weights.memory")


@dataclass(frozen=True, slots=True)
class Source:
    """An image to release.

    Attributes:
        reference: as the user wrote it.
        kind: ``oci``, ``archive``, ``docker`` or ``registry``.
        place: folder, file or name.
        name: which image of a layout or archive; may be empty.
    """

    reference: str
    kind: str
    place: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """An image that the engine has, with its labels."""

    image: str
    labels: dict[str, str]


def parse_source(text: str, name: str) -> Source:
    """Return the source that ``text`` names (`FORMS`).

    Raises:
        UsageError: when it is none of them; a registry needs a digest.
    """
    scheme, colon, rest = text.partition(":")
    if colon and rest and scheme in ("oci", "archive", "docker"):
        return Source(text, scheme, rest, name)
    if is_by_digest(text):
        return Source(text, "registry", text)
    if "/" in text and "@" not in text:
        raise UsageError(f"{text!r} has no digest", place="IMAGE", hint=HINT)
    raise UsageError(f"needs {FORMS}, found {text!r}", place="IMAGE")


def fetch(source: Source, host: ContainerHost) -> Found:
    """Put the image into the engine, unless it is there, and check that it is one of ours.

    Raises:
        ImageError: when it is not there, is not ours, or the engine has other content under its id.
    """
    if source.kind in ("oci", "archive"):
        with open_image(Path(source.place), source.name) as image:
            names = (image.config_digest, image.digest)  # the second with containerd
        known = next((name for name in names if host.find(name) is not None), "")
        wanted = known or host.load(_chunks(source))
        if wanted not in names:
            raise ImageError(f"the engine made {wanted} of it, needs {names[0]}", place=source.reference)
    elif source.kind == "registry":
        wanted = host.pull(source.place)
    else:
        wanted = host.identify(source.place)  # a name may mean another image tomorrow
    labels = host.find(wanted) if wanted else None
    if labels is None:
        hint = "`docker images` lists what is there"
        raise ImageError("the engine has no such image", place=source.reference, hint=hint)
    lacking = [name for name in _NEEDED if name not in labels]
    if lacking:
        hint = "release images that `ralbuild image` made"
        raise ImageError(f"lacks the label {lacking[0]}", place=source.reference, hint=hint)
    return Found(wanted, labels)


def _chunks(source: Source) -> Iterator[bytes]:
    if source.kind == "archive":
        with open(source.place, "rb") as file:  # noqa: PTH123
            while data := file.read(_CHUNK):
                yield data
        return
    yield from archive_chunks(stored_image(Path(os.path.realpath(source.place)), source.name), "")
