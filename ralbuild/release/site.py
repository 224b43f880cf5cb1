"""A site: the folder that holds one host's release: settings, which colour serves, and the proxy's files.

Everything is a small file that is replaced whole, so that a tool that was killed leaves a state that
the next one can read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ralbuild.contract.codec import FormatError, canonical_json, from_plain, parse_json, to_plain
from ralbuild.errors import HostError, UsageError
from ralbuild.files import write_atomically

FORMAT = "ralbuild.release/1"
COLOURS = ("blue", "green")
SETTINGS_FILE, STATE_FILE, LOCK_FILE = "release.json", "state.json", "lock"
SOCKET_LIMIT = 90
"""Characters of the folder's path: a UNIX socket below it has at most 107."""

T = TypeVar("T")


def other(colour: str) -> str:
    """Return the other colour."""
    return COLOURS[1 - COLOURS.index(colour)]


@dataclass(frozen=True, slots=True)
class Settings:
    """How this host releases; `release init` writes it.

    Attributes:
        format: `FORMAT`.
        proxy: ``haproxy`` or ``nginx``.
        listen: address and port that clients use.
        blue, green: loopback ports of the colours.
        drain_seconds: how long running requests of a colour that leaves may take.
        park_seconds: how long a request may wait while a model is swapped in place.
        watch_seconds: how long the new colour is watched after the switch.
        on_crash: ``old`` lets the other colour answer for one that died, while it is there; ``503`` does not.
        connections: most open connections of the proxy.
        runtime_rules: containers get the signed rules of the folder ``rules``.
    """

    format: str
    proxy: str
    listen: str
    blue: int
    green: int
    drain_seconds: int
    park_seconds: int
    watch_seconds: int
    on_crash: str
    connections: int
    runtime_rules: bool

    def port(self, colour: str) -> int:
        """Return the loopback port of ``colour``."""
        return self.blue if colour == "blue" else self.green


def default_settings(**changes: Any) -> Settings:
    """Return what `release init` takes when it is told nothing else."""
    return replace(
        Settings(
            FORMAT,
            "haproxy",
            "127.0.0.1:8000",
            18001,
            18002,
            drain_seconds=300,
            park_seconds=300,
            watch_seconds=30,
            on_crash="old",
            connections=2000,
            runtime_rules=False,
        ),
        **changes,
    )


@dataclass(frozen=True, slots=True)
class Deployed:
    """An image that was put into a colour.

    Attributes:
        reference: what the user named it by.
        image: the engine's image id, ``sha256:...`` of the config.
        bundle: digest of the compiled rules, from its label.
        container: name of the container.
        needs: bytes of memory that its labels ask for.
    """

    reference: str
    image: str
    bundle: str
    container: str
    needs: int


@dataclass(frozen=True, slots=True)
class State:
    """Which colour serves, and what each one holds; ``active`` is empty before the first release."""

    active: str
    colours: dict[str, Deployed]

    def with_colour(self, colour: str, deployed: Deployed | None) -> State:
        """Return the state with another image in ``colour``; None empties it."""
        rest = {name: item for name, item in self.colours.items() if name != colour}
        return replace(self, colours=rest if deployed is None else rest | {colour: deployed})


class Site:
    """The folder; made by `Site.create`, opened by `Site.open`."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings

    @classmethod
    def create(cls, folder: Path, settings: Settings) -> Site:
        """Write the settings into ``folder``, which may hold an earlier site of the same ports.

        Raises:
            UsageError: when the path is too long for a socket, or holds blanks.
            HostError: when it cannot be written.
        """
        folder = folder.absolute()
        if len(str(folder)) > SOCKET_LIMIT or not str(folder).isascii() or " " in str(folder):
            message = f"needs at most {SOCKET_LIMIT} ASCII characters without blanks: sockets lie below it"
            raise UsageError(message, place=str(folder), hint="choose a shorter folder with --site")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(folder / SETTINGS_FILE, canonical_json(to_plain(settings)) + b"\n", durable=True)
        except OSError as error:
            raise HostError(f"cannot be written: {error.strerror}", place=str(folder)) from None
        return cls(folder, settings)

    @classmethod
    def open(cls, folder: Path) -> Site:
        """Open a site.

        Raises:
            UsageError: when there is none, or its settings are damaged.
        """
        folder = folder.absolute()
        hint = "run `ralbuild release init` first"
        settings = _read(Settings, folder / SETTINGS_FILE, hint)
        if settings is None:
            raise UsageError("no release site is here", place=str(folder), hint=hint)
        if settings.format != FORMAT:
            raise UsageError(
                f"has the format {settings.format!r}, needs {FORMAT!r}", place=str(folder), hint=hint
            )
        return cls(folder, settings)

    @property
    def state(self) -> State:
        """What serves; read from disk at every call."""
        hint = "restore it from `docker ps` and the proxy, or remove it to start from nothing"
        return _read(State, self.folder / STATE_FILE, hint) or State("", {})

    def save(self, state: State) -> None:
        """Replace the state; it is on disk when this returns."""
        write_atomically(self.folder / STATE_FILE, canonical_json(to_plain(state)) + b"\n", durable=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the site for one release.

        Raises:
            UsageError: when another process holds it.
        """
        fd = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = "another release of this site is running"
                raise UsageError(
                    message, place=str(self.folder), hint="`ralbuild release status` shows it"
                ) from None
            yield
        finally:
            os.close(fd)


def _read(kind: type[T], path: Path, hint: str) -> T | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path)) from None
    try:
        plain: Any = parse_json(data, path.name)
        return from_plain(kind, plain, path.name)
    except FormatError as error:
        raise UsageError(str(error), place=str(path), hint=hint) from None
