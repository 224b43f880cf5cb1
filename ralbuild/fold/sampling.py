"""What an action imposes on sampling, as the bundle holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ralbuild.config import model as config
from ralbuild.config.load import LoadedConfig
from ralbuild.contract.bundle import BOUNDED_VALUES, Bounds, Profile, Sampling, TokenBias
from ralbuild.errors import ConfigError, Problem


def imposed_sampling(wanted: config.Sampling) -> Sampling:
    """Return bounds and seed; biases wait for a vocabulary (`resolve_biases`)."""
    bounds: dict[str, Any] = {}
    for name in BOUNDED_VALUES:
        span: config.Range | None = getattr(wanted, name)
        if span is not None:
            least, most = config.SAMPLING_LIMITS[name]
            bounds[name] = Bounds(
                float(least if span.min is None else span.min), float(most if span.max is None else span.max)
            )
    if wanted.greedy:
        bounds["temperature"] = Bounds(0.0, 0.0)
    return Sampling(seed=wanted.seed, **bounds)


def resolve_biases(
    profiles: Sequence[Profile], loaded: LoadedConfig, tokens: Sequence[bytes]
) -> tuple[Profile, ...]:
    """Return the profiles with the biases of their actions, as token ids.

    Raises:
        ConfigError: for an id beyond the tokenizer, a text that is not one token, or a token twice.
    """
    problems: list[Problem] = []
    out = []
    ids_of: dict[bytes, list[int]] = {}
    if any(action.sampling.logit_bias for action in loaded.actions.values()):
        for number, token in enumerate(tokens):
            ids_of.setdefault(token, []).append(number)
    for profile in profiles:
        action = loaded.actions.get(profile.name)
        found: dict[int, float] = {}
        for index, item in enumerate(action.sampling.logit_bias if action else ()):
            place = loaded.place("actions", profile.name, "sampling", "logit_bias", index)
            ids, problem, hint = _ids(item, ids_of, len(tokens))
            if not problem and not found.keys().isdisjoint(ids):
                problem, hint = f"token {ids[0]} has a bias already", "keep one of its entries"
            if problem:
                problems.append(Problem(problem, place, hint))
            found |= dict.fromkeys(ids, item.bias)
        biases = tuple(TokenBias(token, bias) for token, bias in sorted(found.items()))
        out.append(replace(profile, sampling=replace(profile.sampling, logit_bias=biases)))
    if problems:
        raise ConfigError.of(problems)
    return tuple(out)


def _ids(item: config.LogitBias, ids_of: Mapping[bytes, list[int]], size: int) -> tuple[list[int], str, str]:
    """Return the ids that an entry names, or what is wrong with it and what to do."""
    if item.id is not None:
        wrong = f"id {item.id} is no token: the tokenizer has {size}" if item.id >= size else ""
        return [item.id], wrong, f"use an id from 0 to {size - 1}"
    text = item.text or ""
    ids = ids_of.get(text.encode(), [])
    wrong = "" if ids else f"{text!r} is not one token of this tokenizer"
    return ids, wrong, "name a token, its leading space included, or give its 'id'"
