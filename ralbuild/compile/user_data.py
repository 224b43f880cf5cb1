"""A user kernel's own config as arrays that its parameters are bound to. docs/kernels.md has the table.

The arrays become one object of the bundle (`Kernel.data`), named as the parameters' buffers are:
`terms` and `term_count`, and ``config.<name>`` for every other value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ralbuild.contract.arrays import Array, make_array, write_arrays
from ralbuild.contract.codec import FormatError

DATA_FORMAT = "ralbuild.kernel-data/1"
PREFIX = "config."
Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

_DTYPES = {
    "i8": "I8", "i16": "I16", "i32": "I32", "i64": "I64",
    "u8": "U8", "u16": "U16", "u32": "U32", "u64": "U64",
    "fp32": "F32", "fp64": "F64",
}  # fmt: skip
_SUFFIXES = ("_offsets", "_count", "_size")


class NoValueError(Exception):
    """A config value does not suit its parameter; the text says why."""


@dataclass(slots=True)
class UserData:
    """Turns settings into arrays, as parameters ask for them.

    Attributes:
        settings: the transformer's ``config``.
        encode: gives token ids; None when there is no tokenizer.
        used: keys that some parameter or constant took.
        arrays: by buffer name.
    """

    settings: Mapping[str, object]
    encode: Encode | None
    used: set[str] = field(default_factory=set)
    arrays: dict[str, Array] = field(default_factory=dict)
    text_types: dict[str, str] = field(default_factory=dict)
    """Key to the element type as which its text is passed: ids or bytes."""

    @property
    def terms_key(self) -> str | None:
        """The key whose text `terms` holds: ``terms``, else the only list of text."""
        if "terms" in self.settings:
            return "terms"
        lists = [key for key, value in self.settings.items() if _texts(value) is not None]
        return lists[0] if len(lists) == 1 else None

    def note_text_types(self, parameters: Mapping[str, str]) -> None:
        """Learn from all parameters (stem to type) whether a text is wanted as ids or as bytes."""
        for stem, kind in parameters.items():
            if stem in self.settings and kind.startswith("*"):
                self.text_types[stem] = kind[1:]

    def names(self, stem: str) -> bool:
        """Tell whether a parameter's stem names a value of the config."""
        return self._key(stem) is not None or stem in ("terms", "term_count")

    def bind(self, stem: str, kind: str) -> str:
        """Make the array of one parameter and return the name of its buffer.

        Args:
            stem: the parameter's name without ``_ptr``; `terms` for its aliases.
            kind: Triton type.

        Raises:
            NoValueError: saying what the config lacks or why the value does not fit.
        """
        if stem in ("terms", "term_count"):
            return self._bind_terms(stem)
        key, suffix = self._key(stem) or (stem, "")
        self.used.add(key)
        values = self._values(key, suffix, kind)
        if not kind.startswith("*") and len(values) != 1:
            raise NoValueError(f"config key {key!r} is a list; the parameter takes one value ({kind})")
        self.arrays[PREFIX + stem] = _packed(key, kind.removeprefix("*"), values)
        return PREFIX + stem

    def object(self) -> bytes | None:
        """Return the bytes of the data object; None when no parameter takes any."""
        return write_arrays(self.arrays, {"format": DATA_FORMAT}) if self.arrays else None

    def _key(self, stem: str) -> tuple[str, str] | None:
        if stem in self.settings:
            return stem, ""
        for suffix in _SUFFIXES:
            key = stem.removesuffix(suffix)
            if key != stem and key in self.settings:
                return key, suffix
        return None

    def _bind_terms(self, stem: str) -> str:
        key = self.terms_key
        if key is None:
            raise NoValueError(
                "the config has no list of text: give one, under any key, or several and `terms`"
            )
        self.used.add(key)
        ids = list(itertools.chain.from_iterable(self._ids(text) for text in self._text(key)))
        self.arrays[stem] = make_array("I32", ids if stem == "terms" else [len(ids)])
        return stem

    def _text(self, key: str) -> list[str]:
        texts = _texts(self.settings[key])
        if texts is None:
            raise NoValueError(f"config key {key!r} must be a list of text")
        return texts

    def _ids(self, text: str) -> Sequence[int]:
        if self.encode is None:
            raise NoValueError("text becomes token ids, and there is no tokenizer: name the model")
        return self.encode(text)

    def _values(self, key: str, suffix: str, kind: str) -> Sequence[int | float]:
        value = self.settings[key]
        texts = _texts(value)
        if texts is None:
            numbers = value if isinstance(value, list) else [value]
            known = [item for item in numbers if isinstance(item, int | float)]
            if len(known) != len(numbers):
                raise NoValueError(
                    f"config key {key!r} must be a number, true or false, text, or a list of one kind"
                )
            if suffix == "_offsets":
                raise NoValueError(f"config key {key!r} holds numbers, which have no offsets")
            return [len(known)] if suffix else [_number(item) for item in known]
        if suffix == "_count":
            return [len(texts)]
        parts = self._parts(key, texts, kind, suffix)
        if suffix == "_size":
            return [sum(map(len, parts))]
        if suffix == "_offsets":
            return [0, *itertools.accumulate(map(len, parts))]
        return list(itertools.chain.from_iterable(parts))

    def _parts(self, key: str, texts: list[str], kind: str, suffix: str) -> list[Sequence[int]]:
        element = self.text_types.get(key, "") if suffix else kind.removeprefix("*")
        if not suffix and not kind.startswith("*"):
            raise NoValueError(f"config key {key!r} is text; the parameter must be *uint8 or *int32")
        if element in ("u8", "i8"):
            shift = 256 if element == "i8" else 0
            return [[byte - shift * (byte > 127) for byte in text.encode()] for text in texts]
        if element in ("i32", "i64", "u32", "u64"):
            return [self._ids(text) for text in texts]
        raise NoValueError(
            f"config key {key!r} is text: pass it as *uint8 (UTF-8 bytes) or *int32 (token ids)"
            + (f", found {kind}" if not suffix else f"; no parameter {key!r} says which")
        )


def _texts(value: object) -> list[str] | None:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return list(value)
    return None


def _number(value: int | float) -> int | float:
    return int(value) if isinstance(value, bool) else value


def _packed(key: str, element: str, values: Sequence[int | float]) -> Array:
    dtype = _DTYPES.get(element)
    if dtype is None:
        raise NoValueError(
            f"config key {key!r} cannot be passed as {element}; use one of {', '.join(_DTYPES)}"
        )
    whole = element[0] in "iu"
    for value in values:
        if whole and not isinstance(value, int):
            raise NoValueError(f"config key {key!r} holds {value!r}, no whole number ({element})")
        if not whole and (not math.isfinite(value) or (element == "fp32" and abs(value) > 3.4028235e38)):
            raise NoValueError(f"config key {key!r} holds {value!r}, which {element} cannot")
    try:
        return make_array(dtype, values)
    except FormatError:
        raise NoValueError(f"config key {key!r} holds a number that {element} cannot") from None
