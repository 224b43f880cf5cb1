"""Text to token ids, with special tokens in users' text made inert. The only door to tokenizers."""

from __future__ import annotations

import re
import secrets

from tokenizers import Encoding
from tokenizers import Tokenizer as NativeTokenizer

from ralbuild.runtime.errors import ModelMismatchError

_LOOKS_SPECIAL = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)


class Tokenizer:
    """A model's ``tokenizer.json``, without the truncation and padding that may be baked into it.

    `guard` breaks every special token in text that a user wrote, by a mark after its first character.
    `encode` splits at the marks, so the token's parts are read as plain text. Text without special
    tokens has no marks and is encoded whole, exactly as transformers does.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._native = NativeTokenizer.from_buffer(data)
        except Exception as error:  # the library raises Exception itself
            raise ModelMismatchError(f"is not a tokenizer: {error}", place="tokenizer.json") from None
        self._native.no_truncation()
        self._native.no_padding()
        added = list(self._native.get_added_tokens_decoder().values())
        names = [item.content for item in added if item.special or _LOOKS_SPECIAL.fullmatch(item.content)]
        # A token of one character has no inside to break.
        alternatives = "|".join(re.escape(name) for name in sorted(names) if len(name) > 1)
        self._special = re.compile(f"(?={alternatives})", re.DOTALL) if alternatives else None
        self.longest = max((len(item.content.encode()) for item in added), default=0)
        """Bytes of the longest added token."""
        # Private-use characters, unguessable: a user's text cannot contain it.
        self._mark = "".join(chr(0xF0000 + byte) for byte in secrets.token_bytes(16))

    def guard(self, text: str) -> str:
        """Return ``text`` with a mark inside everything that the tokenizer would read as a special token."""
        if self._special is None:
            return text
        cuts = [match.start() + 1 for match in self._special.finditer(text)]
        return self._mark.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True))

    def mark_bytes(self, text: str) -> int:
        """Return how many bytes of a guarded text are marks."""
        return text.count(self._mark) * len(self._mark.encode())

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of text that went through `guard` where users wrote it."""
        # In a batch even for one text: only this call lets other threads run meanwhile.
        if self._mark not in text:
            (one,) = self._native.encode_batch([text], add_special_tokens=add_special_tokens)
            return tuple(one.ids)
        pieces = [part for part in text.split(self._mark) if part]
        parts = self._native.encode_batch(pieces, add_special_tokens=False)
        whole = self._native.post_process(Encoding.merge(parts, True), None, add_special_tokens)
        return tuple(whole.ids)
