"""Profiles to modes: which rules hold outside of spans and inside each of them, and the markers between.

A mode is what the transducer is in: the markers that it looks for, the redactions, the other text rules,
and what is written at the end. The first mode of a profile is the text outside of its spans.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ralbuild.contract.transducer_table import KEEP, MARK_BITS, STOP
from ralbuild.fold.patterns import byte_classes
from ralbuild.fold.rules import REDACTION, ProfileRules, Redaction, SpanRule, TextRule

OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Marker:
    """A text that ends a mode: rule id, text, `KEEP` and `STOP` flags, number of the mode that follows."""

    rule: int
    text: bytes
    flags: int
    target: int


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode: redactions in the order that decides ties, and the other text rules.

    ``dropped`` means that its text is not written at all.
    """

    profile: int
    texts: tuple[TextRule, ...]
    redactions: tuple[Redaction, ...]
    markers: tuple[Marker, ...]
    dropped: bool = False


def expand_modes(profiles: tuple[ProfileRules, ...]) -> tuple[tuple[Mode, ...], tuple[int, ...]]:
    """Return the modes of all profiles, and the first mode of each."""
    modes: list[Mode] = []
    starts: list[int] = []
    for number, rules in enumerate(profiles):
        first = len(modes)
        target = {span: first + 1 + index for index, span in enumerate(rules.spans)}
        openings = tuple(
            Marker(span.id, span.open, 0 if span.treatment == "drop" else KEEP, target[span])
            for span in rules.spans
        )
        modes.append(_plain(number, rules, OUTSIDE, openings, first))
        modes += [_inside(number, rules, span, target[span], first) for span in rules.spans]
        opened = next((span for span in rules.spans if span.opened), None)
        starts.append(target[opened] if opened else first)
    return tuple(modes), tuple(starts)


def _plain(profile: int, rules: ProfileRules, scope: str, markers: tuple[Marker, ...], here: int) -> Mode:
    holds = ("all", scope)
    stops = tuple(Marker(rule.id, rule.text, STOP, here) for rule in rules.stops if rule.scope in holds)
    texts = [rule for rule in rules.texts if rule.scope in holds]
    redactions: list[Redaction] = [rule for rule in rules.kinds if rule.scope in holds]
    redactions += [rule for rule in texts if rule.level == REDACTION]
    return Mode(
        profile,
        tuple(rule for rule in texts if rule.level != REDACTION),
        tuple(sorted(redactions, key=lambda rule: rule.id)),
        (*stops, *markers),
    )


def _inside(profile: int, rules: ProfileRules, span: SpanRule, here: int, outside: int) -> Mode:
    closing = Marker(span.id, span.close, 0 if span.treatment == "drop" else KEEP, outside)
    if span.treatment == "keep":
        return _plain(profile, rules, span.name, (closing,), here)
    return Mode(profile, (), (), (closing,), dropped=span.treatment == "drop")


@dataclass(frozen=True, slots=True)
class MarkerTable:
    """The marker automata of all modes: see `ralbuild.contract.transducer_table.Front`."""

    classes: tuple[int, ...]
    next: tuple[int, ...]
    actions: tuple[tuple[int, int], ...]
    markers: tuple[tuple[int, int, int], ...]
    starts: tuple[int | None, ...]
    longest: int


def build_markers(modes: tuple[Mode, ...]) -> MarkerTable:
    """Build one Aho-Corasick automaton a mode; a marker acts where it is first complete."""
    texts = [marker.text for mode in modes for marker in mode.markers]
    cls = byte_classes({frozenset((byte,)) for text in texts for byte in text})
    width = max(cls) + 1
    actions: dict[tuple[int, int], int] = {(1, -1): 0}
    rows: list[int] = []
    markers: list[tuple[int, int, int]] = []
    starts: list[int | None] = []
    for mode in modes:
        starts.append(len(rows) // width if mode.markers else None)
        if mode.markers:
            rows += _automaton(mode.markers, cls, len(rows) // width, len(markers), actions)
        markers += [(marker.rule, marker.flags, marker.target) for marker in mode.markers]
    return MarkerTable(
        tuple(cls),
        tuple(rows) or (0,) * width,
        tuple(actions),
        tuple(markers),
        tuple(starts),
        max(map(len, texts), default=0),
    )


def _automaton(
    markers: tuple[Marker, ...], cls: list[int], base: int, first: int, actions: dict[tuple[int, int], int]
) -> list[int]:
    children: list[dict[int, int]] = [{}]
    depth = [0]
    done: list[tuple[int, int] | None] = [None]
    """Per node, the longest marker that ends there: its length and number."""
    for number, marker in enumerate(markers):
        node = 0
        for byte in marker.text:
            if cls[byte] not in children[node]:
                children[node][cls[byte]] = len(children)
                children.append({})
                depth.append(depth[node] + 1)
                done.append(None)
            node = children[node][cls[byte]]
        done[node] = done[node] or (len(marker.text), first + number)
    width = max(cls) + 1
    goto = [[children[0].get(symbol, 0) for symbol in range(width)]] + [[] for _ in children[1:]]
    fail = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        node = queue.popleft()
        done[node] = done[node] or done[fail[node]]
        goto[node] = list(goto[fail[node]])
        for symbol, child in children[node].items():
            fail[child] = goto[fail[node]][symbol]
            goto[node][symbol] = child
            queue.append(child)
    out = []
    for node, row in enumerate(goto):
        for target in row:
            complete = done[target]
            size, number = complete if complete else (depth[target], -1)
            action = actions.setdefault((depth[node] + 1 - size, number), len(actions))
            out.append(base + (0 if complete else target) | action << MARK_BITS)
    return out
