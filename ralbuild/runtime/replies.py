"""What clients get: OpenAI's objects for chat and text completions, whole or as stream events."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.orders import Alternative, Piece, TokenLogprob

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment line; clients skip it, and proxies see that the stream is alive."""
_MOST_CHARACTERS = 8192
"""A longer text is sent in several events, so that no line nears the 64 KiB that clients can read."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What all objects of one answer share.

    Attributes:
        chat: chat completion, else text completion.
        id: of the answer, without its kind.
        created: Unix time in seconds.
        model: as the client named it.
        prompt_tokens: tokens of the prompt.
        include_usage: end a stream with a usage event.
        logprobs: tokens come with their log probabilities.
        choices: answers to this one request.
    """

    chat: bool
    id: str
    created: int
    model: str
    prompt_tokens: int
    include_usage: bool
    logprobs: bool
    choices: int

    def whole(self, answers: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the unary answer: all pieces of each choice."""
        choices = []
        for index, pieces in enumerate(answers):
            text = "".join(piece.text for piece in pieces)
            logprobs = self._logprobs([item for piece in pieces for item in piece.logprobs])
            choice = {"index": index, "logprobs": logprobs, "finish_reason": pieces[-1].finish}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": choices,
            "usage": self._usage([pieces[-1] for pieces in answers]),
        }

    def opening(self) -> Iterator[bytes]:
        """Yield the events that begin a stream: a chat names its role first."""
        if self.chat:
            for index in range(self.choices):
                yield self._event(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Yield the events of one choice's piece; its last one has the finish reason."""
        if piece.logprobs and not piece.text:
            yield self._event(index, self._delta(""), logprobs=piece.logprobs)
        for begin in range(0, len(piece.text), _MOST_CHARACTERS):
            text = piece.text[begin : begin + _MOST_CHARACTERS]
            yield self._event(index, self._delta(text), logprobs=piece.logprobs if begin == 0 else ())
        if piece.finish:
            end: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            yield self._event(index, end, piece.finish)

    def closing(self, lasts: Sequence[Piece]) -> Iterator[bytes]:
        """Yield the events that end a stream whose choices have all ended."""
        if self.include_usage:
            yield _data({**self._chunk_head(), "choices": [], "usage": self._usage(lasts)})
        yield DONE

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.chat else {"text": text}

    def _event(
        self,
        index: int,
        content: dict[str, Any],
        finish: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        shown = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, **content, "logprobs": shown, "finish_reason": finish}
        event = {**self._chunk_head(), "choices": [choice]}
        if self.include_usage:
            event["usage"] = None
        return _data(event)

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the tokens and their log probabilities in the shape of the API; None when not asked for."""
        if not self.logprobs:
            return None
        if self.chat:
            content = [
                {**_token(item), "top_logprobs": [_token(other) for other in item.top]} for item in items
            ]
            return {"content": content, "refusal": None}
        texts = [_text(item.data) for item in items]
        return {
            "tokens": texts,
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{_text(other.data): other.logprob for other in item.top} for item in items],
            "text_offset": [0, *itertools.accumulate(len(text) for text in texts)][: len(texts)],
        }

    def _usage(self, lasts: Sequence[Piece]) -> dict[str, int]:
        drawn = sum(last.tokens for last in lasts)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
        }


def error_event(error: ApiError) -> bytes:
    """Return the event of a failure after the 200: clients raise it, and nothing is cut silently."""
    return _data(error.body())


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _token(item: TokenLogprob | Alternative) -> dict[str, Any]:
    return {"token": _text(item.data), "logprob": item.logprob, "bytes": list(item.data)}


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
