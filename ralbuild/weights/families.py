"""The architecture tables (``data/architectures.toml``) as values, and the shapes that a config asks for."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

Shapes = Mapping[str, tuple[str, ...]]
"""Tensor name to the formula of each dimension."""

_MERGED = ("keys", "defaults", "globals", "layer", "experts", "dense", "sparse")


@dataclass(frozen=True, slots=True)
class Optional:
    """Tensors of every layer that a config key adds."""

    when: str
    layer: Shapes


@dataclass(frozen=True, slots=True)
class Family:
    """One model type's table.

    Attributes:
        name: ``model_type`` in the config.
        classes: what ``architectures`` may name.
        activations, activation_keys, epsilon_keys: expected activations, and where the config says them.
        tied: whether the head is tied when the config does not say.
        rope: whether positions are rotary.
        embedding, head: tensor names.
        layers: prefix of a layer's tensors, with ``{n}``.
        bare_prefix: what old files leave out of every name.
        transposed: whether matrices are stored as inputs by outputs.
        keys: letter to config key; an empty key is not looked up.
        defaults: letter to the value that the family's code takes.
        globals, layer, experts, dense, sparse: shapes, see the data file.
        optional: shapes that depend on the config.
        benign: patterns of tensors that may be there and are not loaded.
        norms: patterns of vectors that must not be all zero; empty when the family allows it.
    """

    name: str
    classes: tuple[str, ...]
    activations: tuple[str, ...]
    activation_keys: tuple[str, ...]
    epsilon_keys: tuple[str, ...]
    tied: bool
    rope: bool
    embedding: str
    head: str
    layers: str
    bare_prefix: str
    transposed: bool
    keys: Mapping[str, str]
    defaults: Mapping[str, int]
    globals: Shapes
    layer: Shapes
    experts: Shapes
    dense: Shapes
    sparse: Shapes
    optional: tuple[Optional, ...]
    benign: tuple[str, ...]
    norms: tuple[str, ...]


@functools.cache
def families() -> dict[str, Family]:
    """Return every family by model type."""
    text = resources.files("ralbuild").joinpath("data/architectures.toml").read_text("utf-8")
    data = tomllib.loads(text)
    usual = data.pop("usual")
    return {name: _family(name, _merged(name, data), usual) for name in data}


def _merged(name: str, data: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a family's table on top of the one that it extends."""
    own = data[name]
    if "extends" not in own:
        return dict(own)
    out = _merged(own["extends"], data)
    dropped = set(own.get("drop", ()))
    for part in _MERGED:
        kept = {key: item for key, item in out.get(part, {}).items() if key not in dropped}
        out[part] = kept | own.get(part, {})
    return out | {key: item for key, item in own.items() if key not in _MERGED}


def _family(name: str, table: Mapping[str, Any], usual: Mapping[str, Any]) -> Family:
    return Family(
        name=name,
        classes=tuple(table["classes"]),
        activations=tuple(table["activations"]),
        activation_keys=tuple(table["activation_keys"]),
        epsilon_keys=tuple(table["epsilon_keys"]),
        tied=table["tied"],
        rope=table["rope"],
        embedding=table["embedding"],
        head=table["head"],
        layers=table["layers"],
        bare_prefix=table.get("bare_prefix", ""),
        transposed=table.get("transposed", False),
        keys=usual["keys"] | table.get("keys", {}),
        defaults=table.get("defaults", {}),
        globals=_shapes(table, "globals"),
        layer=_shapes(table, "layer"),
        experts=_shapes(table, "experts"),
        dense=_shapes(table, "dense"),
        sparse=_shapes(table, "sparse"),
        optional=tuple(Optional(item["when"], _shapes(item, "layer")) for item in table.get("optional", ())),
        benign=tuple(usual["benign"]),
        norms=() if table.get("zero_norms") else tuple(usual["norms"]),
    )


def _shapes(table: Mapping[str, Any], part: str) -> Shapes:
    return {name: tuple(shape) for name, shape in table.get(part, {}).items()}


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """Return a dimension: a sum of products of letters and numbers, such as ``A*D+2*K*D``."""
    total = 0
    for term in formula.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor) if factor.isdecimal() else sizes[factor]
        total += product
    return total
