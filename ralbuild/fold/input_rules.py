"""Token filters to rules and limits: what happens to users' text before it becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ralbuild.config.load import LoadedConfig
from ralbuild.config.model import InputReplaceConfig, MaxLengthConfig, TerminologyConfig
from ralbuild.config.regex import Node, parse_regex
from ralbuild.contract.bundle import CHARACTERS, RUN, TOKENS, InputLimit

AddRule = Callable[[str, str, str, str], int]
"""Numbers a rule of the kind, text, source and place given."""


def replacements(loaded: LoadedConfig, add: AddRule) -> Iterator[tuple[int, bytes | Node, bytes, bool, bool]]:
    """Yield every replacement of the token filters in file order.

    Yields:
        Rule id, pattern, what is written instead, then whether ASCII case is ignored and whole words meant.
    """
    for index, name, settings in loaded.filters:
        at = ("preprocessing", "token_filters", index, "config")
        if isinstance(settings, TerminologyConfig):
            flags = not settings.case_sensitive, settings.whole_words
            for term, canonical in settings.terms.items():
                rule = add("replace", term, name, loaded.place(*at, "terms", term))
                yield rule, term.encode(), canonical.encode(), *flags
            for canonical, synonyms in settings.synonyms.items():
                for number, term in enumerate(synonyms):
                    rule = add("replace", term, name, loaded.place(*at, "synonyms", canonical, number))
                    yield rule, term.encode(), canonical.encode(), *flags
        elif isinstance(settings, InputReplaceConfig):
            for number, item in enumerate(settings.rules):
                shown = item.text if item.text is not None else f"/{item.pattern}/"
                rule = add("replace", shown, name, loaded.place(*at, "rules", number))
                pattern = item.text.encode() if item.text is not None else parse_regex(item.pattern or "")
                yield rule, pattern, item.with_.encode(), not item.case_sensitive, item.whole_words


def input_limits(loaded: LoadedConfig) -> tuple[InputLimit, ...]:
    """Return the limits of the token filters in file order."""
    limits = []
    for _, name, settings in loaded.filters:
        given: dict[str, int | None] = {}
        if isinstance(settings, TerminologyConfig):
            given = {RUN: settings.max_length}
        elif isinstance(settings, MaxLengthConfig):
            given = {CHARACTERS: settings.characters, TOKENS: settings.tokens}
        limits += [InputLimit(name, most, unit) for unit, most in given.items() if most is not None]
    return tuple(limits)
