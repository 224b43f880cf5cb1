"""`tokenizer.json` to the bytes of every token, proved against the tokenizers library.

Two families cover the models that are served today: byte-level BPE (GPT-2's byte-to-character map)
and SentencePiece style (``▁`` for a space, ``<0xXX>`` for single bytes). Only this module of the
builder imports tokenizers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.errors import WeightsError
from ralbuild.weights.files import read_json, read_small

PROBE = "Hello, world! 12 + 7 = 19.  Risk\tand\nreward: naïve café, 风险, リスク, 위험, 🙂👩‍🚀"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token bytes by id (empty for special tokens and holes), and the ids of named tokens."""

    tokens: tuple[bytes, ...]
    ids: dict[str, int]


def read_vocabulary(path: Path) -> Vocabulary:
    """Derive token bytes from a ``tokenizer.json``.

    Raises:
        WeightsError: for an unknown kind of tokenizer, ids out of order, or bytes that disagree with
            what the tokenizers library decodes.
    """
    name = "tokenizer.json"
    data = read_json(path, name)
    model = data.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise WeightsError("has no model.vocab", place=name)
    vocab = _vocab_ids(model["vocab"])
    added = [item for item in data.get("added_tokens") or [] if isinstance(item, dict)]
    to_bytes = _byte_level if _uses(data, "ByteLevel") else _sentence_piece if _uses_spaces(data) else None
    if to_bytes is None:
        raise WeightsError(
            "neither a byte-level nor a SentencePiece style tokenizer",
            place=name,
            hint="convert the model to one of them",
        )
    by_id = {number: to_bytes(text) for text, number in vocab.items()}
    ids = dict(vocab)
    for item in added:
        number, content = item.get("id"), item.get("content")
        if not isinstance(number, int) or not isinstance(content, str):
            raise WeightsError("an added token lacks its id or content", place=name)
        ids[content] = number
        by_id[number] = b"" if item.get("special") else content.encode()
    if not by_id or min(by_id) < 0 or max(by_id) > 4_000_000:
        raise WeightsError("token ids must be between 0 and 4,000,000", place=name)
    tokens = tuple(by_id.get(number, b"") for number in range(max(by_id) + 1))
    _prove(path, tokens)
    return Vocabulary(tokens, ids)


def _vocab_ids(vocab: Any) -> dict[str, int]:
    """Return text to id; Unigram models list (text, score) pairs in id order."""
    if isinstance(vocab, list):
        return {str(item[0]): number for number, item in enumerate(vocab)}
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        raise WeightsError("model.vocab must map text to ids", place="tokenizer.json")
    if len(set(vocab.values())) != len(vocab):
        raise WeightsError("two entries of model.vocab share one id", place="tokenizer.json")
    return vocab


def _uses(data: dict[str, Any], kind: str) -> bool:
    parts = [data.get("decoder"), data.get("pre_tokenizer")]
    return any(isinstance(part, dict) and _names(part, kind) for part in parts)


def _names(part: dict[str, Any], kind: str) -> bool:
    children = part.get("decoders") or part.get("pretokenizers") or []
    return part.get("type") == kind or any(_names(child, kind) for child in children)


def _uses_spaces(data: dict[str, Any]) -> bool:
    return any(_uses(data, kind) for kind in ("Metaspace", "ByteFallback", "Replace"))


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to bytes (`bytes_to_unicode`, inverted)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in text)
    except KeyError:  # an added token that is also listed in the vocabulary: plain text
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.match(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()


def _prove(path: Path, tokens: tuple[bytes, ...]) -> None:
    """Compare our bytes with the library's own decoding of a probe text."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(read_small(path, "tokenizer.json").decode())
    except Exception as error:  # the library raises bare Exception
        raise WeightsError(f"the tokenizers library refuses it: {error}", place="tokenizer.json") from None
    tokenizer.no_truncation()
    ids = tokenizer.encode(PROBE, add_special_tokens=False).ids
    ours = b"".join(tokens[number] for number in ids).decode("utf-8", "replace")
    theirs = tokenizer.decode(ids, skip_special_tokens=True)
    if ours != theirs and ours != " " + theirs:  # SentencePiece drops one leading space
        raise WeightsError(
            f"token bytes disagree with the tokenizers library: {ours[:60]!r} against {theirs[:60]!r}",
            place="tokenizer.json",
            hint="this kind of tokenizer is not supported",
        )
