"""`inspect` and `diff` as one self-contained HTML page each: tables, and pictures of what weighs how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.errors import HostError
from ralbuild.files import write_atomically
from ralbuild.image.diff import ImageDiff, LayerChange
from ralbuild.render import render_page
from ralbuild.report import format_bytes

_KINDS = {"base": "base", "weights": "weights", "small": "files, launcher and rules"}
_STATES = {"same": "in both", "new": "only in the new image", "gone": "only in the old image"}
_VISIBLE = 0.4
"""Least width of a part in percent: a changed rule must be seen beside gigabytes of weights."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar: colour, left edge and width in percent, and what a pointer on it reads."""

    kind: str
    start: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with its label on the left and its value on the right."""

    label: str
    value: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with a note, a picture and a table, each of which may be empty."""

    title: str
    note: str = ""
    bars: tuple[Bar, ...] = ()
    key: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    empty: str = "None."


def write_page(path: Path, page: bytes) -> None:
    """Write a page so that a reader sees all of it or what was there before, or raise HostError."""
    try:
        write_atomically(path, page)
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(path)) from None


def inspect_page(answer: dict[str, Any]) -> bytes:
    """Return the page of one image; ``answer`` is what `ralbuild inspect --json` prints."""
    layers = answer["layers"]
    total = sum(layer["size"] for layer in layers)
    stack = _stack([(layer["kind"] or "base", layer["size"], layer["name"]) for layer in layers], total)
    bars = [Bar("whole image", format_bytes(total), stack)]
    for layer in layers:
        part = Part(layer["kind"] or "base", 0, _percent(layer["size"], total), layer["digest"])
        bars.append(Bar(layer["name"], format_bytes(layer["size"]), (part,)))
    facts = [("manifest", answer["manifest"]), ("config", answer["config"]), ("user", answer["user"])]
    facts += [("entrypoint", " ".join(answer["entrypoint"])), ("name", answer["name"] or "(none)")]
    bill = answer["sbom"]
    sections = [
        Section("Layers", "From the lowest to the highest.", tuple(bars), tuple(_KINDS.items())),
        _table("Trust boundary", ("decided by", "what", "detail"), _boundary_rows(answer), note=_BOUNDARY),
        _table(
            "Rules",
            ("kind", "text", "from", "place"),
            [(rule["kind"], rule["text"], rule["source"], rule["place"]) for rule in answer["rules"]],
        ),
        _table(
            "Routes",
            ("priority", "match", "action"),
            [(str(item["priority"]), item["match"], item["action"]) for item in answer["routes"]],
            note="The first match wins; what matches none gets the default.",
        ),
        _table(
            "Kernels",
            ("name", "origin", "architectures"),
            [
                (item["name"], "user" if item["user"] else "built-in", ", ".join(item["archs"]))
                for item in answer["kernels"]
            ],
        ),
        _table("Bill of materials", ("what", "how many"), [(k, str(v)) for k, v in bill.items()]),
        _table(
            "Beside the image", ("what", "digest"), [(i["what"], i["digest"]) for i in answer["artifacts"]]
        ),
        _table("Labels", ("label", "value"), sorted(answer["labels"].items())),
    ]
    return _page(
        f"Image {answer['labels'].get('io.ralbuild.model', '')}",
        "What it holds, and who decides what.",
        facts,
        sections,
    )


_BOUNDARY = (
    "What the image decides cannot be changed without another digest; the rest is up to whoever runs it."
)


def _boundary_rows(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(item["by"], item["what"], item["detail"]) for item in answer["boundary"]]


def diff_page(diff: ImageDiff) -> bytes:
    """Return the page of a comparison."""
    new = [item for item in diff.layers if item.state != "gone"]
    old = [item for item in diff.layers if item.state != "new"]
    sizes = [sum(item.layer.size for item in items) for items in (old, new)]
    stacks = [
        Bar(label, format_bytes(size), _stack([_state(item) for item in items], max(*sizes, 1)))
        for label, size, items in (("old image", sizes[0], old), ("new image", sizes[1], new))
    ]
    moved = diff.transfer
    ways = (
        ("push to a registry that has the old image", moved.push),
        ("pull, blobs kept by digest (containerd, CRI-O, podman)", moved.pull),
        ("pull, Docker's own image store", moved.pull_docker),
        ("unpack on a node", moved.unpack),
        ("whole new image", moved.total),
    )
    bars = tuple(
        Bar(label, format_bytes(size), (Part("new", 0, _percent(size, moved.total), f"{size} bytes"),))
        for label, size in ways
    )
    sections = [
        Section(
            "What moves",
            "Bytes, for somebody who has the old image.",
            bars,
            (("new", "bytes that move"),),
        ),
        Section(
            "Layers",
            "",
            tuple(stacks),
            tuple(_STATES.items()),
            ("state", "layer", "kind", "size", "digest"),
            tuple(_layer_row(item) for item in diff.layers),
        ),
    ]
    for name, changes in diff.changes.items():
        rows = [(item.kind, item.name, item.place, item.detail) for item in changes]
        title = f"{name.capitalize()} ({len(rows)})"
        sections.append(_table(title, ("change", "what", "where", "detail"), rows, empty="No change."))
    return _page(
        "What changed", "From the old image to the new one.", [("old", diff.old), ("new", diff.new)], sections
    )


def _state(item: LayerChange) -> tuple[str, int, str]:
    return item.state, item.layer.size, item.layer.name


def _layer_row(item: LayerChange) -> tuple[str, ...]:
    state = "in both, unpacked again" if item.restacked else _STATES[item.state]
    layer = item.layer
    return state, layer.name, layer.kind or "-", format_bytes(layer.size), layer.digest[7:19]


def _stack(parts: Iterable[tuple[str, int, str]], total: int) -> tuple[Part, ...]:
    """Lay pieces side by side; small ones get a visible width, taken from the large ones."""
    items = list(parts)
    widths = [_percent(size, total) for _, size, _ in items]
    used = max(sum(widths), 100.0)
    out, at = [], 0.0
    for (kind, size, name), width in zip(items, widths, strict=True):
        share = width * 100 / used
        out.append(Part(kind, round(at, 3), round(share, 3), f"{name}: {format_bytes(size)}"))
        at += share
    return tuple(out)


def _percent(size: int, total: int) -> float:
    return max(round(100 * size / total, 3), _VISIBLE) if size and total else 0.0


def _table(
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[Sequence[str]],
    *,
    note: str = "",
    empty: str = "None.",
) -> Section:
    return Section(title, note, columns=columns, rows=tuple(tuple(row) for row in rows), empty=empty)


def _page(title: str, subtitle: str, facts: list[tuple[str, str]], sections: Sequence[Section]) -> bytes:
    return render_page({"title": title, "subtitle": subtitle, "facts": facts, "sections": sections})
