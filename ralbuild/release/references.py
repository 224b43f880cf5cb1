"""Images of a registry by digest, as every file and command of a release names them."""

from __future__ import annotations

import re

from ralbuild.errors import UsageError

HINT = "a tag may name another image tomorrow: give NAME@sha256:DIGEST"
_BY_DIGEST = re.compile(r"[a-z0-9][a-z0-9._/:-]*@sha256:[0-9a-f]{64}\Z")


def is_by_digest(image: str) -> bool:
    """Tell whether ``image`` is ``NAME@sha256:DIGEST``."""
    return _BY_DIGEST.match(image) is not None


def require_digest(image: str, option: str) -> None:
    """Refuse an image that the command line names in another way.

    Raises:
        UsageError: naming ``option``.
    """
    if not is_by_digest(image):
        found = f"{image!r} is no image by digest" if image else "is needed: an image by digest"
        raise UsageError(found, place=option, hint=HINT)
