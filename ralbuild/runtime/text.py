"""From decided bytes to the text that a client gets: serving-side rules, stop strings, then UTF-8."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ralbuild.runtime.runtime_rules import RuleText


class StopMatcher:
    """Ends a byte stream at the first stop string, holding back only what can still become one.

    Each stop string has a Knuth-Morris-Pratt automaton; what is held is the longest prefix of a stop
    string that the stream ends with. The first stop string to complete wins, the longest on a tie.
    """

    def __init__(self, stops: tuple[bytes, ...]) -> None:
        self._stops = stops
        self._failures = [_failures(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = bytearray()
        self.stopped = False

    def feed(self, data: bytes) -> bytes:
        """Read more and return what no stop string can touch any more; nothing after a stop."""
        if not self._stops:
            return data
        if self.stopped:
            return b""
        for byte in data:
            self._held.append(byte)
            complete = self._advance(byte)
            if complete:
                self.stopped = True
                del self._held[len(self._held) - complete :]
                return self.release()
        keep = max(self._matched)
        out = bytes(self._held[: len(self._held) - keep])
        del self._held[: len(out)]
        return out

    @property
    def held(self) -> int:
        """Bytes that can still become a stop string."""
        return len(self._held)

    def release(self) -> bytes:
        """Return what is still held: the stream has ended."""
        out = bytes(self._held)
        self._held.clear()
        return out

    def _advance(self, byte: int) -> int:
        """Move every automaton; return the length of the longest stop string that is complete, or 0."""
        complete = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != byte:
                matched = self._failures[index][matched]
            matched += stop[matched] == byte
            self._matched[index] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _failures(stop: bytes) -> list[int]:
    """Return, for each matched length, the longest shorter one that is also a match so far."""
    table = [0, 0]
    length = 0
    for byte in stop[1:]:
        while length and stop[length] != byte:
            length = table[length]
        length += stop[length] == byte
        table.append(length)
    return table


class TextStream:
    """One answer's text. Streamed pieces joined give exactly the text of an answer sent whole.

    Args:
        stops: the client's stop strings.
        rules: rules of the serving side; they read what the image's rules decided.
    """

    def __init__(self, stops: tuple[str, ...], rules: RuleText | None = None) -> None:
        self._rules = rules
        self._matcher = StopMatcher(tuple(stop.encode() for stop in stops))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self._matcher.stopped or (self._rules is not None and self._rules.stopped)

    @property
    def held(self) -> int:
        """Bytes that a stop string holds back."""
        return self._matcher.held

    def push(self, data: bytes) -> str:
        """Read bytes that the rules decided and return the text that is now certain."""
        if self._rules is not None:
            data = self._rules.feed(data)
        return self._decoder.decode(self._matcher.feed(data))

    def end(self, rest: bytes, appended: bytes) -> str:
        """End the text with the model's last bytes and with what the rules append after any text.

        A stop string can match in ``rest`` but never in ``appended``: a client cannot cut it off, and
        the serving side's rules cannot change it.
        """
        if self._rules is not None:
            rest = self._rules.feed(rest) + self._rules.finish()
        text = self._matcher.feed(rest) + self._matcher.release()
        return self._decoder.decode(text + appended, True)
