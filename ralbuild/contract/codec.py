"""Canonical JSON, strict JSON reading, digests, and dataclasses to and from plain values."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MAX_DEPTH = 64


class FormatError(ValueError):
    """A file of ours does not have the shape it must have.

    ``where`` names the field, such as ``bundle.json: kernels[1].entry``. The stage that knows what
    the file is for turns this into its own error.
    """

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the SHA-256 of ``data`` as 64 lowercase hex digits."""
    return hashlib.sha256(data).hexdigest()


def pae(kind: str, payload: bytes) -> bytes:
    """Return what a DSSE envelope signs: the pre-authentication encoding of its type and payload."""
    name = kind.encode()
    return b"DSSEv1 %d %s %d %s" % (len(name), name, len(payload), payload)


def canonical_json(value: Any) -> bytes:
    """Return the one JSON text for ``value``: sorted keys, no spaces, UTF-8, no NaN, no newline."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def parse_json(data: bytes | str, where: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse JSON strictly: no duplicate keys, no NaN or infinity, no lone surrogate, bounded depth.

    Raises:
        FormatError: with ``where`` and what is wrong.
    """

    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        value = strict_decoder(where).decode(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(where, "a string holds a lone surrogate") from None
    except UnicodeDecodeError as error:
        raise FormatError(where, f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise FormatError(where, f"not JSON: {error.msg} at {place}") from None
    except RecursionError:
        raise FormatError(where, "nested too deeply") from None
    except FormatError:
        raise
    except ValueError:
        raise FormatError(where, "an integer has thousands of digits") from None
    check_depth(value, where, max_depth)
    return value


def strict_decoder(where: str) -> json.JSONDecoder:
    """Return a decoder that raises FormatError for duplicate keys, NaN, infinity and numbers beyond float."""
    hooks = _StrictHooks(where)
    return json.JSONDecoder(
        object_pairs_hook=hooks.pairs, parse_constant=hooks.constant, parse_float=hooks.number
    )


class _StrictHooks:
    """What `json.loads` calls for objects and numbers; refuses what JSON does not define."""

    def __init__(self, where: str) -> None:
        self.where = where

    def pairs(self, items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise FormatError(self.where, f"duplicate key {key[:80]!r}")
                seen.add(key)
        return out

    def constant(self, name: str) -> Any:
        raise FormatError(self.where, f"{name} is not JSON")

    def number(self, text: str) -> float:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise FormatError(self.where, f"number {text[:40]} is too large")
        return value


def check_depth(value: Any, where: str, limit: int = MAX_DEPTH) -> None:
    """Raise FormatError when lists and objects are nested more than ``limit`` deep."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise FormatError(where, f"nested more than {limit} levels deep")


def to_plain(value: Any) -> Any:
    """Turn dataclasses, mappings and sequences into dicts and lists that `canonical_json` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], value: Any, where: str) -> T:
    """Rebuild the dataclass ``kind`` from parsed JSON; every field must be there and no other.

    Raises:
        FormatError: naming the field that is missing, unknown or of the wrong type.
    """
    return typing.cast(T, _decode(kind, value, where))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_optional(kind, value, where)
    if origin is tuple:
        item_kind = typing.get_args(kind)[0]
        items = _expect(value, list, "a list", where)
        return tuple(_decode(item_kind, item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        item_kind = typing.get_args(kind)[1]
        table = _expect(value, dict, "an object", where)
        return {key: _decode(item_kind, item, f"{where}.{key}") for key, item in table.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, bool) and kind is not bool:
        raise FormatError(where, f"needs {kind.__name__}, found {value!r}")
    return _expect(value, kind, kind.__name__, where)


def _decode_optional(kind: Any, value: Any, where: str) -> Any:
    options = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    if value is None:
        return None
    return _decode(options[0], value, where)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    table = _expect(value, dict, "an object", where)
    hints = _hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in table:
            raise FormatError(where, f"lacks {name!r}")
    for name in table:
        if name not in names:
            raise FormatError(where, f"has the unknown field {name!r}")
    return kind(**{name: _decode(hints[name], table[name], f"{where}.{name}") for name in names})


def _expect(value: Any, kind: type, name: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise FormatError(where, f"needs {name}, found {type(value).__name__}")
    return value
