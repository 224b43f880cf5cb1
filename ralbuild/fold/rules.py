"""From a checked config to the flat list of rules that the automata are built from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ralbuild.config.load import LoadedConfig
from ralbuild.config.model import Action
from ralbuild.config.regex import Node, parse_class, parse_regex
from ralbuild.contract.bundle import Profile, Route, Rule, Sampling
from ralbuild.contract.transducer import COPY, DROP, EMIT, EVENT
from ralbuild.fold.bans import NO_LIMITS, Limits
from ralbuild.fold.input_rules import replacements
from ralbuild.fold.sampling import imposed_sampling

REDACTION, MARKUP = 0, 1
HTML_ENTITIES = ((b"&", b"&amp;"), (b"<", b"&lt;"), (b">", b"&gt;"), (b'"', b"&quot;"), (b"'", b"&#x27;"))

Op = tuple[int, int | bytes]
"""One operation before strings are numbered: EMIT carries its bytes."""


@dataclass(frozen=True, slots=True)
class TextRule:
    """A pattern in a text and what becomes of it.

    Attributes:
        id: index into the bundle's rules; several literals may share one (escape).
        level: REDACTION wins over MARKUP wherever the two overlap.
        pattern: a literal, or a regular expression.
        replacement: what is written instead; None copies the match between ``before`` and ``after``.
        escaped: the copied match itself is written with HTML entities.
    """

    id: int
    level: int
    pattern: bytes | Node
    ignore_case: bool
    whole_word: bool
    replacement: bytes | None = None
    before: bytes = b""
    after: bytes = b""
    escaped: bool = False

    @property
    def shown(self) -> str:
        """The pattern, for messages."""
        return self.pattern.decode(errors="replace") if isinstance(self.pattern, bytes) else f"rule {self.id}"

    def operations(self, length: int) -> tuple[Op, ...]:
        """Return what to do with a match of ``length`` pending bytes."""
        event: Op = (EVENT, self.id)
        if self.replacement is not None:
            return ((EMIT, self.replacement), (DROP, length), event)
        return ((EMIT, self.before), *self._copied(length), (EMIT, self.after), event)

    def _copied(self, length: int) -> list[Op]:
        entities = dict(HTML_ENTITIES)
        literal = self.pattern if isinstance(self.pattern, bytes) else b""
        if not self.escaped or not any(bytes([byte]) in entities for byte in literal):
            return [(COPY, length)]
        out: list[Op] = []
        for byte in literal:
            entity = entities.get(bytes([byte]))
            out += [(COPY, 1)] if entity is None else [(EMIT, entity), (DROP, 1)]
        return out


@dataclass(frozen=True, slots=True)
class ProfileRules:
    """The rules that apply together to one kind of text."""

    texts: tuple[TextRule, ...] = ()
    append: bytes = b""
    append_id: int = 0
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All rules of a config: one entry of ``profiles`` and ``rules_of`` per profile, same order."""

    rules: tuple[Rule, ...]
    profiles: tuple[Profile, ...]
    rules_of: tuple[ProfileRules, ...]
    routes: tuple[Route, ...]
    input_profile: int


def short_place(place: str) -> str:
    """Return ``line:column`` of ``file:line:column``; other text as it is."""
    parts = place.rsplit(":", 2)
    return place if len(parts) < 3 else f"{parts[1]}:{parts[2]}"


