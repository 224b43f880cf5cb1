"""The licence that a model's card names: the one thing of a README.md that an image tells about its model."""

from __future__ import annotations

import re
from pathlib import Path

from ralbuild.digests import open_regular

_LIMIT = 1 << 20
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_NAME = r"[\"']?([A-Za-z0-9][A-Za-z0-9.+_-]{0,63})[\"']?[ \t]*(?:#.*)?"
_LICENSE = re.compile(rf"^license:[ \t]*(?:{_NAME}|\r?\n?[ \t]*-[ \t]*{_NAME})\r?$", re.MULTILINE)
_LICENSE_NAME = re.compile(rf"^license_name:[ \t]*{_NAME}\r?$", re.MULTILINE)


def read_license(folder: Path) -> str:
    """Return the licence in the metadata of ``README.md``, such as ``apache-2.0``; empty when it names none.

    ``license: other`` gives its ``license_name``. The card is text of the model's publisher and is
    believed, not checked.
    """
    try:
        with open_regular(folder / "README.md") as file:
            text = file.read(_LIMIT).decode("utf-8", errors="replace")
    except OSError:
        return ""
    matter = _FRONT_MATTER.match(text)
    if matter is None:
        return ""
    found = _LICENSE.search(matter[1])
    name = (found[1] or found[2]) if found else ""
    if name == "other":
        other = _LICENSE_NAME.search(matter[1])
        return other[1] if other else name
    return name or ""
