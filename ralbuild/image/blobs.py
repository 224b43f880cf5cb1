"""The blobs of one layout folder: written under a temporary name, kept when they are already right."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from ralbuild.contract.codec import sha256_hex
from ralbuild.digests import DigestCache, StatKey, is_racy
from ralbuild.errors import ImageError
from ralbuild.image.disk import changed, remove_tree
from ralbuild.image.layers import Progress, Recipe, append_layer, digest_layer
from ralbuild.image.plan import HostFile, LayerDigest

BLOBS = Path("blobs", "sha256")
PARTIAL = ".partial-"

_PURPOSE = "blob"
_OURS = re.compile(rf"[0-9a-f]{{64}}|{re.escape(PARTIAL)}.+")


class BlobFolder:
    """``blobs/sha256`` of the layout at ``root``; only whoever holds the layout's lock may use it.

    A blob's state is remembered when we wrote or hashed it, so that the next build need not read it.
    The rule for fresh timestamps does not apply to what we wrote: nobody else has had the file.
    """

    def __init__(self, root: Path, cache: DigestCache) -> None:
        self.path = root / BLOBS
        self.written = 0
        self._cache = cache
        self._known: dict[str, StatKey] = {}
        self.path.mkdir(parents=True, exist_ok=True)

    def has(self, digest: LayerDigest, progress: Progress | None = None) -> bool:
        """Tell whether the blob is there with the right bytes; reads it only when its state is not known."""
        path = self.path / digest.sha256
        try:
            info = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        key = StatKey.of(info)
        if key.size != digest.size:
            return False
        if self._cache.get(path, _PURPOSE, key) == {"sha256": digest.sha256}:
            return True
        started = time.time_ns()
        try:
            found = digest_layer(Recipe(f"blob {digest.sha256}", (HostFile(path, key.size),)), progress)
        except ImageError:
            return False  # unreadable or not a file: written anew
        if found != digest:
            return False
        if not is_racy(key, started):
            self._known[digest.sha256] = key
        return True

    def has_same(self, recipe: Recipe, digest: LayerDigest) -> bool:
        """Tell whether the blob is there as the very file that the recipe would take it from."""
        path = self.path / digest.sha256
        try:
            return (
                recipe.blob is not None and path.stat().st_size == digest.size and path.samefile(recipe.blob)
            )
        except FileNotFoundError:
            return False

    def link(self, recipe: Recipe, digest: LayerDigest) -> bool:
        """Give another layout's blob a name here too, without reading it; False where that cannot be.

        Nothing ever changes a blob in place, so two layouts can share one. It counts as known only when
        it did so where it comes from.
        """
        source, temporary = recipe.blob, self.path / f"{PARTIAL}{digest.sha256}"
        if source is None:
            return False
        try:
            before = StatKey.of(source.stat(follow_symlinks=False))
            known = self._cache.get(source, _PURPOSE, before) == {"sha256": digest.sha256}
            remove_tree(temporary)
            temporary.hardlink_to(source)
            if before.size != digest.size:
                raise changed(HostFile(source, digest.size), f"found {before.size} bytes")
            temporary.replace(self.path / digest.sha256)
        except OSError:
            return False  # another file system, or no right to it
        finally:
            temporary.unlink(missing_ok=True)
        if known:  # a new name changed its ctime
            now = StatKey.of(source.stat(follow_symlinks=False))
            self._cache.put(source, _PURPOSE, now, {"sha256": digest.sha256})
            self._known[digest.sha256] = now
        return True

    def add(self, recipe: Recipe, digest: LayerDigest, progress: Progress | None = None) -> None:
        """Write a blob that is not there, or move it here, or raise what `append_layer` raises."""
        if self._take(recipe, digest):
            if progress:
                progress(digest.size)
        else:
            with self._new(digest.sha256) as fd:
                append_layer(recipe, fd, digest, progress)
        self.written += digest.size

    def _take(self, recipe: Recipe, digest: LayerDigest) -> bool:
        """Move the file that this run has written already; False when it is gone or not what it was."""
        ready, place = recipe.ready, self.path / digest.sha256
        try:
            if ready is None or StatKey.of(ready.path.stat(follow_symlinks=False)) != ready.state:
                return False
            if ready.state.size != digest.size:
                return False
            ready.path.rename(place)
            self._known[digest.sha256] = StatKey.of(place.stat(follow_symlinks=False))
        except OSError:
            return False  # another layout took it, or this one lies on another file system
        return True

    def add_bytes(self, data: bytes) -> None:
        """Write a small blob unless it is there."""
        recipe = Recipe("metadata", (data,))
        digest = LayerDigest(sha256_hex(data), len(data))
        if not self.has(digest):
            self.add(recipe, digest)

    def remember(self, root: Path) -> None:
        """Note the state of what was written and hashed; ``root`` is where the layout lies by now."""
        for name, key in self._known.items():
            self._cache.put(root / BLOBS / name, _PURPOSE, key, {"sha256": name})
        self._known.clear()

    def prune(self, keep: frozenset[str]) -> None:
        """Remove every blob but ``keep`` (hex digests), and what killed builds left."""
        for path in sorted(self.path.iterdir()):
            if path.name not in keep and _OURS.fullmatch(path.name):
                remove_tree(path)
                self._cache.forget(path, _PURPOSE)
                self._known.pop(path.name, None)

    @contextlib.contextmanager
    def _new(self, name: str) -> Iterator[int]:
        temporary = self.path / f"{PARTIAL}{name}"
        remove_tree(temporary)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield fd
            temporary.replace(self.path / name)
            self._known[name] = StatKey.of(os.fstat(fd))  # the rename changed its ctime
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)
