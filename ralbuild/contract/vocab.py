"""The bytes of every token, in one table file: what the transducer reads for a sampled id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.contract.arrays import Array, make_array, read_arrays, write_arrays
from ralbuild.contract.codec import FormatError

FORMAT = "ralbuild.vocab/2"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Token id to bytes; special tokens have none, for they are not text.

    Attributes:
        offsets: N + 1 positions in ``pool``.
        pool: the bytes of all tokens in id order.
        strips: the decoder takes one space away from the beginning of a text (SentencePiece).
    """

    offsets: memoryview
    pool: bytes
    strips: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> bytes:
        return self.pool[self.offsets[token] : self.offsets[token + 1]]

    def at(self, token: int, *, first: bool) -> bytes:
        """Return the bytes of a token; ``first`` says that no token of the text before it had any."""
        data = self[token]
        return data.removeprefix(b" ") if first and self.strips else data


def write_vocab(tokens: Sequence[bytes], *, strips: bool = False) -> bytes:
    """Serialise the bytes of tokens 0..N-1."""
    offsets = [0]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    pool = b"".join(tokens)
    arrays = {"offsets": make_array("U32", offsets), "pool": Array("U8", (len(pool),), pool)}
    return write_arrays(arrays, {"format": FORMAT, "strips": str(int(strips))})


def read_vocab(data: bytes, where: str) -> TokenBytes:
    """Parse and check a vocabulary file, or raise FormatError."""
    file = read_arrays(data, where)
    file.expect_format(FORMAT, where)
    offsets, pool = file.take("offsets", "U32"), file.take("pool", "U8")
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(pool) or list(offsets) != sorted(offsets):
        raise FormatError(where, "the token offsets are not ascending")
    return TokenBytes(offsets, bytes(pool), file.number("strips") == 1)
