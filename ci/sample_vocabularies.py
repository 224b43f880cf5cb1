"""Make tests/data/vocabularies.json.gz: token bytes of three real tokenizers, a sample of each.

    python ci/sample_vocabularies.py SMOLLM2/tokenizer.json MISTRAL_COMMON.whl OUT

The wheel is `mistral-common` from PyPI (Apache-2.0): it has a SentencePiece model and a tiktoken-style
vocabulary (tekken). SmolLM2's (Apache-2.0) comes from `ci/fetch_model.py`. Each sample has every
token of one byte and 4,000 others, drawn with a fixed seed; the fold tests read it.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ralbuild.weights.tokenizer import _byte_level, _sentence_piece

SAMPLE = 4000


def smollm2(path: Path) -> list[bytes]:
    """Byte-level BPE: a Hugging Face tokenizer.json."""
    return [_byte_level(text) for text in json.loads(path.read_text("utf-8"))["model"]["vocab"]]


def tekken(data: bytes) -> list[bytes]:
    """The tiktoken way: bytes in base64."""
    return [base64.b64decode(item["token_bytes"]) for item in json.loads(data)["vocab"]]


def sentence_piece(data: bytes) -> list[bytes]:
    """SentencePiece's ModelProto: field 1 is a piece, whose field 1 is its text and 3 its type."""
    out = []
    for field, piece in _fields(data):
        if field == 1 and isinstance(piece, bytes):
            values = dict(_fields(piece))
            text = values[1]
            if values.get(3, 1) in (1, 6) and isinstance(text, bytes):  # normal, byte
                out.append(_sentence_piece(text.decode()))
    return out


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size


def sample(tokens: list[bytes]) -> list[str]:
    """Return every token of one byte and some others, in base64."""
    distinct = sorted({token for token in tokens if token})
    others = [token for token in distinct if len(token) > 1]
    chosen = [token for token in distinct if len(token) == 1] + random.Random(1).sample(others, SAMPLE)
    return [base64.b64encode(token).decode() for token in sorted(chosen)]


def main() -> None:
    """Write the samples."""
    tokenizer, wheel, out = map(Path, sys.argv[1:])
    with zipfile.ZipFile(wheel) as archive:
        data = {
            "smollm2": sample(smollm2(tokenizer)),
            "sentencepiece": sample(sentence_piece(archive.read("mistral_common/data/tokenizer.model.v1"))),
            "tiktoken": sample(tekken(archive.read("mistral_common/data/tekken_240911.json"))),
        }
    text = json.dumps(data, separators=(",", ":")).encode()
    out.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main()
