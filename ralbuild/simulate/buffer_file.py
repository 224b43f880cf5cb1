"""``--buffers``: what a user's kernel is launched over, from a small YAML file (docs/simulate.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ralbuild.config.strict_yaml import Document, read_yaml
from ralbuild.contract.bundle import Kernel, Param
from ralbuild.errors import ConfigError, Problem, UsageError
from ralbuild.simulate.lanes import Array
from ralbuild.simulate.session import Argument

MAX_ELEMENTS = 1 << 26
MAX_BLOCKS = 1 << 16
_TOP = ("blocks", "launches", "buffers")
_KEYS = ("size", "values", "fill", "random", "seed", "set")
_ELEMENTS: dict[str, Any] = {
    "i1": np.int8, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "fp16": np.float16, "bf16": np.uint16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BufferFile:
    """A parsed file: the launch, and what it says of each parameter."""

    document: Document
    blocks: int | None
    launches: int

    def arguments(self, kernel: Kernel, defaults: Mapping[str, Argument]) -> dict[str, Argument]:
        """Return the kernel's arguments in launch order: the file's, else ``defaults`` by parameter.

        Raises:
            ConfigError: for parameters that the kernel does not have, and values that do not fit.
        """
        given = self.document.value["buffers"]
        shown = {param.name: param for param in kernel.params if not param.hidden}
        reader = _Reader(self.document)
        for name in given:
            if name not in shown:
                reader.wrong(
                    f"{kernel.name!r} has no parameter {name!r}", name, hint=f"it has: {', '.join(shown)}"
                )
        out = {
            name: reader.argument(param, given[name]) if name in given else defaults.get(name)
            for name, param in shown.items()
        }
        for name, value in out.items():
            if value is None and not reader.problems:
                hint = f"add `{name}: {{size: 64}}` under 'buffers'"
                reader.wrong(f"{kernel.name!r} needs a buffer for {name!r}, found none", hint=hint)
        if reader.problems:
            raise ConfigError.of(reader.problems)
        return {name: value for name, value in out.items() if value is not None}


def read_buffer_file(path: Path) -> BufferFile:
    """Read a buffer file.

    Raises:
        UsageError: when it cannot be read.
        ConfigError: with every mistake that can be seen without the kernel.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = "write one as docs/simulate.md shows, and name it with --buffers"
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path), hint=hint) from None
    document = read_yaml(data, str(path))
    if document.problems:
        raise ConfigError.of(document.problems)
    reader = _Reader(document)
    top = document.value
    if not isinstance(top, dict) or not isinstance(top.get("buffers"), dict):
        found = f"the keys {', '.join(map(str, top))}" if isinstance(top, dict) else "no mapping"
        raise ConfigError(
            f"needs a mapping with the key 'buffers', itself a mapping; found {found}",
            place=document.place(()) or str(path),
            hint="buffers: {NAME: {size: 64}} gives the parameter NAME 64 zeros",
        )
    for key in top:
        if key not in _TOP:
            reader.wrong(f"unknown key {key!r}", top=key, hint=f"keys here: {', '.join(_TOP)}")
    counts = {}
    for key, most in (("blocks", MAX_BLOCKS), ("launches", 1000)):
        value = top.get(key, 1)
        if type(value) is not int or not 1 <= value <= most:
            reader.wrong(
                f"needs a whole number from 1 to {most}, found {value!r}",
                top=key,
                hint=f"leave {key!r} out for 1",
            )
        counts[key] = value
    if reader.problems:
        raise ConfigError.of(reader.problems)
    return BufferFile(document, counts["blocks"] if "blocks" in top else None, counts["launches"])


