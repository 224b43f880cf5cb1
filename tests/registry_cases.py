"""How the tests speak with a fake registry: no real pauses, short waits, a recorded clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from registry_server import FakeRegistry

from ralbuild.image.layers import Recipe, digest_layer
from ralbuild.image.registry.client import Repository
from ralbuild.image.registry.connect import Registries, RegistryOptions, open_registries
from ralbuild.image.registry.messages import Limits
from ralbuild.image.registry.reference import Reference
from ralbuild.image.registry.retry import Retry
from ralbuild.image.registry.upload import Uploader

NAME = "team/demo"
NOW = 1_800_000_000
DATA = bytes(range(256)) * 12_000  # 3 MB: more than the sockets' buffers hold
RECIPE = Recipe("weights", (DATA,))
DIGEST = digest_layer(RECIPE)
FULL = f"sha256:{DIGEST.sha256}"


@dataclass
class Run:
    """One client and what it waited for."""

    registries: Registries
    pauses: list[float] = field(default_factory=list)

    def repository(self, registry: FakeRegistry, name: str = NAME) -> Repository:
        return self.registries.repository(Reference(registry.host, name))

    def uploader(self, registry: FakeRegistry, name: str = NAME, chunk_size: int = 0) -> Uploader:
        return Uploader(self.repository(registry, name), chunk_size=chunk_size)


@contextmanager
def client(limits: Limits | None = None, **options: object) -> Iterator[Run]:
    """Yield a client whose pauses take no time; its jitter always says 1, so a pause is a whole step."""
    retry = Retry(attempts=4, jitter=lambda: 1.0, clock=lambda: float(NOW))
    limits = limits or Limits(connect=5, idle=5, reply=5, stored=5)
    with open_registries(RegistryOptions(**options), retry=retry, limits=limits) as registries:
        run = Run(registries)
        patch = pytest.MonkeyPatch()
        patch.setattr(registries.transport, "sleep", run.pauses.append)
        try:
            yield run
        finally:
            patch.undo()
