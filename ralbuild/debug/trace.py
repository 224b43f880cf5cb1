"""A text pushed through the rules token by token, with all that happens to each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ralbuild.contract.bans import BanSlot
from ralbuild.contract.bundle import Rule
from ralbuild.debug.rules import Rules
from ralbuild.errors import UsageError

END = -1
"""Index of the last step: the text has ended."""


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that decided something in a step; ``place`` is file:line:column in the config."""

    id: int
    kind: str
    text: str
    source: str
    place: str


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one token.

    Attributes:
        index: number of the token; `END` for what the end of the text decides.
        token: id; None without a model.
        data: bytes of the token.
        refused: a ban forbids the token here. The sampler takes another; the trace goes on without it.
        before, after: states of the transducer.
        matches: rules that were decided, in order; of a refused token the ban.
        emitted: bytes that are decided now.
        held: bytes that are read and not yet decided.
    """

    index: int
    token: int | None
    data: bytes
    refused: bool
    before: int
    after: int
    matches: tuple[Match, ...]
    emitted: bytes
    held: bytes

    def plain(self) -> dict[str, object]:
        """Return the step as JSON holds it; bytes that are no UTF-8 are shown as U+FFFD."""
        return {
            "index": None if self.index == END else self.index,
            "token": self.token,
            "text": self.data.decode("utf-8", "replace"),
            "bytes": self.data.hex(),
            "refused": self.refused,
            "state": [self.before, self.after],
            "rules": [
                {"id": item.id, "kind": item.kind, "text": item.text, "place": item.place}
                for item in self.matches
            ],
            "emitted": self.emitted.decode("utf-8", "replace"),
            "emitted_bytes": self.emitted.hex(),
            "held": self.held.decode("utf-8", "replace"),
            "held_bytes": self.held.hex(),
        }


def trace(rules: Rules, route: str, text: str) -> Iterator[Step]:
    """Yield a step per token, and one for the end of the text."""
    profile = rules.profile(route)
    slot = rules.machine.start(profile)
    bans = BanSlot(rules.bans, profile)
    read = bytearray()
    for index, (token, data) in enumerate(rules.tokens(text)):
        before = slot.state
        if not bans.allows(data):
            found = tuple(_bans_at(rules, profile, bytes(read[-1024:]), data))
            yield Step(index, token, data, True, before, before, found, b"", bytes(slot.pending))
            continue
        bans.advance(data)
        read += data
        out = slot.feed(data)
        matches = tuple(_match(rules, number) for number in slot.events)
        slot.events.clear()
        yield Step(index, token, data, False, before, slot.state, matches, out, bytes(slot.pending))
    before = slot.state
    out = slot.finish()
    matches = tuple(_match(rules, number) for number in slot.events)
    yield Step(END, None, b"", False, before, slot.state, matches, out, b"")


def _match(rules: Rules, number: int) -> Match:
    rule = rules.rule(number)
    return Match(number, rule.kind, rule.text, rule.source, rules.place(rule))


def _bans_at(rules: Rules, profile: int, read: bytes, data: bytes) -> Iterator[Match]:
    """Yield the phrases that the refused token would have completed."""
    whole = (read + data).lower()
    for number in rules.folded.rule_set.profiles[profile].rules:
        rule = rules.rule(number)
        phrase = rule.text.encode().lower()
        if rule.kind == "ban" and phrase in whole[max(0, len(read) - len(phrase) + 1) :]:
            yield _match(rules, number)


def find_rules(rules: Rules, wanted: str) -> frozenset[int]:
    """Return the rules that a breakpoint names: by id, line, line:column, kind or text.

    Raises:
        UsageError: when it names none; lists the rules there are.
    """
    every = rules.folded.rule_set.rules
    found = frozenset(number for number, rule in enumerate(every) if wanted in _names(number, rule))
    if found:
        return found
    shown = ", ".join(f"{number} ({rule.kind} {rule.text!r})" for number, rule in enumerate(every[:20]))
    raise UsageError(f"no rule is named {wanted!r}", place="--break", hint=f"rules: {shown or 'none'}")


def _names(number: int, rule: Rule) -> tuple[str, ...]:
    return str(number), rule.place, rule.place.split(":")[0], rule.kind, rule.text
