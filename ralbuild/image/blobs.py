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
from ralbuild.image.disk import remove_tree
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

    def add(self, recipe: Recipe, digest: LayerDigest, progress: Progress | None = None) -> None:
        """Write a blob that is not there, or raise what `append_layer` raises."""
        with self._new(digest.sha256) as fd:
            append_layer(recipe, fd, digest, progress)
        self.written += digest.size

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
