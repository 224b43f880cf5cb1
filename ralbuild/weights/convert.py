"""`ralbuild import`: a GGUF file to a verified Hugging Face folder, through the existing libraries."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ralbuild.digests import DigestCache
from ralbuild.errors import HostError, UsageError, WeightsError
from ralbuild.weights.child import run_worker
from ralbuild.weights.findings import FoundError
from ralbuild.weights.reading import Progress
from ralbuild.weights.scan import Verdict, verify_folder
from ralbuild.weights.sniff import SNIFFED, sniff


def import_gguf(gguf: Path, out: Path, progress: Progress) -> Verdict:
    """Convert ``gguf`` to bfloat16 safetensors in the new folder ``out``, and verify it.

    The folder appears when it is complete and has no error.

    Raises:
        UsageError: when ``out`` exists.
        WeightsError: when the file is not GGUF, cannot be converted, or the result has errors.
        HostError: when the extra ``convert`` is missing, or the folder cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise UsageError("is already there", place=str(out), hint="name a new folder")
    _check_magic(gguf)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(out)) from None
    try:
        made = scratch / "model"
        made.mkdir()
        run_worker({"order": "convert", "gguf": str(gguf.resolve()), "out": str(made)}, "convert")
        for path in made.iterdir():  # safetensors writes 0600, which no other user can read
            path.chmod(0o644)
        verdict = verify_folder(made, DigestCache(None), 0, progress)
        if verdict.failed:
            raise FoundError(verdict.findings)
        made.rename(out)
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(out)) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return verdict


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
