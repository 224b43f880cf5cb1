"""The tensors that a config promises, against those in the files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ralbuild.weights.families import Family, evaluate
from ralbuild.weights.findings import Findings
from ralbuild.weights.safetensors import MAX_DIM, Tensor

MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
MOST_EXPECTED = 2_000_000
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Promise:
    """What a config asks for: sizes by letter, shape by tensor name, and whether the head is tied."""

    family: Family
    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    tied: bool


def read_promise(family: Family, config: Mapping[str, Any], findings: Findings) -> Promise | None:
    """Return what ``config`` promises; None when its numbers do not allow to tell."""
    sizes = _sizes(family, config, findings)
    if sizes is None:
        return None
    tied = config.get("tie_word_embeddings")
    tied = family.tied if tied is None else bool(tied)
    count = sizes["L"] * (len(family.layer) + len(family.experts) * sizes.get("E", 0))
    if count > MOST_EXPECTED:
        findings.add("W306", f"the config asks for {count} tensors", file="config.json", found=count)
        return None
    shapes = {name: _shape(formula, sizes) for name, formula in family.globals.items()}
    for number in range(sizes["L"]):
        prefix = family.layers.format(n=number)
        for name, formula in _layer_shapes(family, config, sizes, number):
            shapes[prefix + name] = _shape(formula, sizes)
    return Promise(family, sizes, shapes, tied)


def _shape(formula: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(part, sizes) for part in formula)


def _layer_shapes(
    family: Family, config: Mapping[str, Any], sizes: Mapping[str, int], number: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from family.layer.items()
    for optional in family.optional:
        if config.get(optional.when):
            yield from optional.layer.items()
    if not family.experts:
        return
    if not _is_sparse(config, sizes, number):
        yield from family.dense.items()
        return
    yield from family.sparse.items()
    for expert in range(sizes["E"]):
        for name, formula in family.experts.items():
            yield name.format(e=expert), formula


def _is_sparse(config: Mapping[str, Any], sizes: Mapping[str, int], number: int) -> bool:
    """Tell whether a layer has experts: every one, unless the config names dense ones or a step."""
    dense, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
    if isinstance(dense, list) and number in dense:
        return False
    return sizes["E"] > 0 and not (type(step) is int and step > 0 and (number + 1) % step)


def _sizes(family: Family, config: Mapping[str, Any], findings: Findings) -> dict[str, int] | None:
    used = _letters(family)
    sizes: dict[str, int] = {}
    good = True
    for letter, words in family.keys.items():
        key, value = _read(config, words.split("|"), findings)
        if value is None:
            if letter in family.defaults:
                sizes[letter] = family.defaults[letter]
            elif letter in used and letter not in "KDI":
                findings.add("W306", f"lacks {key}", file="config.json", needed=key)
                good = False
        elif type(value) is not int or not 1 <= value <= MAX_DIM:
            what = f"{key} must be a positive number below 2**48, found {str(value)[:40]}"
            findings.add("W306", what, file="config.json", found=str(value)[:40])
            good = False
        else:
            sizes[letter] = value
    if not good:
        return None
    return sizes if _derive(family, sizes, findings) and _check_heads(sizes, findings) else None


def _read(config: Mapping[str, Any], keys: list[str], findings: Findings) -> tuple[str, Any]:
    """Return the first of ``keys`` that the config has, and its value."""
    given = [(key, config[key]) for key in keys if config.get(key) is not None]
    for key, value in given[1:]:
        if value != given[0][1]:
            what = f"{given[0][0]} says {str(given[0][1])[:40]}, {key} {str(value)[:40]}"
            findings.add("W316", what, file="config.json")
    return given[0] if given else (keys[0], None)


def _letters(family: Family) -> set[str]:
    tables = (family.globals, family.layer, family.experts, family.dense, family.sparse)
    text = "".join("".join(shape) for table in tables for shape in table.values())
    return {char for char in text if char.isalpha()} | {"L", "A"}


def _derive(family: Family, sizes: dict[str, int], findings: Findings) -> bool:
    """Fill in what the family's code works out when the config does not say."""
    sizes.setdefault("K", sizes["A"])
    if "I" not in sizes and "I" in _letters(family):
        if family.keys["I"] != "n_inner":
            findings.add("W306", f"lacks {family.keys['I']}", file="config.json")
            return False
        sizes["I"] = 4 * sizes["H"]
    if "D" not in sizes:
        if sizes["H"] % sizes["A"]:
            what = f"hidden size {sizes['H']} is no multiple of {sizes['A']} heads, and head_dim is not given"
            findings.add("W307", what, file="config.json")
            return False
        sizes["D"] = sizes["H"] // sizes["A"]
    for letter, most in (("L", MOST_LAYERS), ("E", MOST_EXPERTS)):
        if sizes.get(letter, 0) > most:
            findings.add("W306", f"{family.keys[letter]} is {sizes[letter]}", file="config.json")
            return False
    return True


def _check_heads(sizes: Mapping[str, int], findings: Findings) -> bool:
    heads, groups, size = sizes["A"], sizes["K"], sizes["D"]
    if heads % groups:
        what = f"{heads} heads are no multiple of {groups} key-value heads"
        findings.add("W307", what, file="config.json", found=groups, needed=f"a divisor of {heads}")
        return False
    if size % 2:
        findings.add("W307", f"head size {size} is odd", file="config.json", found=size)
        return False
    return True


