"""Reading environment variables: text that has no meaning is refused by the variable's name."""

from __future__ import annotations

from collections.abc import Mapping

from ralbuild.runtime.errors import HostUnfitError


def read_choice(env: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """Return one of ``known``; the first when the variable is not set.

    Raises:
        HostUnfitError: for any other text.
    """
    text = env.get(name) or known[0]
    if text not in known:
        shown = ", ".join(repr(item) for item in known if item)
        raise HostUnfitError(f"needs one of {shown}; found {text!r}", place=name)
    return text


def read_number(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return a whole number from 0 to ``most``, ``default`` when the variable is not set.

    Raises:
        HostUnfitError: for any other text.
    """
    text = env.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdecimal() or int(text) > most:
        raise HostUnfitError(f"needs a number from 0 to {most}, found {text!r}", place=name)
    return int(text)
