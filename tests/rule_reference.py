"""What rules mean, written a second time with `re` over the whole text: the fold tests' oracle.

It shares nothing with the automaton: no states, no hold-back, no bytes classes.
"""

from __future__ import annotations

import re

from ralbuild.fold.rules import REDACTION, ProfileRules, TextRule

WORD = rb"[A-Za-z0-9_]"


def compile_rule(rule: TextRule) -> re.Pattern[bytes]:
    body = re.escape(rule.literal)
    if rule.whole_word and re.match(WORD, rule.literal[:1]):
        body = rb"(?<!" + WORD + rb")" + body
    if rule.whole_word and re.match(WORD, rule.literal[-1:]):
        body += rb"(?!" + WORD + rb")"
    return re.compile(body, re.IGNORECASE if rule.ignore_case else 0)


def longest(patterns: list[tuple[re.Pattern[bytes], TextRule]], data: bytes, at: int, end: int):
    best = None
    for pattern, rule in patterns:
        match = pattern.match(data, at)
        if match and match.end() <= end and (best is None or match.end() > best[0]):
            best = (match.end(), rule)
    return best


def matches(patterns, data: bytes, begin: int, end: int):
    at = begin
    while at < end:
        best = longest(patterns, data, at, end)
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


def rewrite(profile: ProfileRules, data: bytes) -> tuple[bytes, list[int]]:
    """Return the output and the ids of the rules that matched, in text order."""
    compiled = [(compile_rule(rule), rule) for rule in profile.texts]
    redactions = [pair for pair in compiled if pair[1].level == REDACTION]
    markup = [pair for pair in compiled if pair[1].level != REDACTION]
    out, events, at = b"", [], 0
    fixed = list(matches(redactions, data, 0, len(data)))
    for begin, end, rule in [*fixed, (len(data), len(data), None)]:
        for left, right, mark in matches(markup, data, at, begin):
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
