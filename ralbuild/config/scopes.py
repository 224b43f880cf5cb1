"""Spans and the rules that name them: checks that look at more than one part of a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ralbuild.config.model import Config, HtmlEnhancerConfig, Model, Span, Structure
from ralbuild.config.strict_yaml import Document, Path
from ralbuild.errors import Problem

OUTPUT: Path = ("postprocessing",)


def scope_problems(
    config: Config, transformers: Sequence[tuple[int, str, Model]], document: Document
) -> list[Problem]:
    """Return what is wrong with spans and with the `in` of rules, each with its place."""
    shared = config.postprocessing
    problems = list(_span_problems(OUTPUT, shared, (), document))
    problems += _scope_problems(_shared_scopes(shared, transformers), shared.spans, document)
    for name, action in config.actions.items():
        at: Path = ("actions", name)
        problems += _span_problems(at, action, shared.spans, document)
        own = [((*at, "redact", index, "in"), item.in_) for index, item in enumerate(action.redact)]
        own += _stop_scopes(at, action)
        problems += _scope_problems(own, [*action.spans, *shared.spans], document)
    return problems


def _shared_scopes(
    shared: Structure, transformers: Sequence[tuple[int, str, Model]]
) -> list[tuple[Path, str]]:
    out = _stop_scopes(OUTPUT, shared)
    for index, _, settings in transformers:
        at: Path = (*OUTPUT, "output_transformers", index, "config")
        if isinstance(settings, HtmlEnhancerConfig):
            out.append(((*at, "in"), settings.in_))
        for number, rule in enumerate(getattr(settings, "rules", ())):
            out.append(((*at, "rules", number, "in"), rule.in_))
    return out


def _stop_scopes(at: Path, owner: Structure) -> list[tuple[Path, str]]:
    return [
        ((*at, "stop", index, "in"), item.in_)
        for index, item in enumerate(owner.stop)
        if not isinstance(item, str)
    ]


def _span_problems(
    at: Path, owner: Structure, others: Sequence[Span], document: Document
) -> Iterator[Problem]:
    known = {span.name for span in others}
    opened = [span.name for span in others if span.begins == "inside"]
    for index, span in enumerate(owner.spans):
        place = document.place((*at, "spans", index))
        if span.name in known or span.name in ("all", "outside"):
            yield Problem(f"the span name {span.name!r} is taken", place, "give each span a name of its own")
        if span.begins == "inside" and opened:
            hint = "take `begins: inside` from one of them"
            yield Problem(f"a text cannot begin inside both {opened[0]!r} and {span.name!r}", place, hint)
        known.add(span.name)
        opened += [span.name] * (span.begins == "inside")


def _scope_problems(
    scopes: Sequence[tuple[Path, str]], spans: Sequence[Span], document: Document
) -> Iterator[Problem]:
    kept = {span.name for span in spans if span.do == "keep"}
    for path, scope in scopes:
        if scope not in ("all", "outside") and scope not in kept:
            names = ", ".join(["all", "outside", *sorted(kept)])
            yield Problem(
                f"no span that keeps its text is named {scope!r}", document.place(path), f"use {names}"
            )
