"""Where a release's image comes from, and getting it into the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ralbuild.errors import ImageError, UsageError
from ralbuild.image.archive import archive_chunks
from ralbuild.image.reader import open_image
from ralbuild.image.registry.base import read_image
from ralbuild.image.registry.connect import open_registries
from ralbuild.image.registry.reference import parse_reference
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
        found = _stored(source, host)
        wanted = found.image if host.find(found.image) is not None else host.load(_chunks(source))
        if wanted not in found.names:
            raise ImageError(f"the engine made {wanted} of it, needs {found.image}", place=source.reference)
    elif source.kind == "registry":
        wanted = host.pull(source.place)
    else:
        wanted = host.identify(source.place)  # a name may mean another image tomorrow
    return _of_engine(source, host, wanted)


def look(source: Source, host: ContainerHost) -> Found:
    """Read what `fetch` would find, and give the engine nothing: from the file, the registry or the engine.

    The image's id is its config's digest; an engine that keeps images in containerd names it by its manifest.

    Raises:
        ImageError: when it is not there, or is not ours.
    """
    if source.kind in ("oci", "archive"):
        stored = _stored(source, host)
        return _checked(source, Found(stored.image, stored.labels))
    wanted = host.identify(source.place)
    if wanted or source.kind == "docker":
        return _of_engine(source, host, wanted)
    reference = parse_reference(source.place, "IMAGE")
    with open_registries() as registries:
        image = read_image(registries.repository(reference), reference)
    return _checked(source, Found(image.config_digest, image.labels))


@dataclass(frozen=True, slots=True)
class _Stored:
    """An image of a layout or archive: what the engine calls it, or would, and its labels."""

    image: str
    names: tuple[str, str]
    labels: dict[str, str]


def _stored(source: Source, host: ContainerHost) -> _Stored:
    with open_image(Path(source.place), source.name) as image:
        names = (image.config_digest, image.digest)  # the second with containerd
        labels = image.labels
    return _Stored(next((name for name in names if host.find(name) is not None), names[0]), names, labels)


def _of_engine(source: Source, host: ContainerHost, wanted: str) -> Found:
    labels = host.find(wanted) if wanted else None
    if labels is None:
        hint = "`docker images` lists what is there"
        raise ImageError("the engine has no such image", place=source.reference, hint=hint)
    return _checked(source, Found(wanted, labels))


def _checked(source: Source, found: Found) -> Found:
    lacking = [name for name in _NEEDED if name not in found.labels]
    if lacking:
        hint = "release images that `ralbuild image` made"
        raise ImageError(f"lacks the label {lacking[0]}", place=source.reference, hint=hint)
    return found


def _chunks(source: Source) -> Iterator[bytes]:
    if source.kind == "archive":
        with open(source.place, "rb") as file:  # noqa: PTH123
            while data := file.read(_CHUNK):
                yield data
        return
    yield from archive_chunks(stored_image(Path(os.path.realpath(source.place)), source.name), "")
