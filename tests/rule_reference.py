"""What rules mean, written a second time with `re` and `regex` over the whole text: the fold tests' oracle.

It shares nothing with the automata: no states, no hold-back, no classes. The three layers follow each
other: markers cut the text, then redactions (kinds, texts and patterns in one order), then markup.
"""

from __future__ import annotations

import re
from functools import lru_cache

import regex

from ralbuild.fold.kinds import FORMS
from ralbuild.fold.rules import REDACTION, KindRule, ProfileRules, TextRule

WORD = regex.compile(r"[\p{L}\p{M}\p{N}_]")
NO_SPACES = regex.compile(
    r"[\p{sc=Han}\p{sc=Hira}\p{sc=Kana}\u30fc\uff70\p{sc=Thai}\p{sc=Lao}\p{sc=Khmr}\p{sc=Mymr}\p{sc=Bopo}\p{sc=Yiii}]"
)


@lru_cache(8)
def characters(data: bytes) -> list[tuple[int, str]]:
    """Return (first byte, character) of everything; a broken byte comes as its surrogate escape."""
    out, at = [], 0
    for char in data.decode("utf-8", "surrogateescape"):
        out.append((at, char))
        at += len(char.encode("utf-8", "surrogateescape"))
    return out


@lru_cache(8)
def word_bytes(data: bytes) -> list[bool]:
    """Tell for each byte whether the character that it belongs to is a word character."""
    out: list[bool] = []
    for _, char in characters(data):
        word = bool(WORD.match(char)) and not NO_SPACES.match(char)
        out += [word] * len(char.encode("utf-8", "surrogateescape"))
    return out


def is_word(data: bytes, at: int) -> bool:
    return 0 <= at < len(data) and word_bytes(data)[at]


@lru_cache(4096)
def equal_letters(one: str, other: str) -> bool:
    return regex.fullmatch(regex.escape(one), other, regex.IGNORECASE) is not None


def at_boundaries(whole_word: bool, data: bytes, begin: int, end: int) -> bool:
    if not whole_word:
        return True
    cuts_left = is_word(data, begin - 1) and is_word(data, begin)
    cuts_right = is_word(data, end - 1) and is_word(data, end)
    return not cuts_left and not cuts_right


def literal_ends(rule: TextRule, data: bytes, at: int) -> list[int]:
    """Return where the literal can end: letter by letter, equal when `regex` says so, case ignored."""
    assert isinstance(rule.pattern, bytes)
    if not rule.ignore_case:
        return [at + len(rule.pattern)] if data.startswith(rule.pattern, at) else []
    fixed = rule.replacement is None and any(text in rule.pattern for text, _ in rule.escaped)
    for char in rule.pattern.decode("utf-8", "surrogateescape"):
        size = len(char.encode("utf-8", "surrogateescape"))
        text = data[at : at + 4].decode("utf-8", "surrogateescape")[:1]
        if not text or not equal_letters(char, text):
            return []
        taken = len(text.encode("utf-8", "surrogateescape"))
        if fixed and taken != size:
            return []
        at += taken
    return [at]


def ends(rule: TextRule, regexes: dict[int, str], data: bytes, at: int, limit: int) -> list[int]:
    """Return where a match of ``rule`` that begins at ``at`` can end."""
    if isinstance(rule.pattern, bytes):
        found = literal_ends(rule, data, at)
    else:
        pattern = re.compile(regexes[rule.id], re.IGNORECASE if rule.ignore_case else 0)
        found, size = [], 0
        text = data[at:].decode("utf-8", "surrogateescape")
        for count, char in enumerate(text, 1):
            if "\udc80" <= char <= "\udcff":  # a byte that is no UTF-8
                break
            size += len(char.encode())
            if pattern.fullmatch(text, 0, count):
                found.append(at + size)
    return [end for end in found if end <= limit and at_boundaries(rule.whole_word, data, at, end)]


def longest(rules: list[TextRule], regexes: dict[int, str], data: bytes, at: int, limit: int):
    best = None
    for rule in rules:
        for end in ends(rule, regexes, data, at, limit):
            if best is None or end > best[0]:
                best = (end, rule)
    return best


def matches(rules, regexes, data: bytes, begin: int, end: int):
    """Yield (begin, end, rule) between characters, leftmost, longest."""
    places = {first for first, _ in characters(data)} if rules else ()
    at = begin
    while at < end:
        best = longest(rules, regexes, data, at, end) if at in places else None
        if best is None:
            at += 1
            continue
        yield at, best[0], best[1]
        at = best[0]


