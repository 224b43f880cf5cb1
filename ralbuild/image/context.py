"""A build context for a container engine: the same file tree as the daemonless image, plus a Dockerfile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from errno import EEXIST, ENOTDIR, ENOTEMPTY, EXDEV
from pathlib import Path

from ralbuild import __version__
from ralbuild.contract.places import ENTRYPOINT, MODEL_DIR, PACKAGES_DIR, PORT, RAL_DIR
from ralbuild.digests import DigestCache
from ralbuild.errors import HostError, ImageError, UsageError
from ralbuild.image.disk import can_lock
from ralbuild.image.plan import FileEntry, HostFile, ImagePlan
from ralbuild.render import DockerfileFacts, render_dockerfile

_PACKAGES = PACKAGES_DIR.strip("/")
EMBEDDED_BASE = "ralbuild/base"
"""How a Dockerfile calls a base that has no name of its own; its digest is what counts."""


_TAKEN = (EEXIST, ENOTEMPTY, ENOTDIR)
"""How `rename` says that another render was first."""


def write_context(plan: ImagePlan, out: Path, cache: DigestCache) -> int:
    """Write the context of ``plan`` to the new folder ``out``; return the number of files.

    Weight files are hard links, so nothing large is copied; small files are written. The folder gets
    its name when it is complete. ``cache`` knows the files' digests afterwards if it did before, though
    another name changes a file's ctime.

    Raises:
        UsageError: when ``out`` is already there.
        HostError: when it cannot be written, or lies on another file system than the weights.
    """
    files = [entry for layer in plan.layers for entry in layer.entries if isinstance(entry, FileEntry)]
    try:
        with new_folder(out) as partial:
            for entry in files:
                _place(partial / _context_path(entry.path), entry, cache)
            (partial / "Dockerfile").write_bytes(render_dockerfile(_facts(plan, files)).data)
            give_name(partial, out)
    except OSError as error:
        hint = "write it on the file system that holds the weights: they are linked, not copied"
        raise HostError(
            f"cannot be written: {error.strerror}", place=str(out), hint=hint if error.errno == EXDEV else ""
        ) from None
    return len(files) + 1


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder beside ``out`` that goes at the end unless it was renamed; its lock shows its use."""
    prefix = f".{out.name}.partial-"
    out.parent.mkdir(parents=True, exist_ok=True)
    for path in out.parent.iterdir():
        if path.name.startswith(prefix) and path.is_dir() and not path.is_symlink() and can_lock(path):
            shutil.rmtree(path, ignore_errors=True)  # left by a killed process
    partial = out.with_name(f"{prefix}{os.getpid()}")
    partial.mkdir()
    fd = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(fd)


def give_name(partial: Path, out: Path) -> None:
    """Rename a finished folder to ``out``, which must not be there.

    Raises:
        UsageError: when it is.
    """
    try:
        partial.rename(out)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        raise UsageError("is already there", place=str(out), hint="name a new folder") from None


def _context_path(path: str) -> str:
    """Map a path of the image to one in the context: what the Dockerfile's COPY lines name."""
    for folder in (MODEL_DIR, RAL_DIR):
        prefix = folder.strip("/") + "/"
        if path.startswith(prefix):
            name = path.removeprefix(prefix)
            return f"models/{name}" if folder == MODEL_DIR else name
    raise ImageError(f"{path!r} lies outside {MODEL_DIR} and {RAL_DIR}", place="render")


def _make_folder(path: Path) -> None:
    """Make a folder with its parents, of a mode that the builder may copy whatever the umask is."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir()
        path.chmod(0o755)


def _place(target: Path, entry: FileEntry, cache: DigestCache) -> None:
    _make_folder(target.parent)
    if isinstance(entry.source, HostFile):
        mode = stat.S_IMODE(entry.source.path.stat().st_mode)
        if not mode & stat.S_IROTH:
            raise HostError(
                f"has mode {mode:04o}: a builder keeps it, and the server is not root and could not read it",
                place=str(entry.source.path),
                hint=f"chmod {entry.mode:o} it; `ralbuild image` needs no builder and sets modes itself",
            )
        with cache.across_a_link(entry.source.path, entry.source.purpose):
            os.link(entry.source.path, target, follow_symlinks=True)
        return
    assert isinstance(entry.source, bytes)  # pieces come from --reshard, which `render` does not have
    target.write_bytes(entry.source)
    target.chmod(entry.mode)


def _facts(plan: ImagePlan, files: list[FileEntry]) -> DockerfileFacts:
    assert plan.base is not None  # plan_image always builds on a base
    models = [entry for entry in files if entry.path.startswith(MODEL_DIR.strip("/") + "/")]
    return DockerfileFacts(
        version=__version__,
        # A registry's name says which index was asked for; the digest is that of the platform.
        base=f"{plan.base.name.partition('@')[0] or EMBEDDED_BASE}@{plan.base.digest}",
        labels=tuple(sorted(plan.config.labels.items())),
        env=plan.config.env,
        shards=tuple(Path(entry.path).name for entry in models if isinstance(entry.source, HostFile)),
        model_files=tuple(
            Path(entry.path).name for entry in models if not isinstance(entry.source, HostFile)
        ),
        model_dir=MODEL_DIR,
        ral_dir=RAL_DIR,
        entrypoint=ENTRYPOINT,
        user=plan.config.user,
        port=PORT,
        packages=any(entry.path.startswith(f"{_PACKAGES}/") for entry in files),
    )
