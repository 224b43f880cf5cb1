"""Special tokens: what config, generation config and tokenizer config call them, against the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ralbuild.weights.findings import Findings
from ralbuild.weights.tokenizer import NAME, Vocabulary

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"


def token_texts(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return special token name to its text and the file that gives it."""
    out: dict[str, tuple[str, str]] = {}
    for file in (TOKENIZER, SPECIAL_MAP):
        for name in TOKEN_NAMES:
            value = configs.get(file, {}).get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and name not in out:
                out[name] = (text, file)
    return out


def _more_texts(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield key, text and file of the special tokens that have no name of their own."""
    for file in (TOKENIZER, SPECIAL_MAP):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = configs.get(file, {}).get(key)
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            for item in items:
                text = item.get("content") if isinstance(item, dict) else item
                if isinstance(text, str):
                    yield key, text, file


def ids_of(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return a config's id or list of ids under ``key``."""
    value = config.get(key)
    return tuple(item for item in (value if isinstance(value, list) else [value]) if type(item) is int)


def end_ids(configs: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the union of what the three files call the end of a text."""
    ids = set(ids_of(configs.get(CONFIG, {}), "eos_token_id"))
    ids.update(ids_of(configs.get(GENERATION, {}), "eos_token_id"))
    text, _ = token_texts(configs).get("eos_token", ("", ""))
    if text in vocabulary.ids:
        ids.add(vocabulary.ids[text])
    return tuple(sorted(ids))


def check_special(
    configs: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary, findings: Findings
) -> None:
    """Check every special token and id."""
    config = configs.get(CONFIG, {})
    size, rows = len(vocabulary.tokens), config.get("vocab_size")
    rows = rows if type(rows) is int and rows > 0 else size
    if size > rows:
        what = f"knows {size} ids, but the embedding has {rows} rows"
        findings.add("W507", what, file=NAME, found=size, needed=rows)
    elif size < rows:
        findings.add("W517", f"knows {size} ids, the embedding has {rows} rows", file=NAME, found=size)
    _check_types(configs, findings)
    _check_texts(configs, vocabulary, findings)
    _check_added(configs.get(TOKENIZER, {}), vocabulary, findings)
    _check_ends(configs, vocabulary, findings)
    for file in (CONFIG, GENERATION):
        for key in ("bos_token_id", "pad_token_id"):
            for number in ids_of(configs.get(file, {}), key):
                # -1 is an old way to say that there is none.
                if number >= rows or number < -1:
                    what = f"{key} {number} is outside the embedding of {rows} rows"
                    findings.add("W520", what, file=file, found=number)


def _check_types(configs: Mapping[str, Mapping[str, Any]], findings: Findings) -> None:
    """Report ids that are no numbers and tokens that are no text: loaders fail on them, or ignore them."""
    for file in (CONFIG, GENERATION):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = configs.get(file, {}).get(key)
            if value is not None and len(ids_of({key: value}, key)) != _length(value):
                what = f"{key} must be an id or a list of ids, found {str(value)[:40]!r}"
                findings.add("W325", what, file=file, found=str(value)[:40], needed="an id or a list of ids")
    for file in (TOKENIZER, SPECIAL_MAP):
        for name in TOKEN_NAMES:
            value = configs.get(file, {}).get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if value is not None and not isinstance(text, str):
                what = f"{name} must be text, or an object with content, found {str(value)[:40]!r}"
                findings.add("W325", what, file=file, found=str(value)[:40], needed="text")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


def _check_added(config: Mapping[str, Any], vocabulary: Vocabulary, findings: Findings) -> None:
    """Hold the list of added tokens in the tokenizer's config against the tokenizer."""
    added = config.get("added_tokens_decoder")
    for key, item in added.items() if isinstance(added, dict) else ():
        text = item.get("content") if isinstance(item, dict) else None
        if not isinstance(text, str):
            continue
        number = vocabulary.ids.get(text)
        if number is None:
            what = f"added_tokens_decoder names {text!r}, which is no token"
            findings.add("W511", what, file=TOKENIZER, tensor=text, found=text)
        elif str(number) != key:
            what = f"added_tokens_decoder says that {text!r} is {key[:20]}, the tokenizer {number}"
            findings.add("W504", what, file=TOKENIZER, tensor=text, found=key[:20], needed=number)


def _check_texts(
    configs: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary, findings: Findings
) -> None:
    for key, text, file in _more_texts(configs):
        if text not in vocabulary.ids:
            findings.add("W511", f"{key} names {text!r}, which is no token", file=file, found=text)
    for name, (text, file) in token_texts(configs).items():
        number = vocabulary.ids.get(text)
        if number is None:
            findings.add("W511", f"{name} is {text!r}, which is no token", file=file, found=text)
            continue
        given = {
            item for source in (CONFIG, GENERATION) for item in ids_of(configs.get(source, {}), f"{name}_id")
        }
        if given and number not in given and name != "pad_token":
            listed = ", ".join(map(str, sorted(given)))
            what = f"{name} {text!r} is {number}; the config's {name}_id says {listed}"
            findings.add("W519", what, file=file, found=number, needed=listed)


def _check_ends(configs: Mapping[str, Mapping[str, Any]], vocabulary: Vocabulary, findings: Findings) -> None:
    ids = end_ids(configs, vocabulary)
    if not ids:
        findings.add("W512", "no end-of-text token is named anywhere", file=CONFIG)
    for number in ids:
        if number >= len(vocabulary.tokens) or number < 0:
            what = f"eos_token_id {number} is outside the vocabulary of {len(vocabulary.tokens)}"
            findings.add("W513", what, file=CONFIG, found=number)
    said = {file: set(ids_of(configs.get(file, {}), "eos_token_id")) for file in (CONFIG, GENERATION)}
    if said[CONFIG] and said[GENERATION] and said[CONFIG] != said[GENERATION]:
        what = f"config.json says {sorted(said[CONFIG])}, generation_config.json {sorted(said[GENERATION])}"
        findings.add("W518", what, file=GENERATION)
