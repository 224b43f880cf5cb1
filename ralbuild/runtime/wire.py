"""Frames between the supervisor and its worker: a JSON head, then bytes, over a pair of sockets."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.orders import Alternative, Piece, TokenLogprob

Message = dict[str, Any]
_SIZES = struct.Struct("!II")
"""Bytes of the head and of what follows it."""


def pack(message: Message, payload: bytes = b"") -> bytes:
    """Return one frame."""
    head = json.dumps(message, separators=(",", ":")).encode()
    return _SIZES.pack(len(head), len(payload)) + head + payload


class Frames:
    """Cuts a byte stream into frames. Both ends are this package, so what arrives is taken as it is."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Read more and yield every message that is complete, with the bytes behind it."""
        self._buffer += data
        while len(self._buffer) >= _SIZES.size:
            head, payload = _SIZES.unpack_from(self._buffer)
            begin, end = _SIZES.size + head, _SIZES.size + head + payload
            if len(self._buffer) < end:
                return
            message = json.loads(self._buffer[_SIZES.size : begin])
            body = bytes(self._buffer[begin:end])
            del self._buffer[:end]
            yield message, body


def pack_piece(piece: Piece) -> list[Any]:
    """Return a piece, to be sent: its fields in order, bytes as text of one character each."""
    logprobs = [
        [
            item.data.decode("latin-1"),
            item.logprob,
            [[top.data.decode("latin-1"), top.logprob] for top in item.top],
        ]
        for item in piece.logprobs
    ]
    return [piece.text, piece.tokens, piece.finish, piece.error, logprobs]


def unpack_piece(fields: list[Any]) -> Piece:
    """Return the piece that the other side packed."""
    text, tokens, finish, error, logprobs = fields
    if not logprobs:
        return Piece(text, tokens, finish, error)
    return Piece(
        text,
        tokens,
        finish,
        error,
        tuple(
            TokenLogprob(
                data.encode("latin-1"),
                logprob,
                tuple(Alternative(other.encode("latin-1"), value) for other, value in top),
            )
            for data, logprob, top in logprobs
        ),
    )


def pack_error(error: ApiError) -> Message:
    """Return the fields of an error, to be sent."""
    return {
        "status": error.status,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "retry_after": error.retry_after,
        "extra": error.extra,
    }


def unpack_error(fields: Message) -> ApiError:
    """Return the error that the other side packed."""
    return ApiError(
        fields["status"],
        fields["code"],
        fields["message"],
        param=fields["param"],
        retry_after=fields["retry_after"],
        extra=fields["extra"],
    )