def compare(promise: Promise, tensors: Mapping[str, Tensor], *, whole: bool, findings: Findings) -> None:
    """Compare promised and present tensors; ``whole`` is False when some file could not be read."""
    family = promise.family
    present = _full_names(family, tensors)
    missing = [name for name in promise.shapes if name not in present]
    missing = _check_head(promise, missing, whole=whole, findings=findings)
    extra = [name for name in present if name not in promise.shapes and not is_benign(family, name)]
    if whole:
        missing = _check_layers(promise, missing, present, findings)
        for name in missing:
            needed = list(promise.shapes[name])
            findings.add("W308", f"missing; the config needs shape {needed}", tensor=name, needed=needed)
    extra = _check_extra_layers(promise, extra, findings)
    for name in extra:
        findings.add(
            "W309",
            f"the config does not explain it: shape {list(present[name].shape)}",
            tensor=name,
            found=list(present[name].shape),
        )
    _check_shapes(promise, present, findings)


def is_benign(family: Family, name: str) -> bool:
    """Tell whether a tensor may be there although nothing loads it."""
    return any(fnmatchcase(name, pattern) for pattern in family.benign)


def _full_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = family.bare_prefix
    if not prefix or family.embedding in tensors:
        return dict(tensors)
    return {name if name == family.head else prefix + name: tensor for name, tensor in tensors.items()}


def _check_head(promise: Promise, missing: list[str], *, whole: bool, findings: Findings) -> list[str]:
    """Judge the output head; return what else is missing."""
    head = promise.family.head
    if head not in missing:
        return missing
    rest = [name for name in missing if name != head]
    if not promise.tied and whole:
        needed = list(promise.shapes[head])
        findings.add("W314", "the head is not tied, and no file holds it", tensor=head, needed=needed)
    return rest


def _check_layers(
    promise: Promise, missing: list[str], present: Mapping[str, Tensor], findings: Findings
) -> list[str]:
    """Report layers that are missing as a whole; return the other names."""
    number_of = _layer_pattern(promise.family)
    there = {int(match[1]) for name in present if (match := number_of.match(name))}
    absent = [number for number in range(promise.sizes["L"]) if number not in there]
    if absent and there:
        what = f"the config counts {promise.sizes['L']} layers; missing: {_ranges(absent)}"
        findings.add("W311", what, file="config.json", found=len(there), needed=promise.sizes["L"])
    prefixes = tuple(promise.family.layers.format(n=number) for number in absent) if there else ()
    return [name for name in missing if not name.startswith(prefixes or ("\0",))]


def _layer_pattern(family: Family) -> re.Pattern[str]:
    """Return what finds the number of a layer in a tensor's name; a longer number is no layer's."""
    start, end = map(re.escape, family.layers.split("{n}"))
    return re.compile(f"{start}([0-9]{{1,9}}){end}")


def _check_extra_layers(promise: Promise, extra: list[str], findings: Findings) -> list[str]:
    number_of = _layer_pattern(promise.family)
    beyond: set[int] = set()
    rest: list[str] = []
    for name in extra:
        match = number_of.match(name)
        if match and int(match[1]) >= promise.sizes["L"]:
            beyond.add(int(match[1]))
        else:
            rest.append(name)
    if beyond:
        what = f"the config counts {promise.sizes['L']} layers; the files also hold {_ranges(sorted(beyond))}"
        findings.add("W312", what, file="config.json", needed=promise.sizes["L"])
    return rest


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as ``2..5, 8 (5)``; the first six runs, and how many numbers there are."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in runs[:6])
    return f"{text}{', ...' if len(runs) > 6 else ''}" + (f" ({len(numbers)})" if len(numbers) > 1 else "")


def _check_shapes(promise: Promise, present: Mapping[str, Tensor], findings: Findings) -> None:
    """Report wrong shapes, one finding for all layers that are wrong in the same way."""
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, needed in promise.shapes.items():
        tensor = present.get(name)
        if tensor is not None and tensor.shape != needed:
            groups.setdefault((_NUMBER.sub("N", name), tensor.shape, needed), []).append(name)
    for (_, found, needed), names in groups.items():
        more = f", and so have {len(names) - 1} more" if len(names) > 1 else ""
        is_embedding = names[0] == promise.family.embedding and found[1:] == needed[1:]
        rule = "W304" if is_embedding and found else "W310"
        rows = f"has {found[0]} rows, but config.json says vocab_size {needed[0]}" if rule == "W304" else ""
        findings.add(
            rule,
            rows or f"has shape {list(found)}, the config needs {list(needed)}{more}",
            tensor=names[0],
            found=list(found),
            needed=list(needed),
        )


def check_tied_copy(promise: Promise, digests: Mapping[str, str], findings: Findings) -> None:
    """Compare a head that the config ties with the embedding, by the SHA-256 of their bytes."""
    family = promise.family
    bare = family.embedding.removeprefix(family.bare_prefix)
    head, embedding = digests.get(family.head), digests.get(family.embedding) or digests.get(bare)
    if promise.tied and head and embedding:
        if head == embedding:
            findings.add("W315", "an equal copy of the embedding", tensor=promise.family.head)
        else:
            what = "the config ties the head to the embedding, but their bytes differ"
            findings.add("W313", what, tensor=promise.family.head, found=head[:12], needed=embedding[:12])


def tied_pair(promise: Promise | None, names: Iterable[str]) -> frozenset[str]:
    """Return the two tensors whose bytes must be compared, or nothing."""
    if promise is None or not promise.tied:
        return frozenset()
    bare = promise.family.embedding.removeprefix(promise.family.bare_prefix)
    pair = {promise.family.head, promise.family.embedding, bare} & set(names)
    return frozenset(pair) if len(pair) == 2 else frozenset()
