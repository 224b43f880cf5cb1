"""Names of images: ``HOST[:PORT]/REPOSITORY[:TAG][@sha256:HEX]``, and the URL a host stands for."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from ralbuild.errors import UsageError
from ralbuild.image.oci import DIGEST

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?"
REPOSITORY = rf"{_COMPONENT}(?:/{_COMPONENT})*"
TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"

_REFERENCE = re.compile(
    rf"(?P<host>{HOST})/(?P<repository>{REPOSITORY})(?::(?P<tag>{TAG}))?(?:@(?P<digest>{DIGEST.pattern}))?"
)
_NAME_LIMIT = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """An image, or a repository, in a registry.

    Attributes:
        host: name or address of the registry, with its port when one was given.
        repository: such as ``team/model``.
        tag: may be empty.
        digest: ``sha256:`` and hex; may be empty.
    """

    host: str
    repository: str
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.host}/{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")

    @property
    def name(self) -> str:
        """``HOST/REPOSITORY``."""
        return f"{self.host}/{self.repository}"

    def at(self, digest: str) -> Reference:
        """Return the same repository at ``digest``, without a tag."""
        return replace(self, tag="", digest=digest)


def parse_reference(text: str, place: str) -> Reference:
    """Return the reference that ``text`` means; the host must be written.

    Args:
        text: as the user gave it.
        place: which option, for the message.

    Raises:
        UsageError: when it is none, or names no registry.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or len(match["repository"]) > _NAME_LIMIT:
        raise UsageError(
            f"needs HOST/REPOSITORY[:TAG][@sha256:DIGEST], found {text[:300]!r}",
            place=place,
            hint="a repository has lower-case letters, digits and . _ - / only",
        )
    if not _names_a_host(match["host"]):
        raise UsageError(
            f"{match['host']!r} is not a registry: the host must be written out",
            place=place,
            hint="such as registry.example.com/team/model:v1, localhost:5000/model or 127.0.0.1:5000/model",
        )
    return Reference(match["host"], match["repository"], match["tag"] or "", match["digest"] or "")


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` (with or without a port) is this machine itself, without asking a name server."""
    name = split_port(host)[0].strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def split_port(host: str) -> tuple[str, int | None]:
    """Return name and port of ``host``; the brackets of an IPv6 address stay."""
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and not name.endswith(":"):
        return name, int(port)
    return host, None


def _names_a_host(host: str) -> bool:
    # Docker's rule: the first part of team/model is a host only when it looks like one.
    return "." in host or ":" in host or host == "localhost"
