"""`ralbuild base lock`: resolve the packages of a base anew and rewrite its lock.

The result is code: review it, run the tests of the base (they import every model family from a base
made of it), commit it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ralbuild.errors import HostError
from ralbuild.files import write_atomically
from ralbuild.image.base.lockfile import LockedWheel, format_lock, read_lock, shipped_lock
from ralbuild.image.base.resolve import resolve
from ralbuild.image.base.targets import base_target

_COMMENT = """\
# The Python packages of the embedded {name} base. Made by: ralbuild base lock --target {name}
# Every wheel is for CPython 3.11 on x86_64 Linux. {about}
"""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh did: changes and notes, one line each; number and bytes of all packages."""

    path: Path
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    packages: int
    size: int


def refresh_lock(name: str, path: Path | None, *, dry_run: bool) -> Refreshed:
    """Resolve the packages of the target ``name`` and write the lock, unless ``dry_run``.

    ``path`` is the lock's file; None stands for the one that ships with ralbuild.

    Raises:
        UsageError: for an unknown target.
        HostError: when pip finds no solution, or the file cannot be written.
        ImageError: when the lock that is there is none, or the packages do not fit together.
    """
    target = base_target(name)
    path = path or shipped_lock(name)
    old = read_lock(path).wheels if path.exists() else ()
    new = resolve(target)
    if not dry_run:
        text = format_lock(new.wheels, _COMMENT.format(name=target.name, about=target.about))
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            hint = "name another file with --lock"
            raise HostError(f"cannot be written: {error.strerror}", place=str(path), hint=hint) from None
    total = sum(wheel.size for wheel in new.wheels)
    return Refreshed(path, tuple(changes(old, new.wheels)), new.notes, len(new.wheels), total)


def changes(old: Sequence[LockedWheel], new: Sequence[LockedWheel]) -> list[str]:
    """Return one line for each package that was added, removed, moved or rebuilt, with sizes where known."""
    before = {wheel.name: wheel for wheel in old}
    after = {wheel.name: wheel for wheel in new}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is None and now is not None:
            lines.append(f"+ {name} {now.version}{_sizes(now)}")
        elif was is not None and now is None:
            lines.append(f"- {name} {was.version}{_sizes(was)}")
        elif was is not None and now is not None and (was.version, was.sha256) != (now.version, now.sha256):
            moved = was.version != now.version
            note = f"{was.version} -> {now.version}" if moved else f"{now.version}, another file"
            lines.append(f"  {name} {note}{_sizes(now, was)}")
    return lines


def _sizes(now: LockedWheel, was: LockedWheel | None = None) -> str:
    if not now.size:
        return ""
    before = f", was {_megabytes(was.size)}" if was is not None and was.size else ""
    return f" ({_megabytes(now.size)}{before})"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
