"""`tokenizer.json` to the bytes of every token, proved against the tokenizers library.

Two families cover the models that are served today: byte-level BPE (GPT-2's byte-to-character map)
and SentencePiece style (``▁`` for a space, ``<0xXX>`` for single bytes). The library itself runs in
a process of its own, under limits.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ralbuild.contract.codec import canonical_json, sha256_hex
from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.weights import child
from ralbuild.weights.files import read_json
from ralbuild.weights.findings import Findings
from ralbuild.weights.memo import Memo, remember

NAME = "tokenizer.json"
PROBE = "Hello, world! 12 + 7 = 19.  Risk\tand\nreward: naïve café, 风险, リスク, 위험, 🙂👩‍🚀"
MAX_ID = 4_000_000
CPU_SECONDS = 5
"""What loading a tokenizer and encoding the probes may take; one second more for each MB of the file."""
MEMORY_BYTES = 4 << 30
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

PROBES = (
    PROBE, "", " ", "  ", "\n", "\n\n", "\t", "a", "A", " a", "the", " the", "The", "hello", " Hello",
    "0", "1", "12", "123", "1234", "12345678", "3.14159", "1,000,000", "1e-5", "$1.50", "50%",
    "don't", "I'll", "it's", "e-mail", "https://example.org/a?b=c#d", "user@example.org",
    "def f(x):\n    return x + 1\n", "{\"a\": [1, 2]}", "<b>bold</b>", "SELECT * FROM t;",
    "...", "!?", "(a)", "\"quoted\"", "a_b", "CamelCase", "snake_case", "ÄÖÜ", "Straße", "Ελλάδα", "Россия",
    "שלום", "مرحبا", "हिन्दी", "ไทย", "中文", "日本語", "한국어", "🙂", "e\u0301", "\u00a0", "\u200b", "\r\n",
)  # fmt: skip
"""Texts whose ids are the tokenizer's fingerprint. Changing one changes every fingerprint."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token bytes by id (empty for special tokens and holes), and the ids of named tokens.

    Attributes:
        fingerprint: SHA-256 over the ids of `PROBES`.
        adds: ids that the tokenizer puts before a text that is encoded with special tokens.
        strips: decoding takes one space away from the beginning of a text.
    """

    tokens: tuple[bytes, ...]
    ids: dict[str, int]
    fingerprint: str = ""
    adds: tuple[int, ...] = field(default=())
    strips: bool = False


def load_vocabulary(source: bytes, memo: Memo | None, findings: Findings) -> Vocabulary | None:
    """Return what `read_vocabulary` makes of a ``tokenizer.json``.

    Args:
        source: the file.
        memo: remembers vocabularies of files without errors; None reads each time.
        findings: where to record.
    """

    def make() -> tuple[Vocabulary | None, Findings]:
        found = Findings()  # what a run ignores is its own business, and not remembered
        data = read_json(source, NAME, found)
        return read_vocabulary(data, source, found) if data is not None else None, found

    vocabulary, found = remember(memo, source, "tokenizer.json", make, _pack, _unpack)
    findings.take(found)
    return vocabulary


def _pack(result: tuple[Vocabulary | None, Findings]) -> dict[str, bytes]:
    vocabulary, found = result
    if vocabulary is None or found.failed or not found.whole:
        return {}  # what is wrong is looked for again
    names = {
        "ids": vocabulary.ids,
        "fingerprint": vocabulary.fingerprint,
        "adds": vocabulary.adds,
        "findings": [item.words() for item in found.sorted()],
    }
    tokens = write_vocab(vocabulary.tokens, strips=vocabulary.strips)
    return {"vocab": tokens, "names.json": json.dumps(names).encode()}


def _unpack(outputs: Mapping[str, bytes]) -> tuple[Vocabulary | None, Findings]:
    table, names = read_vocab(outputs["vocab"], NAME), json.loads(outputs["names.json"])
    found = Findings()
    for words in names["findings"]:
        found.add(**words)
    tokens = tuple(table[number] for number in range(len(table)))
    return Vocabulary(tokens, names["ids"], names["fingerprint"], tuple(names["adds"]), table.strips), found


def read_vocabulary(data: dict[str, Any], source: bytes, findings: Findings) -> Vocabulary | None:
    """Derive token bytes from a parsed ``tokenizer.json``, whose text is ``source``.

    Returns:
        The vocabulary, or None when the findings say why there is none.
    """
    model = data.get("model")
    vocab = _vocab_ids(model["vocab"], findings) if isinstance(model, dict) and "vocab" in model else None
    if vocab is None:
        if not isinstance(model, dict) or "vocab" not in model:
            findings.add("W501", "has no model.vocab", file=NAME)
        return None
    to_bytes = _spelling(data)
    if to_bytes is None:
        findings.add("W502", "neither a byte-level nor a SentencePiece style tokenizer", file=NAME)
        return None
    by_id = {number: to_bytes(text) for text, number in vocab.items()}
    ids = dict(vocab)
    if not _add(data, ids, by_id, findings):
        return None
    if not by_id or min(by_id) < 0 or max(by_id) > MAX_ID:
        findings.add("W501", f"token ids must be between 0 and {MAX_ID:,}", file=NAME)
        return None
    _check_parts(data, ids, by_id, byte_level=to_bytes is _byte_level, findings=findings)
    tokens = tuple(by_id.get(number, b"") for number in range(max(by_id) + 1))
    return _prove(source, tokens, ids, findings)


def _vocab_ids(vocab: Any, findings: Findings) -> dict[str, int] | None:
    """Return text to id; Unigram models list (text, score) pairs in id order."""
    if isinstance(vocab, list):
        pairs = [item for item in vocab if isinstance(item, list) and item and isinstance(item[0], str)]
        if len(pairs) != len(vocab):
            findings.add("W501", "model.vocab must list pairs of text and score", file=NAME)
            return None
        if len({item[0] for item in pairs}) != len(pairs):
            findings.add("W503", "two entries of model.vocab are the same text", file=NAME)
        return {item[0]: number for number, item in enumerate(pairs)}
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        findings.add("W501", "model.vocab must map text to ids", file=NAME)
        return None
    if len(set(vocab.values())) != len(vocab):
        owner: dict[int, str] = {}
        for text, number in vocab.items():
            if number in owner:
                what = f"two entries of model.vocab share one id: {owner[number]!r} and {text!r} are {number}"
                findings.add("W503", what, file=NAME, tensor=text, found=number)
            owner.setdefault(number, text)
        return None
    return vocab


def _add(data: dict[str, Any], ids: dict[str, int], by_id: dict[int, bytes], findings: Findings) -> bool:
    """Put the added tokens in; False when one cannot be."""
    taken: dict[int, str] = {}
    texts = {number: text for text, number in ids.items()}
    added = data.get("added_tokens") or []
    if not isinstance(added, list):
        findings.add("W501", "added_tokens must be a list", file=NAME)
        return False
    for item in added:
        number, content = (item.get("id"), item.get("content")) if isinstance(item, dict) else (None, None)
        if type(number) is not int or not isinstance(content, str):
            findings.add("W501", "an added token lacks its id or content", file=NAME)
            return False
        if number in taken:
            what = f"two added tokens share one id: {taken[number]!r} and {content!r} are {number}"
            findings.add("W503", what, file=NAME, tensor=content, found=number)
        elif ids.get(content, number) != number:
            what = f"the added token {content!r} is {number}, model.vocab says {ids[content]}"
            findings.add("W504", what, file=NAME, tensor=content, found=number, needed=ids[content])
        elif texts.get(number, content) != content:
            what = f"the added token {content!r} is {number}, which model.vocab gives to {texts[number]!r}"
            findings.add("W504", what, file=NAME, tensor=content, found=number)
        taken.setdefault(number, content)
        ids[content] = number
        by_id[number] = b"" if item.get("special") else content.encode("utf-8", "surrogatepass")
    return True


def _check_parts(
    data: dict[str, Any],
    ids: dict[str, int],
    by_id: dict[int, bytes],
    *,
    byte_level: bool,
    findings: Findings,
) -> None:
    """Check the parts of the file against each other."""
    for key, rule in (("truncation", "W509"), ("padding", "W510")):
        if data.get(key) is not None:
            findings.add(rule, f"{key} is set: {str(data[key])[:80]}", file=NAME, needed="null")
    if data["model"].get("dropout"):
        found = str(data["model"]["dropout"])[:40]
        findings.add("W524", f"model.dropout is {found}", file=NAME, found=found, needed="null")
    holes = max(by_id) + 1 - len(by_id)
    if holes:
        first = next(number for number in range(max(by_id)) if number not in by_id)
        findings.add("W505", f"{holes} ids name no token, the first is {first}", file=NAME, found=holes)
    if byte_level:
        _check_alphabet(ids, findings)
        if data.get("pre_tokenizer") is None:
            findings.add("W516", "pre_tokenizer is null", file=NAME)
    if data["model"].get("type") == "BPE":
        _check_merges(data["model"], ids, findings)


def _check_alphabet(ids: dict[str, int], findings: Findings) -> None:
    """Report bytes that a byte-level vocabulary cannot spell."""
    lacking = sorted(byte for char, byte in _ALPHABET.items() if char not in ids)
    text = [byte for byte in lacking if 32 <= byte < 127 or byte in b"\t\n"]
    # Some vocabularies leave out control characters and bytes that hardly any text has.
    rule = "W508" if text or len(lacking) > 64 else "W522"
    if lacking:
        what = f"lacks {len(lacking)} of the 256 byte symbols, such as that of 0x{(text or lacking)[0]:02x}"
        findings.add(rule, what, file=NAME, found=256 - len(lacking), needed=256)


def _check_merges(model: dict[str, Any], ids: dict[str, int], findings: Findings) -> None:
    merges = model.get("merges")
    if not isinstance(merges, list):
        findings.add("W506", "model.merges must be a list", file=NAME)
        return
    vocab = model["vocab"]
    special = len(vocab) - sum(1 for text in vocab if len(text) == 1 or _BYTE_TOKEN.match(text))
    if not merges and special > max(64, len(vocab) // 10):
        what = f"no merges, but {special} tokens are longer than a character: none of them can be reached"
        findings.add("W506", what, file=NAME)
    for position, merge in enumerate(merges):
        if isinstance(merge, str):
            left, blank, right = merge.partition(" ")
            if blank and left in ids and right in ids and left + right in ids:
                continue
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            findings.add("W506", f"merge {position} is not a pair: {str(merge)[:60]!r}", file=NAME)
        else:
            lacking = next((text for text in (*parts, "".join(parts)) if text not in ids), None)
            if lacking is not None:
                what = f"merge {position} needs the token {lacking[:60]!r}, which model.vocab lacks"
                findings.add("W506", what, file=NAME, tensor=lacking[:60])


def _spelling(data: dict[str, Any]) -> Callable[[str], bytes] | None:
    """Return how a token's text becomes bytes, or None for another kind of tokenizer."""
    if _uses(data, "ByteLevel"):
        return _byte_level
    if any(_uses(data, kind) for kind in ("Metaspace", "ByteFallback", "Replace")):
        return _sentence_piece
    return None


