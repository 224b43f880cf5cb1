"""YAML read the strict way: the JSON subset of YAML 1.2, with a position for every value.

Refused: duplicate keys, keys that are not strings, anchors and aliases, merge keys, tags, several
documents, deep nesting, and anything that is not UTF-8. Numbers and booleans are those of JSON (so
``no`` is text and ``012`` is text, never 10). Only this module imports yaml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from ralbuild.errors import Problem

MAX_BYTES = 1 << 20
MAX_DEPTH = 32

Path = tuple[str | int, ...]

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML has it: ten times faster, the same events and marks."""

_INT = re.compile(r"-?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z")
_LOOK = "look at the quotes, brackets and indents before that place"
_WORDS: dict[str, Any] = {"": None, "null": None, "~": None, "true": True, "false": False}


@dataclass(slots=True)
class Document:
    """A parsed file.

    Attributes:
        value: plain dicts, lists, strings, numbers, booleans and None.
        values: position of each value, by path.
        keys: position of each mapping key, by the path of its value.
        problems: what is wrong with the text itself; ``value`` is only sound when there are none.
    """

    value: Any = None
    values: dict[Path, str] = field(default_factory=dict)
    keys: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path, *, key: bool = False) -> str:
        """Return ``file:line:column`` for a path, or of the nearest enclosing value."""
        if key and path in self.keys:
            return self.keys[path]
        while path not in self.values and path:
            path = path[:-1]
        return self.values.get(path, "")


def read_yaml(data: bytes, name: str) -> Document:
    """Parse ``data``; ``name`` is the file name that positions start with."""
    document = Document()
    problem = document.problems.append
    if len(data) > MAX_BYTES:
        hint = "shorten its lists: a config of that size holds some 50,000 terms"
        problem(Problem(f"the file has more than {MAX_BYTES} bytes", name, hint))
        return document
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem(Problem(f"not UTF-8 at byte {error.start}", name, "save the file as UTF-8"))
        return document
    try:
        if not _check_events(text, name, document):
            return document
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        what = error.problem or error.context
        problem(Problem(f"not YAML: {what}", _at(name, error.problem_mark), _LOOK))
        return document
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        problem(Problem(f"not YAML: {str(error).splitlines()[0]}", name, _LOOK))
        return document
    if root is None:
        problem(Problem("the file is empty", name, "run `ralbuild init` for a config to start from"))
        return document
    document.value = _Reader(name, document).read(root, ())
    return document


def _at(name: str, mark: Any) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _check_events(text: str, name: str, document: Document) -> bool:
    """Look at the event stream before nodes are built: depth, aliases, tags, documents."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        at = _at(name, event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            document.problems.append(
                Problem("anchors and aliases are not allowed", at, "write the value out")
            )
            return False
        if tag := getattr(event, "tag", None):
            document.problems.append(Problem(f"the tag {tag!r} is not allowed", at, "write a plain value"))
            return False
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                message = "a second document starts here; only one is read"
                document.problems.append(Problem(message, at, "remove the line `---`"))
                return False
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                message = f"nested more than {MAX_DEPTH} levels deep"
                document.problems.append(Problem(message, at, "no key needs a third of that"))
                return False
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return True


class _Reader:
    """Turns yaml nodes into plain values and records where each one stands."""

    def __init__(self, name: str, document: Document) -> None:
        self.name = name
        self.document = document

    def read(self, node: yaml.Node, path: Path) -> Any:
        at = _at(self.name, node.start_mark)
        self.document.values[path] = at
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, at)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            at = _at(self.name, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem("a key must be text", at, "write it as `name: value`")
                continue
            key = key_node.value
            if not key_node.style and key == "<<":
                self._problem("the merge key '<<' is not allowed", at, "write the keys out")
                continue
            if key in out:
                first = self.document.keys[(*path, key)].rsplit(":", 2)[1]
                message = f"duplicate key {key!r}; it is already set on line {first}"
                self._problem(message, at, "keep one of them")
                continue
            self.document.keys[(*path, key)] = at
            out[key] = self.read(value_node, (*path, key))
        return out

    def _scalar(self, node: yaml.ScalarNode, at: str) -> Any:
        text: str = node.value
        if any("\ud800" <= char <= "\udfff" for char in text):
            self._problem("a lone surrogate is no character", at, "write the character itself")
            return ""
        if node.style:  # quoted or block text is text whatever it looks like
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.match(text):
            return int(text) if len(text) < 20 else float(text)
        if _FLOAT.match(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                self._problem(f"the number {text} is too large", at, "write a smaller one")
                return 0.0
            return number
        return text

    def _problem(self, message: str, at: str, hint: str) -> None:
        self.document.problems.append(Problem(message, at, hint))
