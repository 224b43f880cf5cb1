"""`ralbuild diff`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.cli.options import stored_path

if TYPE_CHECKING:
    from ralbuild.image.diff import Change, ImageDiff, LayerChange

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_COLORS = {"+": "\x1b[32m", "-": "\x1b[31m", "~": "\x1b[33m"}
_DERIVED = frozenset(
    f"io.ralbuild.{name}"
    for name in (
        *("bundle", "config", "dtype", "max_batch_size", "max_seq_len", "model", "model.manifest"),
        *("packing", "rules", "target", "version"),
    )
)
"""Labels that say again what other parts of a comparison say."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "old", help="an OCI layout folder or an archive; oci: or archive: may stand before it"
    )
    parser.add_argument("new", help="another one, or the same with another --new-tag")
    parser.add_argument("--old-tag", default="", metavar="TAG", help="which image, when there are several")
    parser.add_argument("--new-tag", default="", metavar="TAG", help="which image, when there are several")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures")


def run(options: argparse.Namespace) -> int:
    """Print what changed, by rule, line, kernel, package and layer, and the bytes that it moves."""
    from ralbuild.image.diff import diff_images
    from ralbuild.image.reader import open_image

    with (
        open_image(stored_path(options.old), options.old_tag) as old,
        open_image(stored_path(options.new), options.new_tag) as new,
    ):
        diff = diff_images(old, new)
    if options.html is not None:
        from ralbuild.cli.pages import diff_page, write_page

        write_page(options.html, diff_page(diff))
    print(_json(diff) if options.json else "\n".join(_text(diff)))
    return 0


def _json(diff: ImageDiff) -> str:
    from ralbuild.contract.codec import to_plain

    layers = [
        {
            "state": item.state,
            "restacked": item.restacked,
            "name": item.layer.name,
            "kind": item.layer.kind,
            "digest": item.layer.digest,
            "size": item.layer.size,
        }
        for item in diff.layers
    ]
    answer = {
        "old": diff.old,
        "new": diff.new,
        "same": diff.old == diff.new,
        **to_plain(diff.changes),
        "layers": layers,
        "bytes": to_plain(diff.transfer),
    }
    return json.dumps(answer, indent=2)


def _text(diff: ImageDiff) -> Iterator[str]:
    from ralbuild.cli import text
    from ralbuild.report import format_bytes

    columns = text.width()
    yield from text.rows(
        [(n, text.digest(d, columns)) for n, d in (("old", diff.old), ("new", diff.new))], columns, 0
    )
    if diff.old == diff.new:
        yield "the same image"
        return
    for name, changes in diff.changes.items():
        shown = [item for item in changes if item.name not in _DERIVED]
        if shown:
            yield from ("", f"{name} ({len(shown)})")
            yield from (_change(item, columns) for item in shown)
    yield from ("", "layers")
    yield from (_layer(item, columns) for item in diff.layers)
    moved = diff.transfer
    yield from ("", text.cut("bytes that move, for somebody who has the old image", columns))
    ways = (
        ("push", moved.push),
        ("pull, blobs kept by digest", moved.pull),
        ("pull, Docker's own store", moved.pull_docker),
        ("unpack on a node", moved.unpack),
        ("whole new image", moved.total),
    )
    for label, size in ways:
        line = f"  {label:<27} {format_bytes(size):>8}"
        yield f"{line}  {text.bar(size, moved.total, columns)}".rstrip()


def _change(item: Change, columns: int) -> str:
    from ralbuild.cli import text

    sign = _SIGNS[item.kind]
    parts = [part for part in (item.place, item.name, item.detail) if part]
    return _colored(text.cut(f"  {sign} {'  '.join(parts)}", columns), sign)


def _layer(item: LayerChange, columns: int) -> str:
    from ralbuild.cli import text
    from ralbuild.report import format_bytes

    sign = {"same": "~" if item.restacked else " ", "new": "+", "gone": "-"}[item.state]
    note = "  (same bytes, unpacked again)" if item.restacked else ""
    size = format_bytes(item.layer.size)
    line = f"  {sign} {item.layer.digest[7:19]} {size:>8}  {item.layer.name}{note}"
    return _colored(text.cut(line, columns), sign)


def _colored(line: str, sign: str) -> str:
    if sign not in _COLORS or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return line
    return f"{_COLORS[sign]}{line}\x1b[0m"