def _uses(data: dict[str, Any], kind: str) -> bool:
    parts = [data.get("decoder"), data.get("pre_tokenizer")]
    return any(isinstance(part, dict) and _names(part, kind) for part in parts)


def _names(part: dict[str, Any], kind: str) -> bool:
    children = part.get("decoders") or part.get("pretokenizers") or []
    nested = isinstance(children, list) and any(
        isinstance(child, dict) and _names(child, kind) for child in children
    )
    return part.get("type") == kind or nested


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
        return text.encode("utf-8", "surrogatepass")


def _sentence_piece(text: str) -> bytes:
    match = _BYTE_TOKEN.match(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode("utf-8", "surrogatepass")


def _prove(
    source: bytes, tokens: tuple[bytes, ...], ids: dict[str, int], findings: Findings
) -> Vocabulary | None:
    """Compare our bytes with the library's own decoding of a probe text, and take the fingerprint."""
    cpu_seconds = CPU_SECONDS + (len(source) >> 20)
    spaced = next((k for k, token in enumerate(tokens) if token[:1] == b" " and token[1:].isalpha()), None)
    asked = {"texts": PROBES, "single": spaced}
    request = json.dumps(asked).encode() + b"\n" + source
    answer = child.run_limited("tokenizer_worker.py", request, cpu_seconds, MEMORY_BYTES)
    if answer is None:
        what = f"the tokenizers library takes more than {cpu_seconds} s or 4 GB for {len(PROBES)} short texts"
        findings.add("W523", what, file=NAME)
        return None
    for key, what in (("refused", "refuses it"), ("failed", "fails on a probe text")):
        if key in answer:
            findings.add("W514", f"the tokenizers library {what}: {answer[key]}", file=NAME)
            return None
    probed, added, theirs = answer["probed"], answer["added"], answer["decoded"]
    beyond = next((number for number in itertools.chain(added, *probed) if number >= len(tokens)), None)
    if beyond is not None:
        what = f"the library gives the id {beyond}, but the file lists {len(tokens)} ids"
        findings.add("W515", what, file=NAME, found=beyond, needed=f"below {len(tokens)}")
        return None
    ours = b"".join(tokens[number] for number in probed[0]).decode("utf-8", "replace")
    if ours != theirs and ours != " " + theirs:  # SentencePiece drops one leading space
        what = f"token bytes disagree with the tokenizers library: {ours[:60]!r} against {theirs[:60]!r}"
        findings.add("W515", what, file=NAME, found=ours[:60], needed=theirs[:60])
        return None
    plain = probed[PROBES.index("a")]
    before = added[: max(0, len(added) - len(plain))] if added[-len(plain) :] == plain else added[:1]
    fingerprint = sha256_hex(canonical_json(probed))
    strips = spaced is not None and answer["single"][:1] != " "
    return Vocabulary(tokens, ids, fingerprint, tuple(before) if added != plain else (), strips)


def text_encoder(source: bytes) -> Callable[[str], list[int]]:
    """Return a function from text to token ids; `tokenizer_worker` has proved the file before."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(source.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return encode
