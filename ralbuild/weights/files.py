"""Safe reading of a model folder: regular files only, size caps, strict JSON, no surprises.

Symbolic links are followed only inside the Hugging Face cache layout, where a snapshot's files point
into the ``blobs`` folder of the same repository.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.digests import open_regular
from ralbuild.errors import WeightsError
from ralbuild.weights.findings import Findings
from ralbuild.weights.sniff import SNIFFED, report_other_format

SIZE_CAPS = {
    "tokenizer.json": 64 << 20,
    "model.safetensors.index.json": 32 << 20,
    "tokenizer_config.json": 16 << 20,
    "model.sig": 16 << 20,
}
DEFAULT_CAP = 1 << 20
_COST, _COSTS = 180 << 20, {"tokenizer.json": 1 << 30}
"""Memory that parsing a file may take; a vocabulary of 260,000 words takes some 370 MB."""
MOST_ENTRIES = 10_000
_WIDE = re.compile(rb"[\xf0-\xf4]")
"""Begins a character beyond 16 bits, which makes Python keep all of a text in 32."""
_HEX = frozenset("0123456789abcdef")

SHIPPED_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What goes into the image besides weights; everything else is left out and reported."""


@dataclass(frozen=True, slots=True)
class Folder:
    """What lies in a model folder.

    Attributes:
        root: the folder, without links.
        files: usable file by name; a path has no symbolic link left.
        folders: names of the folders in it.
        below: file in those folders, at any depth, by its path from the root; never shipped.
    """

    root: Path
    files: dict[str, Path] = field(repr=False)
    folders: tuple[str, ...] = ()
    below: dict[str, Path] = field(default_factory=dict, repr=False)


def open_folder(path: Path, findings: Findings) -> Folder:
    """List the model folder; a ``models--org--name`` root gives its snapshot.

    Raises:
        WeightsError: when there is no such folder at all.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        what = (
            "no such folder" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        )
        raise WeightsError(what, place=str(path), hint="give the model's folder with --model") from None
    if not stat.S_ISDIR(mode):
        gguf = path.suffix == ".gguf"
        hint = "convert it: ralbuild import --gguf FILE --out DIR" if gguf else "give the folder around it"
        raise WeightsError("needs a folder, found a file", place=str(path), hint=hint)
    root = Path(os.path.realpath(path))
    if root.name.startswith("models--"):
        root = _snapshot(root, findings)
    return _list(root, findings)


def _snapshot(root: Path, findings: Findings) -> Path:
    """Return the snapshot that ``refs/main`` names, or the only one."""
    there = _names(root / "snapshots")
    try:
        with (root / "refs" / "main").open("rb") as file:
            revision = file.read(200).decode("ascii", "replace").strip()
    except OSError:
        revision = there[0] if len(there) == 1 else ""
    if revision in there:
        return root / "snapshots" / revision
    what = f"refs/main names {revision!r}, which is not there" if revision else "no refs/main"
    findings.add("W222", f"{what}; snapshots: {', '.join(there[:5]) or 'none'}", file="refs/main")
    return root


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names only, in byte order
    except OSError:
        return []


def _list(root: Path, findings: Findings) -> Folder:
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, MOST_ENTRIES + 1))
    except OSError as error:
        raise WeightsError(f"cannot be listed: {error.strerror}", place=str(root)) from None
    if len(names) > MOST_ENTRIES:
        findings.add("W226", f"more than {MOST_ENTRIES:,} entries", needed=f"at most {MOST_ENTRIES:,}")
        names = [name for name in names if name in SHIPPED_FILES]
    found: dict[str, Path] = {}
    folders: list[str] = []
    for name in names:
        path = root / name
        mode = _mode(path)
        if stat.S_ISLNK(mode):
            target = _blob_target(root, path)
            if target is None:
                what = f"a symbolic link to {_goal(path)!r}, outside the Hugging Face cache layout"
                findings.add("W201", what, file=name)
            else:
                found[name] = target
        elif stat.S_ISREG(mode):
            found[name] = path
        elif stat.S_ISDIR(mode):
            folders.append(name)
        elif mode:  # 0: it went away since the folder was listed
            findings.add("W202", "neither a file nor a folder", file=name)
    return Folder(root, found, tuple(folders), _list_below(root, folders, findings))


def _list_below(root: Path, folders: list[str], findings: Findings) -> dict[str, Path]:
    """List the files in the folders, however deep; links to folders are not followed, git's own is left out.

    A folder that may not be listed is passed over: the root of a volume has such a one (``lost+found``).
    """
    found: dict[str, Path] = {}
    waiting, left = [name for name in reversed(folders) if name != ".git"], MOST_ENTRIES
    while waiting:
        where = waiting.pop()
        try:
            with os.scandir(root / where) as entries:
                inside = sorted(
                    (entry.name, entry.is_dir(follow_symlinks=False))
                    for entry in itertools.islice(entries, left + 1)
                )
        except OSError:
            continue
        left -= len(inside)
        if left < 0:
            needed = f"at most {MOST_ENTRIES:,}"
            findings.add("W226", f"more than {MOST_ENTRIES:,} entries in its folders", needed=needed)
            break
        for name, is_folder in inside:
            path = f"{where}/{name}"
            if is_folder:
                waiting.append(path)
            elif not os.path.isdir(root / path):  # noqa: PTH112  # Path.is_dir raises where nothing may be seen
                found[path] = root / path
    return found


def _goal(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _blob_target(folder: Path, link: Path) -> Path | None:
    """Return the blob that a snapshot's link points at, or None when it points anywhere else."""
    root = folder.parent.parent
    if folder.parent.name != "snapshots" or not root.name.startswith("models--"):
        return None
    if _goal(link).startswith("/"):
        return None
    target = Path(os.path.realpath(link))
    if target.parent != root / "blobs" or not stat.S_ISREG(_mode(target)):
        return None
    return target


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def promised_sha256(path: Path) -> str:
    """Return the digest that a blob of the Hugging Face cache is named after, or an empty text."""
    name = path.name
    return name if path.parent.name == "blobs" and len(name) == 64 and set(name) <= _HEX else ""


