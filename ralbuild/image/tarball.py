"""The one normaliser: from a layer plan to the tar stream that it means, as a list of segments."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

from ralbuild.contract.tarball import (
    DIR_MODE,
    END,
    EXECUTABLE_MODE,
    FILE_MODE,
    STICKY_DIR_MODE,
    aligned_file_header,
    directory_header,
    file_header,
    padding,
    symlink_header,
)
from ralbuild.errors import ImageError
from ralbuild.image.plan import DirEntry, Entry, FileEntry, HostFile, LayerPlan, LinkEntry, RemoteBlob

Segment = bytes | HostFile | RemoteBlob
"""A stretch of a blob: bytes, bytes of a file, or a whole blob of a registry."""

_COMPONENT_BYTES = 255
_PATH_BYTES = 4095


def layer_segments(layer: LayerPlan, mtime: int) -> tuple[Segment, ...]:
    """Return the layer's tar stream; neighbouring byte segments are joined.

    Raises:
        ImageError: naming the entry that no layer may hold.
    """
    segments: list[Segment] = []
    pending = bytearray()
    offset = 0
    for entry in ordered_entries(layer):
        pending += _header(entry, layer, mtime, offset + len(pending))
        if isinstance(entry, FileEntry):
            for piece in entry.pieces:
                if isinstance(piece, bytes):
                    pending += piece
                    continue
                segments += [bytes(pending), piece]
                offset += len(pending) + piece.size
                pending.clear()
            pending += padding(entry.size)
    segments.append(bytes(pending + END))
    return tuple(segments)


def ordered_entries(layer: LayerPlan) -> list[Entry]:
    """Return the layer's entries and the owned folders above them, by the bytes of their paths.

    Raises:
        ImageError: for a path that is unsafe, named twice, or below something that is not a folder.
    """
    entries: dict[str, Entry] = {}
    for entry in layer.entries:
        _check_entry(entry, layer.name)
        if entry.path in entries:
            raise ImageError("two entries have the same path", place=f"{layer.name}: {entry.path}")
        entries[entry.path] = entry
    for path in list(entries):
        for parent in _parents(path):
            above = entries.get(parent)
            if above is None and _is_owned(parent, layer.owned):
                entries[parent] = DirEntry(parent)
            elif above is not None and not isinstance(above, DirEntry):
                raise ImageError(
                    f"lies below {parent!r}, which is not a folder", place=f"{layer.name}: {path}"
                )
    return [entries[path] for path in sorted(entries, key=lambda path: path.encode())]


def _header(entry: Entry, layer: LayerPlan, mtime: int, offset: int) -> bytes:
    if isinstance(entry, DirEntry):
        return directory_header(entry.path, mtime, entry.mode)
    if isinstance(entry, LinkEntry):
        return symlink_header(entry.path, entry.target, mtime)
    if layer.kind == "weights":
        return aligned_file_header(entry.path, entry.mode, entry.size, mtime, offset)
    return file_header(entry.path, entry.mode, entry.size, mtime)


def _parents(path: str) -> Iterable[str]:
    return (str(parent) for parent in PurePosixPath(path).parents if parent.name)


def _is_owned(path: str, owned: tuple[str, ...]) -> bool:
    return any(root in ("", path) or path.startswith(f"{root}/") for root in owned)


def _check_entry(entry: Entry, layer: str) -> None:
    problem = _path_problem(entry.path)
    if not problem and isinstance(entry, FileEntry) and entry.mode not in (FILE_MODE, EXECUTABLE_MODE):
        problem = f"a file has mode 0644 or 0755, not {entry.mode:04o}"
    if not problem and isinstance(entry, DirEntry) and entry.mode not in (DIR_MODE, STICKY_DIR_MODE):
        problem = f"a folder has mode 0755 or 1777, not {entry.mode:04o}"
    if not problem and isinstance(entry, LinkEntry):
        problem = _text_problem(entry.target) and "the link's target is empty or holds a control character"
    if problem:
        raise ImageError(problem, place=f"{layer}: {entry.path!r}")


def _path_problem(path: str) -> str:
    """Return why ``path`` cannot be in a layer, or the empty string."""
    if problem := _text_problem(path):
        return problem
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "needs a relative path without empty, '.' or '..' parts"
    if any(part.startswith(".wh.") for part in parts):
        return "a name that starts with '.wh.' would delete a file of a lower layer"
    if len(path.encode()) > _PATH_BYTES or any(len(part.encode()) > _COMPONENT_BYTES for part in parts):
        return "the path is longer than a file system takes"
    return ""


def _text_problem(text: str) -> str:
    if not text:
        return "the path is empty"
    if text.isprintable():
        return ""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs"):
            return f"holds the control character U+{ord(character):04X}"
    return ""
