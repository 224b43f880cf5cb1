"""The registries of one run: options, one transport for all, one session a host."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.image.registry.reference import Reference

if TYPE_CHECKING:
    from ralbuild.image.registry.client import Repository
    from ralbuild.image.registry.messages import Limits
    from ralbuild.image.registry.retry import Retry
    from ralbuild.image.registry.session import Registry
    from ralbuild.image.registry.transport import Transport


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """What the user says of registries.

    Attributes:
        profile: name of a profile; empty takes the one of the user's file, else the generic one.
        insecure: allow plain HTTP to other machines.
        ca_file: certificates to trust besides the system's.
        chunk_size: bytes of a chunk: send blobs in chunks; 0 sends them whole where that works.
        jobs: blobs sent at the same time.
    """

    profile: str = ""
    insecure: bool = False
    ca_file: Path | None = None
    chunk_size: int = 0
    jobs: int = 4


class Registries:
    """Opens repositories; made by `open_registries`. HTTP and TLS are imported with the first one."""

    def __init__(self, options: RegistryOptions, retry: Retry | None, limits: Limits | None) -> None:
        self.options = options
        self._limits = limits
        self._retry = retry
        self._lock = threading.Lock()
        self._sessions: dict[str, Registry] = {}

    @functools.cached_property
    def transport(self) -> Transport:
        """The connections of the run."""
        from ralbuild.image.registry.transport import Transport

        options = self.options
        return Transport(insecure=options.insecure, ca_file=options.ca_file, limits=self._limits)

    def close(self) -> None:
        """End every connection."""
        if "transport" in vars(self):
            self.transport.close()

    def repository(self, reference: Reference) -> Repository:
        """Return the repository of ``reference``; nothing is sent yet.

        Raises:
            UsageError: when its profile is unknown.
        """
        from ralbuild.image.registry.client import Repository
        from ralbuild.image.registry.profiles import find_login, find_profile
        from ralbuild.image.registry.session import Registry

        with self._lock:
            session = self._sessions.get(reference.host)
            if session is None:
                profile = find_profile(reference.host, self.options.profile)
                login = find_login(reference.host)
                session = Registry(reference.host, self.transport, profile, self._retry, login)
                self._sessions[reference.host] = session
        return Repository(session, reference.repository)


@contextlib.contextmanager
def open_registries(
    options: RegistryOptions | None = None, *, retry: Retry | None = None, limits: Limits | None = None
) -> Iterator[Registries]:
    """Yield the registries of a run and end every connection afterwards."""
    registries = Registries(options or RegistryOptions(), retry, limits)
    try:
        yield registries
    finally:
        registries.close()
