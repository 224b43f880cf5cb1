"""What rules mean, written a second time with `re` over the whole text: the fold tests' oracle.

It shares nothing with the automaton: no states, no hold-back, no byte classes.
"""

from __future__ import annotations

import re

from ralbuild.fold.rules import REDACTION, ProfileRules, TextRule

WORD = rb"[A-Za-z0-9_]"


def is_word(data: bytes, at: int) -> bool:
    return 0 <= at < len(data) and re.match(WORD, data[at : at + 1]) is not None


def at_boundaries(rule: TextRule, data: bytes, begin: int, end: int) -> bool:
    if not rule.whole_word:
        return True
    cuts_left = is_word(data, begin - 1) and is_word(data, begin)
    cuts_right = is_word(data, end - 1) and is_word(data, end)
    return not cuts_left and not cuts_right


def ends(rule: TextRule, regexes: dict[int, str], data: bytes, at: int, limit: int) -> list[int]:
    """Return where a match of ``rule`` that begins at ``at`` can end."""
    flags = re.IGNORECASE if rule.ignore_case else 0
    if isinstance(rule.pattern, bytes):
        match = re.compile(re.escape(rule.pattern), flags).match(data, at)
        found = [match.end()] if match else []
    else:
        pattern = re.compile(regexes[rule.id], flags | re.ASCII)
        text = data[at:].decode("utf-8", "surrogateescape")
        found, size = [], 0
        for count, char in enumerate(text, 1):
            if "\udc80" <= char <= "\udcff":  # a byte that is no UTF-8
                break
            size += len(char.encode())
            if pattern.fullmatch(text, 0, count):
                found.append(at + size)
    return [end for end in found if end <= limit and at_boundaries(rule, data, at, end)]


def longest(rules: list[TextRule], regexes: dict[int, str], data: bytes, at: int, limit: int):
    best = None
    for rule in rules:
        for end in ends(rule, regexes, data, at, limit):
            if best is None or end > best[0]:
                best = (end, rule)
    return best


def matches(rules, regexes, data: bytes, begin: int, end: int):
    at = begin
    while at < end:
        best = longest(rules, regexes, data, at, end)
        if best is None:
            at += 1
            continue
        yield at, best[0], best[1]
        at = best[0]


def escape_html(data: bytes) -> bytes:
    table = {b"&": b"&amp;", b"<": b"&lt;", b">": b"&gt;", b'"': b"&quot;", b"'": b"&#x27;"}
    return b"".join(table.get(bytes([byte]), bytes([byte])) for byte in data)


def write(rule: TextRule, text: bytes) -> bytes:
    if rule.replacement is not None:
        return rule.replacement
    return rule.before + (escape_html(text) if rule.escaped else text) + rule.after


def rewrite(
    profile: ProfileRules, data: bytes, regexes: dict[int, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return the output and the ids of the rules that matched, in text order."""
    regexes = regexes or {}
    redactions = [rule for rule in profile.texts if rule.level == REDACTION]
    markup = [rule for rule in profile.texts if rule.level != REDACTION]
    out, events, at = b"", [], 0
    fixed = list(matches(redactions, regexes, data, 0, len(data)))
    for begin, end, rule in [*fixed, (len(data), len(data), None)]:
        for left, right, mark in matches(markup, regexes, data, at, begin):
            out += data[at:left] + write(mark, data[left:right])
            events.append(mark.id)
            at = right
        out += data[at:begin]
        at = end
        if rule is not None:
            out += write(rule, data[begin:end])
            events.append(rule.id)
    if profile.append:
        out += profile.append
        events.append(profile.append_id)
    return out, events