class _Collector:
    """Numbers rules as they are met, in file order."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded = loaded
        self.rules: list[Rule] = []

    def add(self, kind: str, text: str, source: str, place: str) -> int:
        self.rules.append(Rule(kind, text, source, short_place(place)))
        return len(self.rules) - 1

    def enhancers(self) -> list[TextRule]:
        out: list[TextRule] = []
        for index, name, settings in self.loaded.enhancers:
            at = ("postprocessing", "output_transformers", index, "config")
            for number, term in enumerate(settings.bold_terms):
                rule_id = self.add("bold", term, name, self.loaded.place(*at, "bold_terms", number))
                out.append(
                    TextRule(
                        rule_id,
                        MARKUP,
                        term.encode(),
                        ignore_case=not settings.case_sensitive,
                        whole_word=settings.whole_words,
                        before=b"<b>",
                        after=b"</b>",
                        escaped=settings.escape,
                    )
                )
            if settings.escape:
                rule_id = self.add("escape", "&<>\"'", name, self.loaded.place(*at, "escape"))
                out += [
                    TextRule(rule_id, MARKUP, literal, False, False, replacement=entity)
                    for literal, entity in HTML_ENTITIES
                ]
        return out

    def action(self, name: str, action: Action) -> ProfileRules:
        """Return the action's own rules; its bans are among the rule ids but not among the texts."""
        at = ("actions", name)
        texts = []
        for index, item in enumerate(action.redact):
            shown = item.text if item.text is not None else f"/{item.pattern}/"
            rule_id = self.add("redact", shown, name, self.loaded.place(*at, "redact", index))
            texts.append(
                TextRule(
                    rule_id,
                    REDACTION,
                    item.text.encode() if item.text is not None else parse_regex(item.pattern or ""),
                    ignore_case=not item.case_sensitive,
                    whole_word=item.whole_words,
                    replacement=item.with_.encode(),
                )
            )
        limits = self._limits(name, action)
        append, append_id = b"", 0
        if action.append:
            append = action.append.encode()
            append_id = self.add("append", action.append, name, self.loaded.place(*at, "append"))
        return ProfileRules(tuple(texts), append, append_id, limits)

    def _limits(self, name: str, action: Action) -> Limits:
        """Return what the action bans and allows."""
        at = ("actions", name)
        for index, phrase in enumerate(action.ban):
            self.add("ban", phrase, name, self.loaded.place(*at, "ban", index))
        allow = action.allow
        texts = (allow.texts or []) if allow else []
        for index, text in enumerate(texts):
            self.add("allow", text, name, self.loaded.place(*at, "allow", "texts", index))
        characters = allow.characters if allow else None
        if characters is not None:
            self.add("allow", f"[{characters}]", name, self.loaded.place(*at, "allow", "characters"))
        return Limits(
            tuple(phrase.encode() for phrase in action.ban),
            tuple(text.encode() for text in texts),
            parse_class(characters) if characters is not None else None,
            name,
        )

    def filters(self) -> list[TextRule]:
        return [
            TextRule(
                rule_id,
                MARKUP,
                pattern,
                ignore_case=ignore_case,
                whole_word=whole_word,
                replacement=replacement,
            )
            for rule_id, pattern, replacement, ignore_case, whole_word in replacements(self.loaded, self.add)
        ]


def collect_rules(loaded: LoadedConfig) -> RuleSet:
    """Return the rules of a config; profile 0 is the default, the last one is the input's."""
    collector = _Collector(loaded)
    shared = tuple(collector.enhancers())
    shared_ids = range(len(collector.rules))
    none = Sampling()
    profiles = [Profile("default", tuple(shared_ids), none)]
    sets = [ProfileRules(shared)]
    index_of: dict[str, int] = {}
    for name in sorted(loaded.actions):
        action = loaded.actions[name]
        first = len(collector.rules)
        own = collector.action(name, action)
        ids = (*range(first, len(collector.rules)), *shared_ids)
        index_of[name] = len(profiles)
        profiles.append(Profile(name, ids, imposed_sampling(action.sampling)))
        sets.append(replace(own, texts=(*own.texts, *shared)))
    first = len(collector.rules)
    sets.append(ProfileRules(tuple(collector.filters())))
    profiles.append(Profile("input", tuple(range(first, len(collector.rules))), none))
    routes = _routes(loaded, index_of)
    return RuleSet(tuple(collector.rules), tuple(profiles), tuple(sets), routes, len(profiles) - 1)


def _routes(loaded: LoadedConfig, index_of: dict[str, int]) -> tuple[Route, ...]:
    ordered = sorted(enumerate(loaded.config.routing.rules), key=lambda item: (item[1].priority, item[0]))
    return tuple(
        Route(
            rule.match,
            rule.action,
            rule.priority,
            index_of[rule.action],
            short_place(loaded.place("routing", "rules", index, "match")),
        )
        for index, rule in ordered
    )
