"""The sink `oci:DIR`: an OCI image layout folder that is never seen half-written.

A new layout is built beside its place and renamed. A layout that is there already is updated in place:
blobs first, then index.json in one step, then what nothing names any more is removed. A build that is
killed at any moment leaves the old image as it was, and the next one cleans up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.digests import DigestCache, open_regular
from ralbuild.errors import ImageError
from ralbuild.image.artifacts import Artifact, companion_name, companion_suffix, subject_of
from ralbuild.image.assemble import Image, Layer
from ralbuild.image.blobs import BLOBS, PARTIAL, BlobFolder
from ralbuild.image.disk import Note, check_room, clear_place, host_errors, locked, remove_tree
from ralbuild.image.layers import Progress
from ralbuild.image.oci import INDEX_TYPE, LAYOUT_FILE, MANIFEST_TYPE, entry_name, index_entry, index_json
from ralbuild.image.sink import SinkResult

_SLACK = 1 << 20
"""Room for the JSON files, in bytes."""
_METADATA_LIMIT = 8 << 20


def write_layout(
    target: Path, image: Image, tag: str, cache: DigestCache, progress: Progress | None, note: Note
) -> SinkResult:
    """Make ``target`` a layout that holds ``image``; see `open_layout`."""
    with open_layout(target, image, tag, cache, progress, note) as sink:
        for layer in image.unique_layers:
            sink.add(layer)
        return sink.finish()


class LayoutSink:
    """A layout that is being written: a new folder beside its place, or the one that is there.

    Made by `open_layout`, which holds its lock.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        image: Image,
        tag: str,
        cache: DigestCache,
        progress: Progress | None,
    ) -> None:
        self.finished = False
        self._folder = folder
        self._target = target
        self._image = image
        self._tag = tag
        self._progress = progress
        self._needed = _needed(image)
        self._index = _read_index(folder) if folder == target else {}
        if not (folder / "oci-layout").exists():
            _replace(folder / "oci-layout", LAYOUT_FILE)
        self._blobs = BlobFolder(folder, cache)
        layers = image.unique_layers
        self._reused = frozenset(
            layer.digest.sha256
            for layer in layers
            if self._blobs.has_same(layer.recipe, layer.digest) or self._blobs.has(layer.digest, progress)
        )
        missing = [layer for layer in layers if layer.digest.sha256 not in self._reused]
        missing = [layer for layer in missing if not self._blobs.link(layer.recipe, layer.digest)]
        self._missing = frozenset(layer.digest.sha256 for layer in missing)
        copied = [layer for layer in missing if layer.recipe.ready is None]
        files = [file for layer in copied for file in layer.recipe.copied_files]
        check_room(self._blobs.path, _SLACK + sum(layer.digest.size for layer in copied), files)

    def add(self, layer: Layer) -> None:
        """Write the layer's blob unless it was there."""
        if layer.digest.sha256 in self._missing:
            with host_errors(self._target.parent, self._needed):
                self._blobs.add(layer.recipe, layer.digest, self._progress)

    def finish(self) -> SinkResult:
        """Name the image in the index, and remove what nothing names any more."""
        with host_errors(self._target.parent, self._needed):
            image = self._image
            for data in (image.config, image.manifest):
                self._blobs.add_bytes(data)
            for artifact in image.artifacts:
                for data in (*artifact.blobs, artifact.manifest):
                    self._blobs.add_bytes(data)
            entries = _kept_entries(self._folder, self._index, image, self._tag)
            entries.append(index_entry(image.manifest, image.architecture, self._tag))
            entries = _with_artifacts(entries, image.artifacts, self._tag)
            _replace(self._folder / "index.json", index_json(entries, self._index))
            _prune(self._folder, self._blobs)
            if self._folder != self._target:
                self._folder.rename(self._target)
            self.finished = True
            self._blobs.remember(self._target)
        return SinkResult(self._blobs.written, self._reused)


@contextlib.contextmanager
def open_layout(
    target: Path, image: Image, tag: str, cache: DigestCache, progress: Progress | None, note: Note
) -> Iterator[LayoutSink]:
    """Open ``target`` as a layout that will hold ``image`` under the name ``tag`` (may be empty).

    Images of other names in it stay. See `ralbuild.image.write.write_image` for the arguments.

    Raises:
        ImageError: when ``target`` is something else than a layout, or a source changed.
        HostError: when it cannot be written or the disk is too small.
    """
    target = Path(os.path.realpath(target))
    with contextlib.ExitStack() as stack:
        with host_errors(target.parent, _needed(image)):
            folder, _ = stack.enter_context(locked(lambda: _open(target), note))
            tidy = stack.enter_context(_tidy_on_failure(folder, target, cache))
            sink = LayoutSink(folder, target, image, tag, cache, progress)
        tidy.append(sink)
        yield sink


def _needed(image: Image) -> int:
    return _SLACK + sum(layer.digest.size for layer in image.unique_layers)


def _open(target: Path) -> tuple[Path, int]:
    """Return the folder to work in, ``target`` or a new one beside it, and a descriptor to lock it by."""
    folder = target if target.exists() else target.with_name(f".{target.name}{PARTIAL}build")
    if folder == target:
        _check_is_layout(target)
    else:
        clear_place(folder, lambda info: stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid())
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _open(target)  # another build has just renamed it into place


