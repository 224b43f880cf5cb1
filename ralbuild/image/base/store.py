"""Finished bases in the user's cache: one folder a base, found again without network or apt.

    <cache>/base/<key>/             an OCI layout
    <cache>/base/<target>-<recipe>  names the key of the newest base of this lock and recipe

A folder gets its final name only when it is complete, so a killed build leaves nothing that could be
taken for a base. The name says what is in it: the same packages give the same key.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from ralbuild.contract.codec import canonical_json, sha256_hex, to_plain
from ralbuild.contract.tarball import PACKING
from ralbuild.digests import open_regular
from ralbuild.files import write_atomically
from ralbuild.image.base.apt import DebianPackage
from ralbuild.image.base.lockfile import Lock
from ralbuild.image.base.recipe import RECIPE

_KEY = re.compile(r"[0-9a-f]{64}")
_WORK = ".work-"
_POINTER_LIMIT = 100


class BaseStore:
    """The folder of finished bases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock_file = folder / ".lock"

    def newest(self, target: str, lock: Lock) -> Path | None:
        """Return the newest base made with this recipe and lock, or None."""
        try:
            with open_regular(self._pointer(target, lock), follow=False) as file:
                key = file.read(_POINTER_LIMIT).decode("ascii")
        except (OSError, ValueError):
            return None
        return self.get(key) if _KEY.fullmatch(key) else None

    def get(self, key: str) -> Path | None:
        """Return the base of that key, or None."""
        path = self.folder / key
        return path if (path / "index.json").is_file() else None

    def put(self, key: str, layout: Path) -> Path:
        """Move the complete layout in; only whoever holds `lock_file` may call this."""
        path = self.folder / key
        shutil.rmtree(path, ignore_errors=True)
        layout.rename(path)
        return path

    def point(self, target: str, lock: Lock, key: str) -> None:
        """Make the base of that key the newest."""
        write_atomically(self._pointer(target, lock), key.encode())

    def new_work_dir(self) -> Path:
        """Return an empty folder, and remove what killed builds left; needs `lock_file` to be held."""
        for old in self.folder.glob(f"{_WORK}*"):
            # A killed build's helpers may still write for a moment; what is left then goes next time.
            shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=_WORK, dir=self.folder))

    def _pointer(self, target: str, lock: Lock) -> Path:
        identity = canonical_json([RECIPE, PACKING, lock.sha256])
        return self.folder / f"{target}-{sha256_hex(identity)[:16]}"


def base_key(target: str, lock: Lock, debian: tuple[DebianPackage, ...]) -> str:
    """Return the key of the base made from these, 64 hex digits."""
    parts = [target, RECIPE, PACKING, lock.sha256, to_plain(debian)]
    return sha256_hex(canonical_json(parts))
