"""`load_config`: file to `LoadedConfig`, or one ConfigError with every problem in it."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ralbuild.config.model import (
    BUILT_IN_ACTIONS,
    OUTPUT_TRANSFORMERS,
    TOKEN_FILTERS,
    Action,
    Config,
    FilterConfig,
    Model,
    OutputTransformer,
    RouteRule,
    TokenFilter,
)
from ralbuild.config.scopes import scope_problems
from ralbuild.config.strict_yaml import MAX_BYTES, Document, read_yaml
from ralbuild.config.strict_yaml import Path as KeyPath
from ralbuild.errors import ConfigError, Problem

M = TypeVar("M", bound=BaseModel)

LISTENING_KEYS = ("endpoint", "host", "port")
LISTENING_REASON = "rules listen on nothing; the model service does, on port 8000 of the container"

_MAY_READ = "make it readable for the user who runs ralbuild"


@dataclass(frozen=True, slots=True)
class UserKernel:
    """A file of the user's ``transformers/`` folder: its source is compiled, never imported here."""

    name: str
    path: Path
    source: bytes
    settings: dict[str, Any]
    place: str
    priority: int


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid config and where each part of it stands.

    Attributes:
        config: the parsed values.
        path: the file.
        source: its bytes, which go into the image for people to read.
        filters: settings of each token filter, with its index in the file.
        enhancers: settings of each built-in output transformer, with its index in the file.
        kernels: user kernels, in file order.
        actions: every action a route names, built-ins included.
    """

    config: Config
    path: Path
    source: bytes
    filters: tuple[tuple[int, str, FilterConfig], ...]
    enhancers: tuple[tuple[int, str, Model], ...]
    kernels: tuple[UserKernel, ...]
    actions: dict[str, Action]
    document: Document

    @property
    def declarative_priorities(self) -> tuple[int, ...]:
        """The priorities of the built-in output transformers, in file order."""
        items = self.config.postprocessing.output_transformers
        return tuple(items[index].priority for index, _, _ in self.enhancers)

    def place(self, *path: str | int) -> str:
        """Return ``file:line:column`` of a value; `built-in` when the file does not hold it."""
        return self.document.values.get(path, "built-in")


def load_config(path: Path) -> LoadedConfig:
    """Read and check a config.

    Raises:
        ConfigError: with every problem found, each with file:line:column where it has one.
    """
    try:
        if not path.is_file():
            what = "is not a file" if path.exists() else "no such file"
            raise ConfigError(what, place=str(path), hint="run `ralbuild init` for a config to start from")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", place=str(path), hint=_MAY_READ) from None
    document = read_yaml(data, path.name)
    if document.problems:
        raise ConfigError.of(document.problems)
    return _Loader(path, data, document).load()


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a config that name each other, each with its index in the file."""

    actions: dict[str, Action]
    rules: list[tuple[int, RouteRule]]
    filters: list[tuple[int, TokenFilter]]
    transformers: list[tuple[int, OutputTransformer]]

    @classmethod
    def of(cls, config: Config) -> _Parts:
        return cls(
            config.actions,
            list(enumerate(config.routing.rules)),
            list(enumerate(config.preprocessing.token_filters)),
            list(enumerate(config.postprocessing.output_transformers)),
        )

    @classmethod
    def salvage(cls, raw: Any) -> _Parts:
        """Take what is sound out of an invalid config, so that one run reports names as well."""
        actions = _dig(raw, "actions")
        return cls(
            {str(name): Action() for name in actions} if isinstance(actions, dict) else {},
            [
                (index, RouteRule.model_construct(action=item["action"]))
                for index, item in _mappings(_dig(raw, "routing", "rules"))
                if isinstance(item.get("action"), str)
            ],
            _sound_items(TokenFilter, _dig(raw, "preprocessing", "token_filters")),
            _sound_items(OutputTransformer, _dig(raw, "postprocessing", "output_transformers")),
        )


