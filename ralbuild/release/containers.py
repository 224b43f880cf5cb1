"""What a release needs of a machine that runs containers; `ralbuild.engine.Engine` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ralbuild.engine import Box, Launch

SITE_LABEL, COLOUR_LABEL = "io.ralbuild.release.site", "io.ralbuild.release.colour"


class ContainerHost(Protocol):
    """What a release asks of the machine that runs containers."""

    def find(self, image: str) -> dict[str, str] | None:
        """Return the labels of an image that is there already, by id or name."""

    def identify(self, image: str) -> str:
        """Return the id of an image that is there already, by id or name; empty when it is not there."""

    def load(self, chunks: Iterator[bytes]) -> str:
        """Load a `docker save` archive and return the image's id."""

    def pull(self, reference: str) -> str:
        """Pull an image by digest and return its id."""

    def labelled(self, label: str, value: str) -> list[Box]:
        """Return the containers, running or not, that were started with this label, by name."""

    def discard(self, image: str) -> bool:
        """Remove an image by id; tell whether it is gone: what something else uses or names stays."""

    def start(self, launch: Launch) -> None:
        """Create and start a container; one of the same name is replaced."""

    def start_again(self, name: str) -> None:
        """Start a stopped container."""

    def status(self, name: str) -> tuple[str, int]:
        """Return ``running``, ``exited`` (with its status) or ``missing``."""

    def logs(self, name: str) -> str:
        """Return the container's last lines."""

    def keep(self, name: str) -> None:
        """Let the engine start the container again after a crash or a reboot."""

    def stop(self, name: str, seconds: int) -> None:
        """Stop it gracefully; nothing happens when it is gone."""

    def remove(self, name: str) -> None:
        """Remove it, running or not; nothing happens when it is gone."""
