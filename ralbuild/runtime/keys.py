"""Who may ask: API keys and the admin token, read from files and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from ralbuild.runtime.errors import HostUnfitError
from ralbuild.runtime.log import log_event

_SCHEME = "bearer"


class KeyFile:
    """The keys of one file: a line each, ``#`` begins a comment. Read again when the file changes.

    A file that cannot be read any more, or has no key, leaves the last keys in force: to lock everybody
    out by mistake is as bad as to let everybody in.
    """

    def __init__(self, path: str, variable: str) -> None:
        """Read the file.

        Raises:
            HostUnfitError: when it cannot be read or has no key.
        """
        self._path = Path(path)
        self._variable = variable
        self._stamp = self._look()
        self._digests = self._read()

    def accepts(self, authorization: str | None) -> bool:
        """Tell whether an ``Authorization`` header brings one of the keys.

        Digests of equal length are compared, and always all of them: the time tells nothing.
        """
        self._refresh()
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found and scheme.lower() == _SCHEME

    def _refresh(self) -> None:
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._digests = self._read()
                log_event("keys read", variable=self._variable, count=len(self._digests))
        except HostUnfitError as error:
            log_event("keys kept", reason=error)

    def _look(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except (OSError, ValueError) as error:
            raise self._unfit(f"cannot be read: {error}") from None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise self._unfit(f"cannot be read: {error.strerror}") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
        if not keys:
            raise self._unfit("has no key")
        return tuple(hashlib.sha256(key).digest() for key in keys)

    def _unfit(self, message: str) -> HostUnfitError:
        return HostUnfitError(message, place=f"{self._variable}={os.fspath(self._path)}")