def _dig(value: Any, *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _mappings(raw: Any) -> list[tuple[int, dict[str, Any]]]:
    items = enumerate(raw) if isinstance(raw, list) else ()
    return [(index, item) for index, item in items if isinstance(item, dict)]


def _sound_items(kind: type[M], raw: Any) -> list[tuple[int, M]]:
    out = []
    for index, item in _mappings(raw):
        with contextlib.suppress(ValidationError):  # reported when the whole config was checked
            out.append((index, kind.model_validate(item)))
    return out


def _line_and_column(problem: Problem) -> tuple[int, int]:
    parts = problem.place.rsplit(":", 2)
    return (int(parts[1]), int(parts[2])) if len(parts) == 3 else (0, 0)


class _Loader:
    def __init__(self, path: Path, source: bytes, document: Document) -> None:
        self.path = path
        self.source = source
        self.document = document
        self.problems: list[Problem] = []

    def load(self) -> LoadedConfig:
        config = self._validate(Config, self.document.value, ())
        parts = _Parts.of(config) if config else _Parts.salvage(self.document.value)
        actions = self._resolve_actions(parts)
        filters = self._resolve_filters(parts)
        enhancers, kernels = self._resolve_transformers(parts)
        if config:
            self.problems += scope_problems(config, enhancers, self.document)
        if self.problems or config is None:
            raise ConfigError.of(sorted(self.problems, key=_line_and_column))
        return LoadedConfig(
            config, self.path, self.source, filters, enhancers, kernels, actions, self.document
        )

    def _validate(self, kind: type[M], value: Any, at: KeyPath) -> M | None:
        found, problems = check(kind, value, self.document, at)
        self.problems += problems
        return found

    def _resolve_actions(self, parts: _Parts) -> dict[str, Action]:
        known = {**BUILT_IN_ACTIONS, **parts.actions}
        used: dict[str, Action] = {}
        for index, rule in parts.rules:
            if rule.action in known:
                used[rule.action] = known[rule.action]
                continue
            place = self.document.place(("routing", "rules", index, "action"))
            near = _did_you_mean(rule.action, known)
            hint = f"define it under 'actions', or use one of: {', '.join(sorted(known))}"
            self.problems.append(Problem(f"no action is named {rule.action!r}{near}", place, hint))
        return used

    def _resolve_filters(self, parts: _Parts) -> tuple[tuple[int, str, FilterConfig], ...]:
        out = []
        for index, item in parts.filters:
            at: KeyPath = ("preprocessing", "token_filters", index)
            if item.name not in TOKEN_FILTERS:
                self._no_such("token filter", item.name, at, TOKEN_FILTERS)
                continue
            settings = self._validate(TOKEN_FILTERS[item.name], item.config, (*at, "config"))
            if settings is not None:
                out.append((index, item.name, settings))
        return tuple(out)

    def _resolve_transformers(
        self, parts: _Parts
    ) -> tuple[tuple[tuple[int, str, Model], ...], tuple[UserKernel, ...]]:
        enhancers, kernels = [], []
        names: set[str] = set()
        for index, item in parts.transformers:
            at: KeyPath = ("postprocessing", "output_transformers", index)
            if item.name in names:
                place = self.document.place((*at, "name"))
                hint = "put all of its settings into one entry"
                self.problems.append(
                    Problem(f"output transformer {item.name!r} is listed twice", place, hint)
                )
                continue
            names.add(item.name)
            kernel = self._user_kernel(item, at)
            if kernel is not None:
                kernels.append(kernel)
            elif item.name not in OUTPUT_TRANSFORMERS:
                self._no_such("output transformer", item.name, at, OUTPUT_TRANSFORMERS)
            else:
                settings = self._validate(OUTPUT_TRANSFORMERS[item.name], item.config, (*at, "config"))
                if settings is not None:
                    enhancers.append((index, item.name, settings))
        return tuple(enhancers), tuple(kernels)

    def _user_kernel(self, item: OutputTransformer, at: KeyPath) -> UserKernel | None:
        """Return the kernel of ``transformers/<name>.py`` when that file defines ``<name>_kernel``."""
        name = item.name
        path = self.path.parent / "transformers" / f"{name}.py"
        try:
            if not path.is_file():
                return None
            source = path.read_bytes()
        except OSError as error:
            self.problems.append(Problem(f"cannot be read: {error.strerror}", str(path), _MAY_READ))
            return None
        if not re.search(rb"^\s*def\s+" + name.encode() + rb"_kernel\s*\(", source, re.MULTILINE):
            return None
        return UserKernel(name, path, source, item.config, self.document.place((*at, "name")), item.priority)

    def _no_such(self, what: str, name: str, at: KeyPath, known: Iterable[str]) -> None:
        names = sorted(known)
        message = f"no {what} is named {name!r}{_did_you_mean(name, names)}"
        hint = f"built-in: {', '.join(names)}"
        if what == "output transformer":
            hint += f"; or define {name}_kernel in transformers/{name}.py beside the config"
        self.problems.append(Problem(message, self.document.place((*at, "name")), hint))


def check(kind: type[M], value: Any, document: Document, at: KeyPath = ()) -> tuple[M | None, list[Problem]]:
    """Check ``value``, which stands at the path ``at`` of ``document``, against ``kind``."""
    try:
        return kind.model_validate(value), []
    except ValidationError as error:
        return None, [_problem(kind, item, document, at) for item in error.errors(include_url=False)]


def read_checked(kind: type[M], path: Path, hint: str = _MAY_READ) -> tuple[M, Document]:
    """Read a file that is one ``kind`` and names nothing else; return it and where its parts stand.

    Raises:
        ConfigError: with every problem found; ``hint`` is for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", place=str(path), hint=hint) from None
    document = read_yaml(data, path.name)
    if document.problems:
        raise ConfigError.of(document.problems)
    found, problems = check(kind, document.value, document)
    if found is None:
        raise ConfigError.of(problems)
    return found, document


def _problem(kind: type[BaseModel], item: ErrorDetails, document: Document, at: KeyPath) -> Problem:
    loc = tuple(part for part in item["loc"] if part != "[key]")
    path = at + loc
    about_key = item["type"] == "extra_forbidden" or item["loc"][-1:] == ("[key]",)
    place = document.place(path, key=about_key)
    if item["type"] == "extra_forbidden":
        return _unknown_key(kind, loc, place)
    if item["type"] == "missing":
        wanted = _meaning(kind, loc) or f"add the key {path[-1]!r}"
        return Problem(f"{_dotted(path[:-1]) or 'the file'} lacks the key {path[-1]!r}", place, wanted)
    name = _dotted(path) or "the file"
    hint = _quoting_hint(item) or _meaning(kind, loc) or "`ralbuild schema --markdown` describes every key"
    return Problem(f"{name}: {_wording(item)}", place, hint)


def _unknown_key(kind: type[BaseModel], loc: KeyPath, place: str) -> Problem:
    key = str(loc[-1])
    if key in LISTENING_KEYS:
        return Problem(f"{key!r} has no place here: {LISTENING_REASON}", place, f"remove {key!r}")
    names = _field_names(kind, loc[:-1])
    return Problem(f"unknown key {key!r}{_did_you_mean(key, names)}", place, f"keys here: {', '.join(names)}")


def _dotted(path: KeyPath) -> str:
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else part
    return out


def _field_names(kind: type[BaseModel], loc: KeyPath) -> list[str]:
    """Return the key names that the mapping at ``loc`` below ``kind`` may have."""
    return list(_fields_at(kind, loc))


def _meaning(kind: type[BaseModel], loc: KeyPath) -> str:
    """Return what the key at ``loc``, or above it in a list, is for; empty for what has no key of its own."""
    while loc and isinstance(loc[-1], int):
        loc = loc[:-1]
    field = _fields_at(kind, loc[:-1]).get(str(loc[-1])) if loc else None
    return f"{loc[-1]}: {field.description}" if field is not None and field.description else ""


def _fields_at(kind: type[BaseModel], loc: KeyPath) -> dict[str, FieldInfo]:
    """Return the fields, by key, of the mapping at ``loc`` below ``kind``; empty for what is none."""
    here: Any = kind
    for part in loc:
        if isinstance(here, type) and issubclass(here, BaseModel):
            fields = {field.alias or name: field for name, field in here.model_fields.items()}
            here = fields[str(part)].annotation if str(part) in fields else None
            if isinstance(here, types.UnionType):  # an optional mapping
                here = next(item for item in typing.get_args(here) if item is not types.NoneType)
        else:  # a list or dict of models: its last type argument is the item's type
            here = typing.get_args(here)[-1] if typing.get_args(here) else None
    if isinstance(here, type) and issubclass(here, BaseModel):
        return {field.alias or name: field for name, field in here.model_fields.items()}
    return {}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


_NEEDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _wording(item: ErrorDetails) -> str:
    context = item.get("ctx", {})
    found = _show(item["input"])
    kind = item["type"]
    if kind in _NEEDS:
        return f"needs {_NEEDS[kind]}, found {found}"
    if kind == "literal_error":
        return f"needs {context['expected']}, found {found}{_near_literal(item)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return f"{found} is not a valid name: it must match {context['pattern']}"
    text = item["msg"]
    return f"{text[0].lower()}{text[1:]}, found {found}"


def _near_literal(item: ErrorDetails) -> str:
    options = re.findall(r"'([^']*)'", item["ctx"]["expected"])
    return _did_you_mean(item["input"], options) if isinstance(item["input"], str) else ""


def _quoting_hint(item: ErrorDetails) -> str:
    """Say how to write a value that YAML read as a number, boolean or null where text is needed."""
    value = item["input"]
    wants_text = item["type"] == "string_type" or (item["type"] == "literal_error" and "'" in item["msg"])
    if wants_text and (value is None or isinstance(value, bool | int | float)):
        return f"put it in quotes: {json.dumps(str(value))}"
    return ""


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