class _Reader:
    """Turns values into arrays and collects what is wrong."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []

    def wrong(self, message: str, name: str = "", key: str = "", top: str = "", *, hint: str) -> None:
        """Note a mistake at a parameter, one of its keys, or a key of the file; ``hint`` says what to do."""
        path = (top,) if top else tuple(part for part in ("buffers", name, key) if part)
        self.problems.append(Problem(message, self.document.place(path, key=not key), hint))

    def argument(self, param: Param, value: object) -> Argument | None:
        """Return the array or number for a parameter."""
        pointer = param.type.startswith("*")
        dtype = np.dtype(_ELEMENTS[param.type.lstrip("*")])
        if not pointer:
            return self._number(param, value, dtype, "")
        if not isinstance(value, dict):
            hint = f"{param.name}: {{size: 64}} is 64 zeros"
            self.wrong(f"needs a mapping with 'size' or 'values', found {value!r}", param.name, hint=hint)
            return None
        before = len(self.problems)
        for key in value:
            if key not in _KEYS:
                self.wrong(f"unknown key {key!r}", param.name, key, hint=f"keys here: {', '.join(_KEYS)}")
        array = self._array(param, value, dtype)
        return array if len(self.problems) == before else None

    def _array(self, param: Param, value: dict[str, Any], dtype: np.dtype[Any]) -> Array | None:
        listed = value.get("values", [])
        size = value.get("size", len(listed) if isinstance(listed, list) else 0)
        if type(size) is not int or not 1 <= size <= MAX_ELEMENTS:
            hint = "give 'size', or the elements in 'values'"
            self.wrong(f"needs 1 to {MAX_ELEMENTS} elements, found {size!r}", param.name, "size", hint=hint)
            return None
        if not isinstance(listed, list) or len(listed) > size:
            found = f"{len(listed)} of them" if isinstance(listed, list) else "no list"
            hint = "leave 'size' out, or make it larger"
            self.wrong(
                f"needs a list of at most {size} numbers, found {found}", param.name, "values", hint=hint
            )
            return None
        out = np.zeros(size, dtype)
        if "random" in value:
            self._randomize(param, value, out)
        else:
            out[:] = self._number(param, value.get("fill", 0), dtype, "fill") or 0
        for at, item in enumerate(listed):
            out[at] = self._number(param, item, dtype, "values") or 0
        self._set(param, value.get("set", {}), out)
        return out

    def _randomize(self, param: Param, value: dict[str, Any], out: Array) -> None:
        bounds, seed = value["random"], value.get("seed", 1)
        if not isinstance(bounds, list) or len(bounds) != 2 or type(seed) is not int or seed < 0:
            found = f"{bounds!r} and the seed {seed!r}"
            message = f"needs 'random: [least, most]' and a seed that is not negative, found {found}"
            self.wrong(message, param.name, "random", hint="random: [-1, 1], seed: 1")
            return
        if any(self._number(param, bound, out.dtype, "random") is None for bound in bounds):
            return
        low, high = bounds
        if low > high:
            hint = f"random: [{high}, {low}]"
            self.wrong(
                f"needs two numbers in ascending order, found {bounds}", param.name, "random", hint=hint
            )
            return
        rng = np.random.default_rng(seed)
        if "bf16" in param.type:
            out[:] = rng.uniform(low, high, out.size).astype(np.float32).view(np.uint32) >> np.uint32(16)
        elif out.dtype.kind in "iu":
            out[:] = rng.integers(low, high, out.size, dtype=out.dtype, endpoint=True)
        else:
            out[:] = rng.uniform(low, high, out.size)

    def _set(self, param: Param, pairs: object, out: Array) -> None:
        if not isinstance(pairs, dict):
            hint = "set: {0: 1} makes the first element 1"
            self.wrong(f"needs a mapping of element to number, found {pairs!r}", param.name, "set", hint=hint)
            return
        for at, item in pairs.items():
            if not at.isascii() or not at.isdecimal() or len(at) > 10 or int(at) >= out.size:
                hint = "elements are counted from 0; 'size' makes room for more"
                message = f"needs an element from 0 to {out.size - 1}, found {at!r}"
                self.wrong(message, param.name, "set", hint=hint)
                return
            out[int(at)] = self._number(param, item, out.dtype, "set") or 0

    def _number(self, param: Param, value: object, dtype: np.dtype[Any], key: str) -> int | float | None:
        """Return a number that fits the type; bfloat16 is given as a number and kept as its bits."""
        whole = dtype.kind in "iu" and "bf16" not in param.type
        fits: Callable[[Any], bool] = lambda x: True  # noqa: E731, ARG005
        if whole:
            limits = np.iinfo(dtype)
            fits = lambda x: limits.min <= x <= limits.max  # noqa: E731
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
            hint = (
                f"a whole number from {limits.min} to {limits.max}" if whole else "a number, without quotes"
            )
            message = f"needs a number of type {param.type.lstrip('*')}, found {value!r}"
            self.wrong(message, param.name, key, hint=hint)
            return None
        if "bf16" in param.type:
            return int(np.float32(value).view(np.uint32) >> np.uint32(16))
        return int(value) if whole else float(value)
