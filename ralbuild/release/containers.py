"""The Docker engine as a release uses it. The only door to the docker SDK in this room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from ralbuild.errors import HostError, ImageError

_RESTART: Any = {"Name": "unless-stopped"}
SITE_LABEL, COLOUR_LABEL = "io.ralbuild.release.site", "io.ralbuild.release.colour"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a container is started.

    Attributes:
        name: unique on the engine.
        image: image id.
        port: loopback port that the server gets.
        labels: what marks it as ours.
        stop_seconds: how long the engine waits after SIGTERM.
        gpus: pass all GPUs through.
    """

    name: str
    image: str
    port: int
    labels: dict[str, str]
    stop_seconds: int
    gpus: bool = False


class ContainerHost(Protocol):
    """What a release asks of the machine that runs containers."""

    def find(self, image: str) -> dict[str, str] | None:
        """Return the labels of an image that is there already, by id or name."""

    def load(self, chunks: Iterator[bytes]) -> str:
        """Load a `docker save` archive and return the image's id."""

    def pull(self, reference: str) -> str:
        """Pull an image by digest and return its id."""

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


class DockerHost:
    """The engine that ``DOCKER_HOST`` names, on this machine: colours listen on its loopback."""

    def __init__(self) -> None:
        try:
            self._client = docker.from_env(timeout=600)
            self._client.ping()
        except DockerException as error:
            hint = "start docker, or set DOCKER_HOST to its socket"
            raise HostError(
                f"no docker engine answers: {_short(error)}", place="release", hint=hint
            ) from None

    def find(self, image: str) -> dict[str, str] | None:
        try:
            found = self._client.images.get(image)
        except ImageNotFound:
            return None
        return dict(found.labels)

    def load(self, chunks: Iterator[bytes]) -> str:
        with _engine_errors("load the image"):
            (loaded, *_) = self._client.images.load(chunks)  # type: ignore[arg-type] # sent in chunks
        return str(loaded.id)

    def pull(self, reference: str) -> str:
        with _engine_errors(f"pull {reference}"):
            return str(self._client.images.pull(reference).id)

    def start(self, launch: Launch) -> None:
        self.remove(launch.name)
        devices = [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])] if launch.gpus else None
        with _engine_errors(f"start {launch.name}"):
            self._client.containers.run(
                launch.image,
                name=launch.name,
                detach=True,
                read_only=True,
                tmpfs={"/tmp": ""},  # noqa: S108 - inside the container
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                network_mode="host",
                environment={
                    "RAL_HOST": "127.0.0.1",
                    "RAL_PORT": str(launch.port),
                    "RAL_DRAIN_SECONDS": str(launch.stop_seconds),
                },
                labels=launch.labels,
                device_requests=devices,
            )

    def start_again(self, name: str) -> None:
        with _engine_errors(f"start {name}"):
            self._client.containers.get(name).start()

    def status(self, name: str) -> tuple[str, int]:
        try:
            state = self._client.containers.get(name).attrs["State"]
        except NotFound:
            return "missing", 0
        return ("running", 0) if state["Running"] else ("exited", int(state["ExitCode"]))

    def logs(self, name: str) -> str:
        with contextlib.suppress(APIError):
            text: bytes = self._client.containers.get(name).logs(tail=5)
            return text.decode("utf-8", "replace").strip()
        return ""

    def keep(self, name: str) -> None:
        with contextlib.suppress(APIError):
            self._client.containers.get(name).update(restart_policy=_RESTART)

    def stop(self, name: str, seconds: int) -> None:
        with contextlib.suppress(NotFound), _engine_errors(f"stop {name}"):
            self._client.containers.get(name).stop(timeout=seconds)

    def remove(self, name: str) -> None:
        with contextlib.suppress(NotFound), _engine_errors(f"remove {name}"):
            self._client.containers.get(name).remove(force=True)


@contextlib.contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    try:
        yield
    except NotFound:
        raise
    except (DockerException, OSError) as error:
        raise ImageError(f"docker cannot {what}: {_short(error)}", place="release") from None


def _short(error: Exception) -> str:
    text = getattr(error, "explanation", None) or str(error)
    return str(text).strip().splitlines()[0][:200] if str(text).strip() else type(error).__name__
