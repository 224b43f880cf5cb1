"""`ralbuild import`: a GGUF file to a verified Hugging Face folder, through the existing libraries."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ralbuild.digests import DigestCache
from ralbuild.errors import HostError, UsageError, WeightsError
from ralbuild.weights.child import run_worker
from ralbuild.weights.findings import FoundError
from ralbuild.weights.reading import Progress
from ralbuild.weights.scan import Verdict, verify_folder
from ralbuild.weights.sniff import SNIFFED, sniff

SCRATCH = ".ralbuild-import-"
"""Begins the name of the hidden folder in which a model is made, beside the one that it becomes."""


def import_gguf(gguf: Path, out: Path, progress: Progress) -> Verdict:
    """Convert ``gguf`` to bfloat16 safetensors in the new folder ``out``, and verify it.

    The folder appears when it is complete and has no error. What a run that was killed left in the
    folder around it is removed.

    Raises:
        UsageError: when ``out`` exists.
        WeightsError: when the file is not GGUF, cannot be converted, or the result has errors.
        HostError: when the extra ``convert`` is missing, or the folder cannot be written.
    """
    if os.path.lexists(out):
        raise UsageError("is already there", place=str(out), hint="name a new folder")
    _check_magic(gguf)
    try:
        with _scratch(out.absolute().parent) as scratch:
            made, home = scratch / "made" / out.name, scratch / "home"
            made.mkdir(parents=True)  # a name that is too long is known now
            home.mkdir()
            order = {"order": "convert", "gguf": str(gguf.resolve()), "out": str(made)}
            run_worker(order, "convert", home)
            for path in made.iterdir():  # safetensors writes 0600, which no other user can read
                path.chmod(0o644)
            verdict = verify_folder(made, DigestCache(None), 0, progress)
            if verdict.failed:
                raise FoundError(verdict.findings)
            made.rename(out)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        what = "no space left on device" if full else f"cannot be written: {error.strerror}"
        raise HostError(what, place=str(out)) from None
    return verdict


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Give a new folder in ``parent``, locked while it is in use, and remove those that nobody uses."""
    for left in sorted(parent.glob(f"{SCRATCH}*")):
        _remove_unused(left)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
    lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # before it holds anything: see _remove_unused
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _remove_unused(scratch: Path) -> None:
    """Remove a folder of a run that was killed; one in use is locked, and a new one is still empty."""
    try:
        lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it is another user's, or its run has just ended
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(scratch.iterdir()):
            shutil.rmtree(scratch, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _check_magic(gguf: Path) -> None:
    """Refuse what is not a GGUF file, saying what it is."""
    try:
        fd = os.open(gguf, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            start = file.read(SNIFFED)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=str(gguf)) from None
    known = sniff(start)
    if known is None or known[0] != "W105":
        what = known[1] if known else f"a file that begins with {start[:4]!r}"
        raise WeightsError(f"needs a GGUF file, found {what}", place=str(gguf))
