"""Rules of the serving side to the table that a server reads beside its image."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from ralbuild.config.model import Matcher
from ralbuild.config.regex import parse_regex
from ralbuild.config.runtime_rules import LoadedRuntimeRules
from ralbuild.contract.bundle import Rule
from ralbuild.contract.runtime_rules import FORMAT, RuntimeRules
from ralbuild.fold.rules import (
    REDACTION,
    KindRule,
    ProfileRules,
    StopRule,
    TextRule,
    matched,
    redaction,
    short_place,
)
from ralbuild.fold.transducer import TransducerBuilder, TransducerSize

SOURCE = "runtime_rules"


@dataclass(frozen=True, slots=True)
class FoldedRuntimeRules:
    """What a server reads, and how large it is."""

    rules: RuntimeRules
    size: TransducerSize


def fold_runtime_rules(loaded: LoadedRuntimeRules) -> FoldedRuntimeRules:
    """Compile a file; the same file gives the same table.

    Raises:
        CompileError: when the table outgrows its budget; names the heaviest rules.
    """
    rules: list[Rule] = []

    def add(kind: str, text: str, index: int) -> int:
        rules.append(Rule(kind, text, SOURCE, short_place(loaded.place(kind, index))))
        return len(rules) - 1

    file = loaded.file
    redactions = [redaction(item, add("redact", matched(item), at)) for at, item in enumerate(file.redact)]
    stops = [StopRule(add("stop", text, at), text.encode()) for at, text in enumerate(file.stop)]
    refusals = [_refusal(item, add("refuse", matched(item), at)) for at, item in enumerate(file.refuse)]
    output = ProfileRules(
        texts=tuple(rule for rule in redactions if isinstance(rule, TextRule)),
        kinds=tuple(rule for rule in redactions if isinstance(rule, KindRule)),
        stops=tuple(stops),
    )
    profiles = (output, ProfileRules(texts=tuple(refusals)))
    table, size = TransducerBuilder(profiles).build(len(rules))
    encoded = base64.b64encode(table).decode()
    return FoldedRuntimeRules(RuntimeRules(FORMAT, file.serial, tuple(rules), encoded), size)


def _refusal(item: Matcher, rule_id: int) -> TextRule:
    """Return a rule that counts what it matches; the text that it writes goes nowhere."""
    return TextRule(
        rule_id,
        REDACTION,
        item.text.encode() if item.text is not None else parse_regex(item.pattern or ""),
        ignore_case=not item.case_sensitive,
        whole_word=item.whole_words,
        replacement=b"",
    )
