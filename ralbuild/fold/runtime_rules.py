"""Rules of the serving side to the table that a server reads beside its image."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from ralbuild.config.runtime_rules import LoadedRuntimeRules
from ralbuild.contract.bundle import Rule
from ralbuild.contract.runtime_rules import FORMAT, RuntimeRules
from ralbuild.fold.rules import (
    KindRule,
    ProfileRules,
    StopRule,
    TextRule,
    found_text,
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
    # A refusal only counts what it matches: what it writes goes nowhere.
    refusals = [found_text(item, add("refuse", matched(item), at)) for at, item in enumerate(file.refuse)]
    output = ProfileRules(
        texts=tuple(rule for rule in redactions if isinstance(rule, TextRule)),
        kinds=tuple(rule for rule in redactions if isinstance(rule, KindRule)),
        stops=tuple(stops),
    )
    profiles = (output, ProfileRules(texts=tuple(refusals)))
    table, size = TransducerBuilder(profiles, rules).build(len(rules))
    encoded = base64.b64encode(table).decode()
    return FoldedRuntimeRules(RuntimeRules(FORMAT, file.serial, tuple(rules), encoded), size)
