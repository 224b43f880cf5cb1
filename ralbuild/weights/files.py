"""Safe reading of a model folder: regular files only, size caps, strict JSON, no surprises.

Symbolic links are followed only inside the Hugging Face cache layout, where a snapshot's files point
into the ``blobs`` folder of the same repository.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.errors import Problem, WeightsError

SIZE_CAPS = {"tokenizer.json": 200 << 20, "model.safetensors.index.json": 100 << 20}
DEFAULT_CAP = 4 << 20

SHIPPED_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What goes into the image besides weights; everything else is left out and reported."""

CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code", "transformers_weights")
"""Keys with which a config would make a loader run or fetch code."""


def open_folder(path: Path) -> Path:
    """Return the folder that holds the model files; a ``models--org--name`` root gives its snapshot.

    Raises:
        WeightsError: when there is no such folder.
    """
    if path.name.startswith("models--") and (path / "refs" / "main").is_file():
        revision = (path / "refs" / "main").read_text("ascii", "replace").strip()
        if revision.isalnum() and (path / "snapshots" / revision).is_dir():
            return path / "snapshots" / revision
    if not path.exists():
        raise WeightsError("no such folder", place=str(path), hint="give the model's folder with --model")
    if not path.is_dir():
        raise WeightsError("needs a folder, found a file", place=str(path), hint="give the folder around it")
    return path


def regular_files(folder: Path) -> dict[str, Path]:
    """Return every usable file of the folder by name; the paths have no symbolic link left.

    Raises:
        WeightsError: for a link that leaves the Hugging Face cache layout, a pipe or a device.
    """
    found: dict[str, Path] = {}
    problems: list[Problem] = []
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  # names only, in byte order
    except OSError as error:
        raise WeightsError(f"cannot be listed: {error.strerror}", place=str(folder)) from None
    for name in names:
        path = folder / name
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            target = _blob_target(folder, path)
            if target is None:
                problems.append(
                    Problem(
                        f"a symbolic link to {str(path.readlink())!r}, outside the Hugging Face cache layout",
                        str(path),
                        "copy the file into the folder",
                    )
                )
                continue
            found[name] = target
        elif stat.S_ISREG(mode):
            found[name] = path
        elif not stat.S_ISDIR(mode):
            problems.append(Problem("neither a file nor a folder", str(path), "remove it"))
    if problems:
        raise WeightsError.of(problems)
    return found


def _blob_target(folder: Path, link: Path) -> Path | None:
    """Return the blob that a snapshot's link points at, or None when it points anywhere else."""
    root = folder.absolute().parent.parent
    if folder.absolute().parent.name != "snapshots" or not root.name.startswith("models--"):
        return None
    target = Path(os.path.realpath(link))
    if target.parent != Path(os.path.realpath(root / "blobs")) or not target.is_file():
        return None
    return target


def read_small(path: Path, name: str) -> bytes:
    """Read a whole file that must be small; ``name`` chooses the cap.

    Raises:
        WeightsError: when it is larger than its cap or unreadable.
    """
    cap = SIZE_CAPS.get(name, DEFAULT_CAP)
    try:
        size = path.stat().st_size
        if size > cap:
            raise WeightsError(f"has {size} bytes; at most {cap} are read", place=name)
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=name) from None


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON object strictly: no duplicate keys, no NaN, bounded depth."""
    data = read_small(path, name)
    try:
        value = parse_json(data, name)
    except FormatError as error:
        raise WeightsError(error.message, place=name) from None
    if not isinstance(value, dict):
        raise WeightsError("needs a JSON object", place=name)
    return value


def refuse_code(files: dict[str, Path], configs: dict[str, dict[str, Any]]) -> None:
    """Refuse a folder that carries code or asks a loader to run some.

    Raises:
        WeightsError: naming the file or key.
    """
    problems = [
        Problem("Python code in a model folder is never run or shipped", name, "remove the file")
        for name in files
        if name.endswith((".py", ".pyc", ".so"))
    ]
    for name, config in configs.items():
        problems += [
            Problem(f"the key {key!r} would make a loader run code", name, "remove the key")
            for key in CODE_KEYS
            if config.get(key)
        ]
    if problems:
        raise WeightsError.of(problems)
