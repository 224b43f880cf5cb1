"""Templates to files. The templates hold layout only; every value passes one quoting filter.

Only this module imports jinja2. An undefined name is an error, and so is a value that reaches the
output without a filter: a newline in a model name must not become a line of a Dockerfile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ralbuild.errors import ImageError

_WORD = re.compile(r"[A-Za-z0-9._/:@+=-]{1,512}\Z")


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """A file for people or for another builder: relative path, bytes, and whether it is executable."""

    path: str
    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class DockerfileFacts:
    """What the Dockerfile says: base by digest, labels and environment in order, model file names.

    ``packages`` says that the image adds Python packages to its base's.
    """

    version: str
    base: str
    labels: tuple[tuple[str, str], ...]
    env: tuple[tuple[str, str], ...]
    shards: tuple[str, ...]
    model_files: tuple[str, ...]
    model_dir: str
    ral_dir: str
    entrypoint: str
    user: str
    port: int
    packages: bool = False


class _Safe(str):
    """Text that went through a filter."""

    __slots__ = ()


def _reject_control(text: str) -> None:
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ImageError(f"{text[:60]!r} holds control characters", place="render")


def _word(value: object) -> _Safe:
    """Allow a bare word: no blanks, quotes or shell characters."""
    text = str(value)
    if not _WORD.match(text):
        raise ImageError(f"{text[:60]!r} cannot stand in a Dockerfile unquoted", place="render")
    return _Safe(text)


def _words(values: Iterable[object]) -> _Safe:
    """Allow bare words with blanks between them."""
    return _Safe(" ".join(_word(value) for value in values))


def _json(value: Any) -> _Safe:
    """Quote text or a list of text as JSON; ``$`` and backslash are kept from the builder's expansion."""
    for text in [value] if isinstance(value, str) else value:
        _reject_control(text)
    quoted = json.dumps(value, ensure_ascii=False)
    return _Safe(quoted.replace("$", "\\$") if isinstance(value, str) else quoted)


def _yaml(value: Any) -> _Safe:
    """Quote text as a YAML string: JSON's strings are some of YAML's."""
    text = str(value)
    _reject_control(text)
    return _Safe(json.dumps(text, ensure_ascii=False))


def _finalize(value: object) -> object:
    if not isinstance(value, _Safe):
        raise ImageError(f"a template writes {str(value)[:60]!r} without a filter", place="render")
    return value


def template_dir() -> Path:
    """Return the folder of templates: in the installed package, or beside it in a checkout."""
    package = Path(str(resources.files("ralbuild")))
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def render_dockerfile(facts: DockerfileFacts) -> RenderedFile:
    """Render the Dockerfile that gives the same file tree as the daemonless writer.

    Raises:
        ImageError: when a value cannot be written safely.
    """
    values = {name: getattr(facts, name) for name in DockerfileFacts.__slots__}
    values["model_files"] = [f"models/{name}" for name in facts.model_files]
    return RenderedFile("Dockerfile", render_text("Dockerfile.j2", values))


def render_text(template: str, values: Mapping[str, Any]) -> bytes:
    """Render one template of `template_dir`.

    Raises:
        ImageError: when a value cannot be written safely.
    """
    from jinja2 import Environment, StrictUndefined  # an image needs no template, and should not wait

    environment = Environment(  # noqa: S701  # not HTML: every value passes a filter, see _finalize
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(word=_word, words=_words, json=_json, yaml=_yaml)
    source = (template_dir() / template).read_text("utf-8")
    return environment.from_string(source).render(values).encode()


def render_page(values: Mapping[str, Any]) -> bytes:
    """Render a self-contained HTML report; every value is escaped.

    Args:
        values: what ``templates/report.html.j2`` shows: title, subtitle, facts and sections.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    source = (template_dir() / "report.html.j2").read_text("utf-8")
    return environment.from_string(source).render(values).encode()


def entrypoint() -> RenderedFile:
    """Return the entrypoint script, byte for byte the same for every image."""
    return RenderedFile("entrypoint.sh", (template_dir() / "entrypoint.sh").read_bytes(), executable=True)
