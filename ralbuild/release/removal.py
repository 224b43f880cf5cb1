"""A site taken away: its proxy ends, its containers stop, its files go; nothing that is not its own.

Every step may run twice, and the settings go last, so that a removal that was killed is done again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ralbuild.errors import HostError
from ralbuild.release import runtime_rules
from ralbuild.release.containers import SITE_LABEL, ContainerHost
from ralbuild.release.journal import JOURNAL_FILE, LAST_FILE
from ralbuild.release.proxy import FILES, FOLDERS, Proxy
from ralbuild.release.site import LOCK_FILE, SETTINGS_FILE, STATE_FILE, Site
from ralbuild.report import Report

_PROXY_SECONDS = 70
"""HAProxy cuts what still runs a minute after its drain."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Removal:
    """What is there to remove.

    Attributes:
        proxy: the proxy runs.
        containers: names, of both colours.
        images: ids of their images, when those are to go as well.
        files: paths of the site's own files and folders.
        others: names in the folder that are not the site's and stay.
    """

    proxy: bool
    containers: tuple[str, ...]
    images: tuple[str, ...]
    files: tuple[Path, ...]
    others: tuple[str, ...]


def plan_removal(site: Site, host: ContainerHost, proxy: Proxy, *, images: bool) -> Removal:
    """Look at what ``site`` has; nothing is changed."""
    boxes = host.labelled(SITE_LABEL, str(site.folder))
    deployed = site.state.colours.values()
    ids = sorted({box.image for box in boxes} | {item.image for item in deployed}) if images else []
    files = tuple(_files(site.folder))
    ours = {path.name for path in files if path.parent == site.folder} | {runtime_rules.FOLDER}
    others = tuple(sorted(path.name for path in site.folder.iterdir() if path.name not in ours))
    return Removal(proxy.running(), tuple(box.name for box in boxes), tuple(ids), files, others)


def remove(site: Site, host: ContainerHost, proxy: Proxy, found: Removal, report: Report) -> Removal:
    """Do what ``found`` says: first nobody asks, then nobody answers, then nothing is left of it.

    Returns what was removed: without the images that something else uses.

    Raises:
        HostError: when the proxy does not end, or a file cannot be removed.
        ImageError: when the engine refuses.
    """
    with report.stage("proxy") as stage:
        stage.summary = _stop_proxy(proxy, site.settings.drain_seconds + _PROXY_SECONDS, site.folder)
    with report.stage("stop") as stage:
        for name in found.containers:
            report.step(name)
            host.stop(name, site.settings.drain_seconds + 30)
            host.remove(name)
        stage.summary = f"{len(found.containers)} containers removed"
    gone: tuple[str, ...] = ()
    if found.images:
        with report.stage("images") as stage:
            gone = tuple(image for image in found.images if host.discard(image))
            kept = len(found.images) - len(gone)
            stage.summary = f"{len(gone)} removed" + (f", {kept} in use elsewhere" if kept else "")
    with report.stage("files") as stage:
        remove_files(site.folder)
        left = f"; {', '.join(found.others)} stay in {site.folder}" if found.others else ""
        stage.summary = f"{len(found.files)} removed{left}"
    return replace(found, images=gone)


def remove_files(folder: Path) -> None:
    """Remove a site's own files, and the folder when nothing else is in it.

    Raises:
        HostError: when one cannot be removed.
    """
    try:
        for path in _files(folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in (folder / runtime_rules.FOLDER, folder):
            with contextlib.suppress(FileNotFoundError):
                if not any(path.iterdir()):
                    path.rmdir()
    except OSError as error:
        place = str(error.filename or folder)
        hint = "remove it as its owner, then run `ralbuild release remove` again"
        raise HostError(f"cannot be removed: {error.strerror}", place=place, hint=hint) from None


def _files(folder: Path) -> Iterator[Path]:
    """Yield what a site writes and what of it is there, settings and lock last."""
    rules = (f"{runtime_rules.FOLDER}/{name}" for name in (runtime_rules.RULES, runtime_rules.KEY))
    names = (*FILES, *FOLDERS, *rules, JOURNAL_FILE, LAST_FILE, STATE_FILE, SETTINGS_FILE, LOCK_FILE)
    for name in names:
        path = folder / name
        if path.exists() or path.is_symlink():
            yield path


def _stop_proxy(proxy: Proxy, seconds: float, folder: Path) -> str:
    if not proxy.running():
        return "does not run"
    proxy.stop()
    deadline = time.monotonic() + seconds
    while proxy.running():
        if time.monotonic() > deadline:
            hint = "look at what it still answers, then run `ralbuild release remove` again"
            raise HostError(f"the proxy has not ended after {seconds:.0f} s", place=str(folder), hint=hint)
        time.sleep(_POLL_SECONDS)
    return "has ended"
