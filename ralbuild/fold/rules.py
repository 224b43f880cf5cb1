"""From a checked config to the flat list of rules that the automata are built from."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ralbuild.config.load import LoadedConfig
from ralbuild.config.model import (
    Action,
    HtmlEnhancerConfig,
    Markup,
    MarkupConfig,
    Matcher,
    Redact,
    Replace,
    ReplaceConfig,
    Structure,
)
from ralbuild.config.regex import Node, can_match, parse_class, parse_regex
from ralbuild.contract.bundle import Profile, Route, Rule, Sampling
from ralbuild.contract.transducer_table import COPY, DROP, EMIT, EVENT
from ralbuild.errors import CompileError
from ralbuild.fold.bans import NO_LIMITS, Limits
from ralbuild.fold.input_rules import replacements
from ralbuild.fold.sampling import imposed_sampling

REDACTION, MARKUP = 0, 1
HTML_ENTITIES = ((b"&", b"&amp;"), (b"<", b"&lt;"), (b">", b"&gt;"), (b'"', b"&quot;"), (b"'", b"&#x27;"))
JSON_ESCAPES = (
    (b'"', b'\\"'),
    (b"\\", b"\\\\"),
    *((bytes([code]), json.dumps(chr(code))[1:-1].encode()) for code in range(32)),
)

Op = tuple[int, int | bytes]
"""One operation before strings are numbered: EMIT carries its bytes."""


@dataclass(frozen=True, slots=True)
class TextRule:
    """A pattern in a text and what becomes of it.

    Attributes:
        id: index into the bundle's rules; several literals may share one (escape).
        level: REDACTION wins over MARKUP wherever the two overlap, and writes a ``replacement``.
        pattern: a literal, or a regular expression.
        replacement: what is written instead; None copies the match between ``before`` and ``after``.
        escaped: characters of the copied match and what is written for them.
        scope: ``all``, ``outside`` of every span, or the name of the span in which it holds.
    """

    id: int
    level: int
    pattern: bytes | Node
    ignore_case: bool
    whole_word: bool
    replacement: bytes | None = None
    before: bytes = b""
    after: bytes = b""
    escaped: tuple[tuple[bytes, bytes], ...] = ()
    scope: str = "all"

    @property
    def rewrites_inside(self) -> bool:
        """True when the copied match holds characters that are written in another way."""
        literal = self.pattern if isinstance(self.pattern, bytes) else b""
        return self.replacement is None and any(text in literal for text, _ in self.escaped)

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
        if not self.rewrites_inside or not isinstance(self.pattern, bytes):
            return [(COPY, length)]
        entities = dict(self.escaped)
        out: list[Op] = []
        for byte in self.pattern:
            entity = entities.get(bytes([byte]))
            out += [(COPY, 1)] if entity is None else [(EMIT, entity), (DROP, 1)]
        return out


@dataclass(frozen=True, slots=True)
class KindRule:
    """A named kind of secret (`ralbuild.fold.kinds`) and what is written instead."""

    id: int
    kind: str
    replacement: bytes
    scope: str = "all"

    @property
    def shown(self) -> str:
        """The kind, for messages."""
        return self.kind


Redaction = TextRule | KindRule
"""What the stage of redactions looks for: text rules of that level, and named kinds."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """A text that ends the answer where it first appears."""

    id: int
    text: bytes
    scope: str = "all"


@dataclass(frozen=True, slots=True)
class SpanRule:
    """A part of the text between two markers; ``treatment`` is ``drop``, ``keep`` or ``exempt``."""

    id: int
    name: str
    open: bytes
    close: bytes
    treatment: str
    opened: bool = False


@dataclass(frozen=True, slots=True)
class ProfileRules:
    """The rules that apply together to one kind of text."""

    texts: tuple[TextRule, ...] = ()
    append: bytes = b""
    append_id: int = 0
    limits: Limits = NO_LIMITS
    kinds: tuple[KindRule, ...] = ()
    stops: tuple[StopRule, ...] = ()
    spans: tuple[SpanRule, ...] = ()


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


def matched(item: Matcher | Redact) -> str:
    """Return what an entry matches, for people."""
    kind = item.kind if isinstance(item, Redact) else None
    return kind or (item.text if item.text is not None else f"/{item.pattern}/")


def redaction(item: Redact, rule_id: int) -> TextRule | KindRule:
    """Return the rule of one entry of `redact`."""
    if item.kind is not None:
        return KindRule(rule_id, item.kind, item.with_.encode(), item.in_)
    return replace(found_text(item, rule_id), replacement=item.with_.encode(), scope=item.in_)


def found_text(item: Matcher | Redact, rule_id: int) -> TextRule:
    """Return the rule that takes away what the `text` or `pattern` of an entry matches, anywhere."""
    return TextRule(
        rule_id,
        REDACTION,
        item.text.encode() if item.text is not None else parse_regex(item.pattern or ""),
        ignore_case=not item.case_sensitive,
        whole_word=item.whole_words,
        replacement=b"",
    )


class _Collector:
    """Numbers rules as they are met, in file order."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded = loaded
        self.rules: list[Rule] = []
        self.escapes: set[int] = set()

    def add(self, kind: str, text: str, source: str, place: str) -> int:
        self.rules.append(Rule(kind, text, source, short_place(place)))
        return len(self.rules) - 1

    def transformers(self) -> list[TextRule]:
        """Return the rules of the built-in output transformers."""
        out: list[TextRule] = []
        for index, name, settings in self.loaded.enhancers:
            at = ("postprocessing", "output_transformers", index, "config")
            if isinstance(settings, HtmlEnhancerConfig):
                out += self._enhancer(name, settings, at)
            elif isinstance(settings, ReplaceConfig):
                out += [
                    self._text("replace", name, item, (*at, "rules", number), replacement=item.with_.encode())
                    for number, item in enumerate(settings.rules)
                ]
            elif isinstance(settings, MarkupConfig):
                out += [
                    self._text(
                        "markup", name, item, (*at, "rules", number),
                        before=item.before.encode(), after=item.after.encode(),
                    )
                    for number, item in enumerate(settings.rules)
                ]  # fmt: skip
        escapes = tuple(
            (rule.pattern, rule.replacement)
            for rule in out
            if rule.id in self.escapes and isinstance(rule.pattern, bytes) and rule.replacement is not None
        )
        for rule in out:
            self._check_escaped(rule, escapes)
        return [rule if rule.replacement is not None else replace(rule, escaped=escapes) for rule in out]

    def _check_escaped(self, rule: TextRule, escapes: tuple[tuple[bytes, bytes], ...]) -> None:
        """Refuse markup whose match could hold characters that must be escaped, unseen by the build."""
        if rule.replacement is not None or isinstance(rule.pattern, bytes):
            return
        letters = [text.decode() for text, _ in escapes if can_match(rule.pattern, text.decode())]
        if letters:
            raise CompileError(
                f"the pattern can match {letters[0]!r}, which 'escape' must write in another way",
                place=self.rules[rule.id].place,
                hint="leave the escaped characters out of the pattern, or give the texts as 'text'",
            )

    def _text(
        self, kind: str, source: str, item: Replace | Markup, at: tuple[str | int, ...], **written: bytes
    ) -> TextRule:
        return TextRule(
            self.add(kind, matched(item), source, self.loaded.place(*at)),
            MARKUP,
            item.text.encode() if item.text is not None else parse_regex(item.pattern or ""),
            ignore_case=not item.case_sensitive,
            whole_word=item.whole_words,
            scope=item.in_,
            **written,  # type: ignore[arg-type]
        )

    def _enhancer(self, name: str, settings: HtmlEnhancerConfig, at: tuple[str | int, ...]) -> list[TextRule]:
        out = []
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
                    scope=settings.in_,
                )
            )
        if settings.escape:
            table = JSON_ESCAPES if settings.escape == "json" else HTML_ENTITIES
            shown = '"\\' if settings.escape == "json" else "&<>\"'"
            rule_id = self.add("escape", shown, name, self.loaded.place(*at, "escape"))
            self.escapes.add(rule_id)
            out += [
                TextRule(rule_id, MARKUP, text, False, False, replacement=written, scope=settings.in_)
                for text, written in table
            ]
        return out

    def structure(
        self, source: str, owner: Structure, at: tuple[str, ...]
    ) -> tuple[tuple[StopRule, ...], tuple[SpanRule, ...]]:
        """Return the stop strings and spans of an action or of all outputs."""
        stops = []
        for index, item in enumerate(owner.stop):
            text, scope = (item, "all") if isinstance(item, str) else (item.text, item.in_)
            rule_id = self.add("stop", text, source, self.loaded.place(*at, "stop", index))
            stops.append(StopRule(rule_id, text.encode(), scope))
        spans = []
        for index, span in enumerate(owner.spans):
            shown = f"{span.open} .. {span.close}"
            rule_id = self.add("span", shown, source, self.loaded.place(*at, "spans", index))
            opened = span.begins == "inside"
            spans.append(
                SpanRule(rule_id, span.name, span.open.encode(), span.close.encode(), span.do, opened)
            )
        return tuple(stops), tuple(spans)

    def action(self, name: str, action: Action) -> ProfileRules:
        """Return the action's own rules; its bans are among the rule ids but not among the texts."""
        at = ("actions", name)
        texts, kinds = [], []
        for index, item in enumerate(action.redact):
            rule_id = self.add("redact", matched(item), name, self.loaded.place(*at, "redact", index))
            rule = redaction(item, rule_id)
            if isinstance(rule, KindRule):
                kinds.append(rule)
            else:
                texts.append(rule)
        stops, spans = self.structure(name, action, at)
        limits = self._limits(name, action)
        append, append_id = b"", 0
        if action.append:
            append = action.append.encode()
            append_id = self.add("append", action.append, name, self.loaded.place(*at, "append"))
        return ProfileRules(tuple(texts), append, append_id, limits, tuple(kinds), stops, spans)

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
    shared = tuple(collector.transformers())
    stops, spans = collector.structure("all outputs", loaded.config.postprocessing, ("postprocessing",))
    shared_ids = range(len(collector.rules))
    none = Sampling()
    profiles = [Profile("default", tuple(shared_ids), none)]
    sets = [ProfileRules(shared, stops=stops, spans=spans)]
    index_of: dict[str, int] = {}
    for name in sorted(loaded.actions):
        action = loaded.actions[name]
        first = len(collector.rules)
        own = collector.action(name, action)
        ids = (*range(first, len(collector.rules)), *shared_ids)
        index_of[name] = len(profiles)
        profiles.append(Profile(name, ids, imposed_sampling(action.sampling)))
        sets.append(
            replace(
                own,
                texts=(*own.texts, *shared),
                stops=(*own.stops, *stops),
                spans=(*own.spans, *spans),
            )
        )
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
