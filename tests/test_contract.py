"""Canonical JSON, strict parsing, dataclasses through JSON, table files: against json and safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ralbuild.contract.arrays import Array, make_array, read_arrays, write_arrays
from ralbuild.contract.bundle import read_bundle
from ralbuild.contract.codec import FormatError, canonical_json, from_plain, parse_json, to_plain
from ralbuild.contract.vocab import read_vocab, write_vocab

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 60), 1 << 60)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(VALUES)
def test_canonical_json_is_json_and_has_one_text(value: object) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert parse_json(text, "x") == value


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":2}', "[NaN]", "[Infinity]", "[1e999]", '["\\ud800"]', "[" * 70 + "]" * 70, "{", "", "[1,]", "[" * 100_000, "1" * 5000],
)  # fmt: skip
def test_what_json_does_not_define_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_json(text, "x")


@dataclass(frozen=True)
class Inner:
    n: int


@dataclass(frozen=True)
class Outer:
    items: tuple[Inner, ...]
    table: dict[str, float]
    maybe: float | None
    flag: bool


def test_dataclasses_come_back_as_they_went() -> None:
    value = Outer((Inner(1), Inner(2)), {"a": 0.5}, None, True)
    assert from_plain(Outer, json.loads(canonical_json(to_plain(value))), "x") == value


@pytest.mark.parametrize(
    ("change", "wording"),
    [
        ({"items": [{"n": "1"}]}, "x.items[0].n: needs int, found str"),
        ({"items": [{"n": True}]}, "x.items[0].n: needs int"),
        ({"items": [{}]}, "x.items[0]: lacks 'n'"),
        ({"extra": 1}, "x: has the unknown field 'extra'"),
        ({"table": {"a": "b"}}, "x.table.a: needs float"),
        ({"flag": 1}, "x.flag: needs bool"),
    ],
)
def test_a_wrong_field_is_named(change: dict, wording: str) -> None:
    plain = {"items": [], "table": {}, "maybe": 1, "flag": False} | change
    with pytest.raises(FormatError) as caught:
        from_plain(Outer, plain, "x")
    assert wording in str(caught.value)


def test_a_table_file_opens_in_the_safetensors_library() -> None:
    data = write_arrays(
        {"a": make_array("U32", [1, 2, 3]), "b": Array("U8", (2, 2), b"wxyz"), "c": make_array("I32", [-1])},
        {"format": "test"},
    )
    arrays = safetensors.numpy.load(data)
    assert arrays["a"].tolist() == [1, 2, 3]
    assert arrays["b"].shape == (2, 2)
    assert arrays["c"].tolist() == [-1]
    assert read_arrays(data, "x").take("a", "U32").tolist() == [1, 2, 3]


@given(st.lists(st.binary(max_size=6), max_size=20))
def test_a_vocabulary_comes_back_token_by_token(tokens: list[bytes]) -> None:
    vocab = read_vocab(write_vocab(tokens), "x")
    assert [vocab[number] for number in range(len(vocab))] == tokens


@given(st.binary(max_size=200))
def test_no_bytes_are_a_bundle_by_accident(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_bundle(data)
