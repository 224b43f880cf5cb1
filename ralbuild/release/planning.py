"""From what was asked to a `Plan`: which colour, which mode, how long a start may take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ralbuild.config.probes import load_probes
from ralbuild.errors import HostError, UsageError
from ralbuild.release.containers import ContainerHost
from ralbuild.release.journal import Plan
from ralbuild.release.preflight import check_device, free_room, needs_of, ready_budget
from ralbuild.release.proxy import Proxy
from ralbuild.release.site import COLOURS, Deployed, Site, other
from ralbuild.release.source import Found

MODES = ("auto", "blue-green", "in-place")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `release up` was told.

    Attributes:
        mode: one of `MODES`.
        probes: the probe file, or None.
        keep_warm: leave the old container running.
        ready_seconds: 0 takes the image's own numbers.
    """

    mode: str = "auto"
    probes: Path | None = None
    keep_warm: bool = False
    ready_seconds: int = 0


def plan_up(
    site: Site, host: ContainerHost, proxy: Proxy, reference: str, found: Found, wishes: Wishes
) -> Plan:
    """Decide how ``found`` becomes what serves; nothing is changed.

    Raises:
        HostError: when the driver is too old, or the image does not fit either way.
        ConfigError: when the probe file is wrong.
        UsageError: when the proxy cannot do the mode.
    """
    check_device(found.labels)
    if wishes.probes is not None:
        load_probes(wishes.probes)
    state = site.state
    colour = other(state.active) if state.active else COLOURS[0]
    needs = needs_of(found.labels)
    new = Deployed(
        reference,
        found.image,
        found.labels["io.ralbuild.bundle"],
        _container_name(site, colour, found.image),
        needs,
    )
    mode = _mode(site, host, proxy, new, found.labels["io.ralbuild.target"], wishes.mode)
    probes = str(wishes.probes.resolve()) if wishes.probes else ""
    ready = wishes.ready_seconds or ready_budget(found.labels)
    return Plan("up", mode, colour, state.active, new, probes, wishes.keep_warm, ready)


def plan_rollback(site: Site, host: ContainerHost, proxy: Proxy, wishes: Wishes) -> Plan:
    """Decide how the image of the other colour serves again.

    Raises:
        UsageError: when there is none.
    """
    state = site.state
    colour = other(state.active) if state.active else ""
    target = state.colours.get(colour)
    labels = host.find(target.image) if target else None
    if target is None or labels is None:
        hint = "release the image that you want with `ralbuild release up`"
        raise UsageError("there is no earlier image to go back to", place="release rollback", hint=hint)
    if host.status(target.container)[0] == "running":
        mode = "blue-green"
    else:
        mode = _mode(site, host, proxy, target, labels["io.ralbuild.target"], wishes.mode)
    probes = str(wishes.probes.resolve()) if wishes.probes else ""
    ready = wishes.ready_seconds or ready_budget(labels)
    return Plan("rollback", mode, colour, state.active, target, probes, wishes.keep_warm, ready)


def _mode(site: Site, host: ContainerHost, proxy: Proxy, new: Deployed, target: str, wish: str) -> str:
    active = site.state.colours.get(site.state.active)
    room = free_room(target)
    fits = room.free >= new.needs
    if active is None or host.status(active.container)[0] != "running":
        if not fits:
            raise HostError(_too_small(room.free, new.needs, room.kind), place="release")
        return "blue-green"
    if wish == "in-place" or (wish == "auto" and not fits):
        if not proxy.can_hold:
            hint = "use haproxy (`ralbuild release init --proxy haproxy`), or free memory"
            raise UsageError("this proxy cannot hold requests while one image replaces the other", hint=hint)
        return "in-place"
    if not fits:
        hint = "--mode in-place swaps them without room for both"
        raise HostError(_too_small(room.free, new.needs, room.kind), place="release", hint=hint)
    return "blue-green"


def _too_small(free: int, needs: int, kind: str) -> str:
    return f"the image needs about {needs >> 20} MiB of {kind}, {free >> 20} MiB are free"


def _container_name(site: Site, colour: str, image: str) -> str:
    """One name per site, colour and image: a step that runs twice finds its container again."""
    digest = hashlib.sha256(str(site.folder).encode()).hexdigest()
    return f"ral-{digest[:8]}-{colour}-{image.removeprefix('sha256:')[:12]}"
