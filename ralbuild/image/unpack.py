"""An image's layers as a file tree, for running it without a container engine.

Each layer is read once and kept as a list of entries and a folder of numbered files; a tree is then made of
hard links. So images that share layers share the disk, and a changed rule makes a new tree in a moment.
Whatever a layer's paths and links say, nothing outside the tree is touched: contents go to numbered
files, and a path is followed link by link with the tree as its root (image-spec layer.md for the rest).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ralbuild.contract.codec import FormatError, canonical_json, parse_json
from ralbuild.digests import make_cache_folder, open_regular
from ralbuild.errors import ImageError
from ralbuild.image.disk import remove_tree
from ralbuild.image.oci import LAYER_TYPE, Descriptor
from ralbuild.image.reader import StoredImage
from ralbuild.image.treepython import inside

_CHUNK = 1 << 20
_OPAQUE = ".wh..wh..opq"
_WHITEOUT = ".wh."
_STREAMS = {LAYER_TYPE: "r:", f"{LAYER_TYPE}+gzip": "r|gz"}
_ENTRIES = "entries.json"
_NAME_BYTES, _PATH_BYTES = 255, 4095
_DEPTH = 200
"""Folders a path may be deep; more than that is only there to exhaust a recursion."""


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One entry of a layer.

    Attributes:
        kind: ``file``, ``dir``, ``symlink``, ``link`` (to another path of the layers) or ``whiteout``.
        path: as written, without ``./`` and slashes at its ends.
        mode: permission bits without set-id bits.
        target: of a link; for a whiteout the name that goes, empty for all that lower layers have there.
        number: of the file that holds the content, else -1.
    """

    kind: str
    path: str
    mode: int
    target: str
    number: int


@dataclass(frozen=True, slots=True)
class LayerStore:
    """Layers as read: ``folder/<hex digest>/entries.json`` and the numbered files beside it."""

    folder: Path

    def has(self, layer: Descriptor) -> bool:
        """Tell whether a layer is here."""
        return (self.place(layer) / _ENTRIES).is_file()

    def add(self, image: StoredImage, layer: Descriptor) -> bool:
        """Read a layer unless it is here; return False when it is.

        Raises:
            ImageError: when its bytes are not those that its digest names, or it is compressed with zstd.
        """
        place = self.place(layer)
        if self.has(layer):
            return False
        with self.read_again(image, layer) as temporary:
            remove_tree(place)
            temporary.rename(place)
        return True

    @contextlib.contextmanager
    def read_again(self, image: StoredImage, layer: Descriptor) -> Iterator[Path]:
        """Read a layer into a folder that goes at the end of the body unless it was renamed."""
        temporary = self.folder / f".{self.place(layer).name}"
        remove_tree(temporary)
        make_cache_folder(temporary)
        try:
            entries = _read_layer(image, layer, temporary)
            rows = [[item.kind, item.path, item.mode, item.target, item.number] for item in entries]
            (temporary / _ENTRIES).write_bytes(canonical_json(rows))
            yield temporary
        finally:
            remove_tree(temporary)

    def remove(self, layer: Descriptor) -> None:
        """Forget a layer."""
        remove_tree(self.place(layer))

    def entries(self, layer: Descriptor) -> tuple[LayerEntry, ...]:
        """Return the entries of a layer that is here, in their order."""
        path = self.place(layer) / _ENTRIES
        try:
            with open_regular(path, follow=False) as file:
                value = parse_json(file.read(), path.name)
            return tuple(LayerEntry(*item) for item in value)
        except (OSError, FormatError, TypeError) as error:
            raise ImageError(f"cannot be read: {error}", place=str(path), hint="remove its folder") from None

    def place(self, layer: Descriptor) -> Path:
        """Return the folder of a layer."""
        return self.folder / layer.digest.removeprefix("sha256:")


def make_tree(store: LayerStore, layers: tuple[Descriptor, ...], tree: Path) -> None:
    """Apply the layers, from the lowest, to the empty folder ``tree``; all must be in ``store``.

    Raises:
        ImageError: when an entry links to a file that is not there.
    """
    for layer in layers:
        entries = store.entries(layer)
        applied = _Tree(tree, store.place(layer))
        # A whiteout hides what lower layers hold, never what its own layer brings.
        for entry in entries:
            if entry.kind == "whiteout":
                applied.hide(entry)
        for entry in entries:
            if entry.kind != "whiteout":
                applied.add(entry)


class _Tree:
    """A tree to which one layer's entries are applied."""

    def __init__(self, root: Path, files: Path) -> None:
        self.root = root
        self.files = files
        self._parents: dict[str, Path] = {}

    def hide(self, entry: LayerEntry) -> None:
        if entry.target in (".", "..") or "/" in entry.target:
            raise ImageError("a whiteout names no file of its folder", place=f"{entry.path}/{entry.target}")
        parent = inside(self.root, entry.path)
        if entry.target:
            remove_tree(parent / entry.target)
        elif parent.is_dir():
            for path in parent.iterdir():
                remove_tree(path)

    def add(self, entry: LayerEntry) -> None:
        folder, _, name = entry.path.rpartition("/")
        place = self._folder(folder) / name
        if entry.kind == "dir":
            if place.is_symlink() or not place.is_dir():
                self._replace(place)
                make_folder(place)
            place.chmod(entry.mode | 0o700)
            return
        self._replace(place)
        if entry.kind == "symlink":
            place.symlink_to(entry.target)
        elif entry.kind == "link":
            self._link(inside(self.root, entry.target), place, entry)
        else:
            self._link(self.files / str(entry.number), place, entry)

    def _link(self, source: Path, place: Path, entry: LayerEntry) -> None:
        try:
            os.link(source, place, follow_symlinks=False)
        except FileNotFoundError:
            raise ImageError("is a link to a file that is not there", place=entry.path) from None

    def _folder(self, path: str) -> Path:
        """Return the folder ``path`` with links followed inside the root; made where it is missing."""
        found = self._parents.get(path)
        if found is None:
            found = inside(self.root, path)
            if len(found.parts) - len(self.root.parts) > _DEPTH:
                raise ImageError(f"lies more than {_DEPTH} folders deep", place=path[:_NAME_BYTES])
            _make_folders(found, self.root)
            self._parents[path] = found
        return found

    def _replace(self, place: Path) -> None:
        if place.is_symlink() or place.exists():
            remove_tree(place)
            self._parents.clear()  # a path that led through it may lead elsewhere now


