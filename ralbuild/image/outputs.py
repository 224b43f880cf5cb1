"""Where an image goes: `--output` and `--tag` as values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ralbuild.errors import UsageError
from ralbuild.image.registry.reference import HOST, REPOSITORY, TAG, Reference, parse_reference

FORMS = "oci:DIR, archive:FILE, docker or registry:HOST/NAME[:TAG]"

_TAG = re.compile(rf"(?P<name>(?:{HOST}/)?{REPOSITORY})(?::(?P<tag>{TAG}))?")
_NAME_LIMIT = 255


@dataclass(frozen=True, slots=True)
class LayoutOutput:
    """An OCI image layout folder."""

    path: Path


@dataclass(frozen=True, slots=True)
class ArchiveOutput:
    """One tar file that Docker, Podman, skopeo and umoci read."""

    path: Path


@dataclass(frozen=True, slots=True)
class DockerOutput:
    """The docker engine that ``DOCKER_HOST`` names, else this machine's."""


@dataclass(frozen=True, slots=True)
class RegistryOutput:
    """A repository of a registry; the reference has a tag and no digest."""

    reference: Reference


Output = LayoutOutput | ArchiveOutput | DockerOutput | RegistryOutput


def check_takes_companions(outputs: Iterable[Output]) -> None:
    """Raise UsageError for a docker engine, which holds images one by one, when there is more to write."""
    if any(isinstance(output, DockerOutput) for output in outputs):
        raise UsageError(
            "weights apart and a ModelPack manifest need a layout, an archive or a registry",
            place="--output",
            hint="--output oci:DIR, then `skopeo copy oci:DIR:NAME docker-daemon:NAME` for each image",
        )


def parse_output(text: str) -> Output:
    """Return the output that ``text`` names (`FORMS`), or raise UsageError."""
    scheme, colon, rest = text.partition(":")
    if scheme == "docker":
        if colon:
            raise UsageError(
                f"needs docker alone, found {text!r}", place="--output", hint=f"--tag {rest or 'NAME'}"
            )
        return DockerOutput()
    if scheme not in ("oci", "archive", "registry") or not colon or not rest:
        raise UsageError(f"needs {FORMS}, found {text!r}", place="--output")
    if scheme == "registry":
        return RegistryOutput(parse_target(rest))
    return LayoutOutput(Path(rest)) if scheme == "oci" else ArchiveOutput(Path(rest))


def parse_target(text: str) -> Reference:
    """Return where to push: ``HOST/NAME[:TAG]``, with the tag ``latest`` when there is none."""
    reference = parse_reference(text, "registry:")
    if reference.digest:
        hint = "what is pushed decides its digest"
        raise UsageError(f"needs HOST/NAME[:TAG], found {text!r}", place="registry:", hint=hint)
    return replace(reference, tag=reference.tag or "latest")


def parse_tag(text: str) -> str:
    """Return an image name such as ``team/model:v1`` with its tag (``latest`` when it has none).

    Raises:
        UsageError: when container engines would refuse the name.
    """
    match = _TAG.fullmatch(text)
    if match is None or len(match["name"]) > _NAME_LIMIT:
        raise UsageError(
            f"needs an image name such as team/model:v1, found {text!r}",
            place="--tag",
            hint="lower-case letters, digits and . _ - / only; a digest is not a tag",
        )
    return f"{match['name']}:{match['tag'] or 'latest'}"
