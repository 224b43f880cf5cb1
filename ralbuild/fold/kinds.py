"""Named kinds of secrets: their forms as patterns, and their checks."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from ralbuild.config.regex import Node, parse_regex
from ralbuild.contract.transducer_table import LUHN, MOD_97

CHECKS = {"card": LUHN, "iban": MOD_97}
LONGEST = 512
"""Bytes that a match of a kind may have."""
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_LATIN = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
    "\u0370-\u0373\u0386\u0388-\u03ff\u0400-\u0481\u048a-\u052f"
)


def _ipv6() -> str:
    """Return RFC 4291's forms: eight groups, or ``::`` for one or more of them, IPv4 in the last two."""
    last = f"(?:{_H}:{_H}|{_IPV4})"
    forms = [f"(?:{_H}:){{6}}{last}"]
    for before in range(8):
        head = f"{_H}(?::{_H}){{{before - 1}}}" if before else ""
        after = 7 - before
        tails = [f"(?:{_H}:){{0,{after - 1}}}{_H}"] if after else []
        if after >= 2:
            tails.append(f"(?:{_H}:){{0,{after - 2}}}{_IPV4}")
        if before:
            tails.append("")
        forms.append(f"{head}::(?:{'|'.join(tails)})")
    return "|".join(forms)


def _ip() -> str:
    return f"{_IPV4}|{_ipv6()}"


def _card() -> str:
    """Return 13 to 19 digits, plain or in groups as cards print them, one space or hyphen between."""
    s = "[ -]"
    fours = f"[0-9]{{4}}{s}[0-9]{{4}}{s}[0-9]{{4}}{s}"
    forms = [
        "[0-9]{13,19}",
        f"{fours}[0-9]{{1,4}}",
        f"{fours}[0-9]{{4}}{s}[0-9]{{1,3}}",
        f"{fours}[0-9]{{5,7}}",
        f"[0-9]{{4}}{s}[0-9]{{6}}{s}[0-9]{{4,5}}",
    ]
    return "|".join(forms)


def _iban() -> str:
    """Return country, two check digits and the country's number of characters, plain or in fours."""
    forms: dict[int, list[str]] = {}
    for country, length in sorted(_lengths().items()):
        forms.setdefault(length, []).append(country)
    parts = []
    for length, countries in sorted(forms.items()):
        head = f"(?:{'|'.join(countries)})(?:0[2-9]|[1-8][0-9]|9[0-8])"
        groups, rest = divmod(length - 4, 4)
        tail = f"(?: [A-Z0-9]{{{rest}}})" if rest else ""
        parts.append(f"{head}(?:[A-Z0-9]{{{length - 4}}}|(?: [A-Z0-9]{{4}}){{{groups}}}{tail})")
    return "|".join(parts)


def _email() -> str:
    """Return the usual form: Latin, Greek or Cyrillic letters before the ``@``, a name of DNS after."""
    label = "(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\\.)"
    return f"[{_LATIN}_][{_LATIN}._%+'-]{{0,63}}@{label}{{1,4}}[A-Za-z]{{2,24}}"


def _phone() -> str:
    s = "[ .-]"
    return "|".join(
        [
            # +49 30 901820, +1 (212) 555-0100, 0049-30-901820: a country code, then 6 to 14 digits
            rf"(?:\+|00)[1-9][0-9]{{0,2}}{s}?(?:\([0-9]{{1,4}}\){s}?)?[0-9]{{1,5}}(?:{s}?[0-9]{{2,5}}){{1,4}}",
            # (212) 555-0100, 212-555-0100, 212.555.0100, 1-212-555-0100
            rf"(?:1{s})?(?:\([2-9][0-9]{{2}}\) ?|[2-9][0-9]{{2}}{s})[2-9][0-9]{{2}}{s}[0-9]{{4}}",
            # 030 901820, 0171-2345678, 020 7946 0958: a trunk 0, then groups
            rf"0[1-9][0-9]{{1,4}}{s}[0-9]{{3,8}}(?:{s}[0-9]{{2,5}}){{0,2}}",
        ]
    )


def _us_ssn() -> str:
    area = "(?:00[1-9]|0[1-9][0-9]|[1-578][0-9]{2}|6[0-57-9][0-9]|66[0-57-9])"
    group, serial = "(?:0[1-9]|[1-9][0-9])", "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
    return f"{area}(?:-{group}-| {group} ){serial}"


@cache
def _data() -> dict[str, Any]:
    text = resources.files("ralbuild.data").joinpath("kinds.toml").read_text("utf-8")
    return tomllib.loads(text)


def _lengths() -> dict[str, int]:
    return dict(_data()["iban"])


def _api_key() -> str:
    return "|".join(f"(?:{form})" for form in _data()["api_key"].values())


FORMS: dict[str, Callable[[], str]] = {
    "api_key": _api_key,
    "card": _card,
    "email": _email,
    "iban": _iban,
    "ip": _ip,
    "phone": _phone,
    "us_ssn": _us_ssn,
}


KIND_SAMPLES = {
    "api_key": b"AKIAIOSFODNN7EXAMPLE",
    "card": b"4111 1111 1111 1111, 4111 1111 1111 1112",
    "email": b"ada@example.org",
    "iban": b"GB82 WEST 1234 5698 7654 32",
    "ip": b"192.0.2.1, 2001:db8::1",
    "phone": b"+1 (212) 555-0100",
    "us_ssn": b"078-05-1120",
}
"""Published examples, of no person."""


@cache
def pattern_of(kind: str) -> Node:
    """Return the form of a kind as a pattern."""
    return parse_regex(FORMS[kind](), longest=LONGEST)