def _make_folders(folder: Path, root: Path) -> None:
    if folder == root or (folder.is_dir() and not folder.is_symlink()):
        return
    _make_folders(folder.parent, root)
    remove_tree(folder)
    make_folder(folder)


def make_folder(path: Path) -> None:
    """Make a folder that every user can enter, whatever the umask: the program may run as another one."""
    path.mkdir()
    path.chmod(0o755)


def _read_layer(image: StoredImage, layer: Descriptor, folder: Path) -> list[LayerEntry]:
    stream = _STREAMS.get(layer.media_type)
    if stream is None:
        raise ImageError(f"a layer is of the type {layer.media_type}, which this version cannot unpack")
    try:
        with (
            _checked(image, layer),
            image.open_layer(layer) as blob,
            tarfile.open(fileobj=blob, mode=stream, bufsize=_CHUNK) as tar,  # type: ignore[call-overload]
        ):
            return list(_entries(tar, blob if stream == "r:" else None, folder))
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise ImageError(f"layer {layer.digest} is damaged: {error}", place=image.store) from None


@contextlib.contextmanager
def _checked(image: StoredImage, layer: Descriptor) -> Iterator[None]:
    """Hash the layer's blob beside the work in the body (hashlib releases the GIL); compare at its end."""

    def digest() -> str:
        with image.open_layer(layer) as blob:
            return hashlib.file_digest(blob, "sha256").hexdigest()  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(digest)
        try:
            yield
        finally:
            name = f"sha256:{found.result()}"
            if layer.digest != name:
                raise ImageError(f"is damaged: needs {layer.digest}, found {name}", place=image.store)


def _entries(tar: tarfile.TarFile, blob: IO[bytes] | None, folder: Path) -> Iterator[LayerEntry]:
    """Yield the entries and write the contents; ``blob`` is the tar itself when it is not compressed."""
    for number, member in enumerate(tar):
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if problem := _path_problem(member, parts):
            raise ImageError(f"a layer holds {problem}", place=ascii(member.name[:_NAME_BYTES]))
        if not parts:
            continue  # the root itself
        path, parent, name = "/".join(parts), "/".join(parts[:-1]), parts[-1]
        mode = member.mode & 0o1777
        if name.startswith(_WHITEOUT):
            hidden = "" if name == _OPAQUE else name.removeprefix(_WHITEOUT)
            yield LayerEntry("whiteout", parent, 0, hidden, -1)
        elif member.isdir():
            yield LayerEntry("dir", path, mode, "", -1)
        elif member.issym():
            yield LayerEntry("symlink", path, 0, member.linkname, -1)
        elif member.islnk():
            yield LayerEntry("link", path, 0, member.linkname, -1)
        elif member.isreg():
            # Read-only, for the file is shared by every tree that has this layer.
            _write(tar, member, blob, folder / str(number), 0o555 if mode & 0o100 else 0o444)
            yield LayerEntry("file", path, mode, "", number)
        # Devices and pipes are left out: the runner brings /dev, and an ordinary user cannot make them.


def _path_problem(member: tarfile.TarInfo, parts: list[str]) -> str:
    """Return why a member cannot be unpacked, or the empty string."""
    if any(not _is_text(text) for text in (member.name, member.linkname)):
        return "a name that is not UTF-8 or has a zero byte"
    if ".." in parts:
        return "a path with '..'"
    if len(parts) > _DEPTH:
        return f"a path more than {_DEPTH} folders deep"
    texts = (member.name, member.linkname)
    if any(len(part.encode()) > _NAME_BYTES for part in parts) or any(
        len(text.encode()) > _PATH_BYTES for text in texts
    ):
        return "a name that is longer than a file system takes"
    if (member.issym() or member.islnk()) and not member.linkname:
        return "a link to nothing"
    if parts and parts[-1] in (_WHITEOUT, f"{_WHITEOUT}.", f"{_WHITEOUT}.."):
        return "a whiteout that names no file of its folder"
    return ""


def _is_text(name: str) -> bool:
    try:
        name.encode()  # tarfile keeps bytes that are not UTF-8 as lone surrogates
    except UnicodeEncodeError:
        return False
    return "\0" not in name


def _write(
    tar: tarfile.TarFile, member: tarfile.TarInfo, blob: IO[bytes] | None, path: Path, mode: int
) -> None:
    with path.open("wb") as out:
        done = 0
        if blob is not None and member.size >= _CHUNK and not member.issparse():
            done = _copy_range(blob.fileno(), member.offset_data, member.size, out.fileno())
        if done < member.size:
            source = tar.extractfile(member)
            assert source is not None
            out.seek(0)
            shutil.copyfileobj(source, out, _CHUNK)
    path.chmod(mode)


def _copy_range(source: int, offset: int, size: int, out: int) -> int:
    """Let the kernel copy or share the bytes; return how many it did, fewer where it cannot."""
    done = 0
    with contextlib.suppress(OSError):
        while done < size:
            count = os.copy_file_range(source, out, min(size - done, 1 << 30), offset + done)
            if count == 0:
                break
            done += count
    return done
