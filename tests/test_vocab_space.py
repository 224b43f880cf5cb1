"""The space at the beginning of a SentencePiece text: gone exactly when transformers' decode drops it."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ralbuild.contract.vocab import read_vocab, write_vocab
from ralbuild.weights.findings import Findings
from ralbuild.weights.tokenizer import read_vocabulary

PIECES = ["▁", "▁▁", "▁Hello", "world", "▁the", "▁风", "é", "▁risk", "s", ",", "▁a"]


def sentence_piece(*, strip: bool) -> Tokenizer:
    """Llama's way: ``▁`` for a space, bytes as a fallback, one space taken from the beginning."""
    ids = {f"<0x{byte:02X}>": byte for byte in range(256)}
    ids |= {piece: 256 + number for number, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    return tokenizer


@pytest.mark.parametrize("strip", [True, False])
def test_texts_begin_as_transformers_decodes_them(strip: bool) -> None:
    native = sentence_piece(strip=strip)
    theirs = PreTrainedTokenizerFast(tokenizer_object=native, clean_up_tokenization_spaces=False)
    source = native.to_str()
    found = read_vocabulary(json.loads(source), source.encode(), Findings())
    assert found is not None
    assert found.strips is strip
    vocab = read_vocab(write_vocab(found.tokens, strips=found.strips), "test")
    rng = random.Random(5)
    for _ in range(300):
        ids = [rng.choice([*range(256, 256 + len(PIECES)), 32, 65]) for _ in range(rng.randint(1, 5))]
        ours = b"".join(vocab.at(number, first=index == 0) for index, number in enumerate(ids))
        assert ours.decode() == theirs.decode(ids)
