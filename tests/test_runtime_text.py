"""Stop strings and UTF-8: what is streamed joins to what is sent whole, and nothing is held too long."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ralbuild.runtime.text import StopMatcher, TextStream

WORDS = st.text("ab", min_size=1, max_size=4)


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """The definition: the stop string that ends first wins, the longest if two end together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.text("abc", max_size=30), st.lists(WORDS, max_size=4), st.lists(st.integers(0, 40), max_size=6))
def test_text_ends_at_the_first_stop_string_however_it_arrives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = TextStream(tuple(stops))
    out = "".join(stream.push(piece) for piece in split(text.encode(), cuts)) + stream.end(b"", b"")
    assert out == cut_at_first_stop(text, stops)
    assert stream.stopped == (any(stop in text for stop in stops))


@given(st.text("abc", max_size=30), st.lists(WORDS, min_size=1, max_size=4))
def test_no_byte_is_held_that_no_stop_string_can_still_take(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stop.encode() for stop in stops))
    out = b""
    for index, byte in enumerate(text.encode(), 1):
        out += matcher.feed(bytes([byte]))
        if matcher.stopped:
            return
        seen = text[:index]
        longest = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert len(out) == index - longest


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_bytes_decode_like_the_whole_with_broken_ones_replaced(data: bytes, cuts: list[int]) -> None:
    stream = TextStream(())
    out = "".join(stream.push(piece) for piece in split(data, cuts)) + stream.end(b"", b"")
    assert out == data.decode(errors="replace")


def test_a_character_is_sent_when_its_last_byte_comes() -> None:
    stream = TextStream(())
    assert [stream.push(bytes([byte])) for byte in "é世".encode()] == ["", "é", "", "", "世"]


def test_a_stop_string_ends_the_model_s_text_but_never_what_the_rules_append() -> None:
    stream = TextStream(("advice",))
    assert stream.push(b"good adv") == "good "
    assert stream.end(b"ice and more", b" Not investment advice.") == " Not investment advice."