def write(rule: TextRule, text: bytes) -> bytes:
    if rule.replacement is not None:
        return rule.replacement
    table = dict(rule.escaped)
    inner = b"".join(table.get(bytes([byte]), bytes([byte])) for byte in text)
    return rule.before + (inner if isinstance(rule.pattern, bytes) else text) + rule.after


def luhn(text: str) -> bool:
    """The table form of ISO/IEC 7812-1 annex B."""
    digits = [int(char) for char in text if char.isdigit()]
    doubled = [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    return sum(doubled[d] if i % 2 else d for i, d in enumerate(reversed(digits))) % 10 == 0


def mod_97(text: str) -> bool:
    """ISO 13616: remainder piece by piece."""
    turned = (text.replace(" ", "")[4:] + text.replace(" ", "")[:4]).upper()
    rest = 0
    for char in turned:
        rest = int(str(rest) + (char if char.isdigit() else str(ord(char) - 55))) % 97
    return rest == 1


CHECKED = {"card": luhn, "iban": mod_97}


def kind_ends(rule: KindRule, data: bytes, at: int) -> list[int]:
    """Return where a named kind that begins at ``at`` can end: the longest place that its check allows."""
    text = data[at : at + 1024].decode("utf-8", "surrogateescape")
    flags = re.IGNORECASE if rule.kind == "iban" else 0
    form = re.compile(FORMS[rule.kind](), flags | re.ASCII)
    for count in range(min(len(text), 512), 0, -1):
        if form.fullmatch(text, 0, count):
            end = at + len(text[:count].encode("utf-8", "surrogateescape"))
            if at_boundaries(True, data, at, end) and CHECKED.get(rule.kind, lambda _: True)(text[:count]):
                return [end]
    return []


def redaction_matches(rules, regexes, data: bytes):
    """Yield (begin, end, rule) of kinds, texts and patterns: leftmost, longest, the first rule on a tie."""
    places, at = {first for first, _ in characters(data)}, 0
    while rules and at < len(data):
        best = None
        for rule in rules if at in places else ():
            is_kind = isinstance(rule, KindRule)
            found = kind_ends(rule, data, at) if is_kind else ends(rule, regexes, data, at, len(data))
            for end in found:
                if best is None or (end, -rule.id) > (best[0], -best[1].id):
                    best = (end, rule)
        if best is None:
            at += 1
            continue
        yield at, best[0], best[1]
        at = best[0]


def rewrite_part(texts, kinds, data: bytes, regexes) -> tuple[bytes, list[int]]:
    """Apply kinds and text rules to a text between markers."""
    redactions = [*kinds, *(rule for rule in texts if rule.level == REDACTION)]
    markup = [rule for rule in texts if rule.level != REDACTION]
    out, events, at = b"", [], 0
    secrets = list(redaction_matches(redactions, regexes, data))
    for begin, end, rule in [*secrets, (len(data), len(data), None)]:
        for left, right, mark in matches(markup, regexes, data, at, begin):
            out += data[at:left] + write(mark, data[left:right])
            events.append(mark.id)
            at = right
        out += data[at:begin]
        at = end
        if rule is not None:
            out += rule.replacement
            events.append(rule.id)
    return out, events


def rewrite(
    profile: ProfileRules, data: bytes, regexes: dict[int, str] | None = None
) -> tuple[bytes, list[int]]:
    """Return the output and the ids of the rules that matched, in text order."""
    regexes = regexes or {}
    out, events = b"", []
    inside = next((span for span in profile.spans if span.opened), None)
    while True:
        scope = ("all", inside.name if inside else "outside")
        applies = inside is None or inside.treatment == "keep"
        markers = [(rule.text, rule) for rule in profile.stops if applies and rule.scope in scope]
        markers += [(inside.close, inside)] if inside else [(span.open, span) for span in profile.spans]
        found = [
            (data.find(text) + len(text), -len(text), text, rule) for text, rule in markers if text in data
        ]
        done = min(found, key=lambda item: item[:2]) if found else None
        part = data if done is None else data[: done[0] + done[1]]
        texts = [rule for rule in profile.texts if applies and rule.scope in scope]
        kinds = [rule for rule in profile.kinds if applies and rule.scope in scope]
        written, matched = rewrite_part(texts, kinds, part, regexes)
        dropped = inside is not None and inside.treatment == "drop"
        out += b"" if dropped else written
        events += matched
        if done is None:
            break
        events.append(done[3].id)
        data = data[done[0] :]
        if done[3] in profile.stops:
            break
        inside = None if inside else done[3]
        if done[3].treatment != "drop":
            out += done[2]
    if profile.append:
        out += profile.append
        events.append(profile.append_id)
    return out, events