def read_small(path: Path, name: str, findings: Findings) -> bytes | None:
    """Read a whole file that must be small; ``name`` chooses the cap. None when a finding says why not."""
    cap = SIZE_CAPS.get(name, DEFAULT_CAP)
    try:
        with open_regular(path, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size > cap:
                findings.add(
                    "W219", f"has {size} bytes; at most {cap} are read", file=name, found=size, needed=cap
                )
                return None
            start = file.read(SNIFFED)
            # What is no text at all is refused before the rest is read: a hole of 60 MB is all zeros.
            return start if b"\0" in start else start + file.read(cap - len(start))
    except OSError as error:
        findings.add("W220", f"cannot be read: {error.strerror}", file=name)
        return None


def read_json(data: bytes, name: str, findings: Findings) -> dict[str, Any] | None:
    """Parse a JSON object strictly: no duplicate keys, no NaN, bounded depth."""
    if report_other_format(data[:SNIFFED], name, findings):
        return None
    cost = _cost(data)
    most = _COSTS.get(name, _COST)
    if cost > most:
        what = f"parsing it could take {cost >> 20} MB of memory; at most {most >> 20} are used"
        findings.add("W219", what, file=name)
        return None
    try:
        value = parse_json(data, name)
    except FormatError as error:
        findings.add("W221", error.message, file=name)
        return None
    if not isinstance(value, dict):
        findings.add("W221", "needs a JSON object", file=name, found=type(value).__name__)
        return None
    return value


def _cost(data: bytes) -> int:
    """Return the bytes of memory that parsing may take: the text, and what its values become."""
    width = 1 if data.isascii() else 4 if _WIDE.search(data) else 2
    lists, values = data.count(b"[") + data.count(b"{"), data.count(b",")
    return len(data) * (1 + width) + 100 * lists + 150 * values