def _check_is_layout(target: Path) -> None:
    hint = "name a new folder, or remove this one first"
    if not target.is_dir():
        raise ImageError("is not a folder", place=str(target), hint=hint)
    if all(path.name.startswith(PARTIAL) for path in target.iterdir()):
        return  # empty, or a build into an empty folder was killed at once
    try:
        with open_regular(target / "oci-layout") as file:
            version = parse_json(file.read(_METADATA_LIMIT), "oci-layout").get("imageLayoutVersion")
    except (OSError, FormatError, AttributeError):
        version = None
    if version != "1.0.0":
        raise ImageError("is a folder but not an OCI image layout", place=str(target), hint=hint)


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        with open_regular(folder / "index.json") as file:
            value = parse_json(file.read(_METADATA_LIMIT), "index.json")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ImageError(f"index.json cannot be read: {error.strerror}", place=str(folder)) from None
    except FormatError as error:
        raise ImageError(str(error), place=str(folder), hint="remove the folder to start anew") from None
    entries = value.get("manifests", []) if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or not isinstance(entries, list)
        or not all(isinstance(item, dict) for item in entries)
    ):
        raise ImageError("index.json is not an image index", place=str(folder))
    return value


def _kept_entries(folder: Path, index: Mapping[str, Any], image: Image, tag: str) -> list[Any]:
    """Return the entries that stay: no image that is replaced, and nothing that is about one."""
    old = index.get("manifests", [])
    kept = [entry for entry in old if not _is_replaced(entry, image, tag)]
    named = {entry.get("digest") for entry in kept} | {image.digest}
    gone = {entry.get("digest") for entry in old} - named
    return [entry for entry in kept if not gone or _subject(folder, entry) not in gone]


def _with_artifacts(entries: list[Any], artifacts: tuple[Artifact, ...], image: str) -> list[Any]:
    new = [artifact.entry(image) for artifact in artifacts]
    digests = {entry["digest"] for entry in new}
    tags = {name for artifact in artifacts if (name := artifact.name(image))}
    kept = [item for item in entries if item.get("digest") not in digests and entry_name(item) not in tags]
    return kept + new


def _subject(folder: Path, entry: Mapping[str, Any]) -> str:
    try:
        with open_regular(folder / BLOBS / str(entry.get("digest", "")).removeprefix("sha256:")) as file:
            manifest = parse_json(file.read(_METADATA_LIMIT), "manifest")
    except (OSError, FormatError):
        return ""
    return subject_of(entry, manifest) if isinstance(manifest, dict) else ""


def _is_replaced(entry: Mapping[str, Any], image: Image, tag: str) -> bool:
    """Tell whether the new image takes this entry's place: it has its name, or is it without a name.

    So do companions of the old image of that name: the new one brings its own.
    """
    name, suffix = entry_name(entry), companion_suffix(entry)
    if suffix and name == companion_name(tag, suffix):
        return True
    return name == tag or (not name and entry.get("digest") == image.digest)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{PARTIAL}{path.name}")
    remove_tree(temporary)
    with temporary.open("xb") as file:
        file.write(data)
    temporary.replace(path)


def _prune(folder: Path, blobs: BlobFolder) -> None:
    """Remove what nothing names, unless the index names something whose parts we cannot tell."""
    keep: set[str] = set()
    if all(_collect(folder, entry, keep) for entry in _read_index(folder).get("manifests", [])):
        blobs.prune(frozenset(keep))


def _collect(folder: Path, entry: Mapping[str, Any], keep: set[str]) -> bool:
    """Add the blobs that ``entry`` leads to; return False when they cannot be told."""
    digest = str(entry.get("digest", "")).removeprefix("sha256:")
    keep.add(digest)
    if entry.get("mediaType") not in (MANIFEST_TYPE, INDEX_TYPE):
        return False
    try:
        with open_regular(folder / BLOBS / digest) as file:
            value = parse_json(file.read(_METADATA_LIMIT), digest)
        if entry["mediaType"] == INDEX_TYPE:
            return all(_collect(folder, item, keep) for item in value["manifests"])
        parts = [value["config"], *value["layers"]]
        keep.update(str(part["digest"]).removeprefix("sha256:") for part in parts)
    except (OSError, FormatError, KeyError, TypeError, AttributeError):
        return False
    return True


@contextlib.contextmanager
def _tidy_on_failure(folder: Path, target: Path, cache: DigestCache) -> Iterator[list[LayoutSink]]:
    """Leave nothing of a build that fails: no new folder, no blob that the old index does not name.

    Yields:
        Where to put the sink: once that is finished, what fails after it is another output's business.
    """
    fresh = not (folder / "index.json").exists()
    sinks: list[LayoutSink] = []
    try:
        yield sinks
    except BaseException:
        if any(sink.finished for sink in sinks):
            raise
        if folder != target:
            shutil.rmtree(folder, ignore_errors=True)
        elif fresh:
            shutil.rmtree(folder / BLOBS.parent, ignore_errors=True)
            (folder / "oci-layout").unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError, ImageError):
                _prune(folder, BlobFolder(folder, cache))
        raise
