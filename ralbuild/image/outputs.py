"""Where an image goes: `--output` and `--tag` as values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ralbuild.errors import UsageError

FORMS = "oci:DIR or archive:FILE"
_LATER = ("docker", "registry")

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = (
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*(?::[0-9]+)?)"
)
_TAG = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_COMPONENT}(?:/{_COMPONENT})*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}))?"
)
_NAME_LIMIT = 255


@dataclass(frozen=True, slots=True)
class LayoutOutput:
    """An OCI image layout folder."""

    path: Path


@dataclass(frozen=True, slots=True)
class ArchiveOutput:
    """One tar file that Docker, Podman, skopeo and umoci read."""

    path: Path


Output = LayoutOutput | ArchiveOutput


def parse_output(text: str) -> Output:
    """Return the output that ``text`` names (`FORMS`), or raise UsageError."""
    scheme, colon, rest = text.partition(":")
    if scheme in _LATER:
        raise UsageError(
            f"the output {scheme!r} is not supported in this version",
            place="--output",
            hint=f"write {FORMS}; `docker load` and `skopeo copy --preserve-digests` read them",
        )
    if scheme not in ("oci", "archive") or not colon or not rest:
        raise UsageError(f"needs {FORMS}, found {text!r}", place="--output")
    return LayoutOutput(Path(rest)) if scheme == "oci" else ArchiveOutput(Path(rest))


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
