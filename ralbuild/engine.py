"""The docker engine that ``DOCKER_HOST`` names, else this machine's. The only door to the docker SDK."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests import RequestException

from ralbuild.errors import HostError, ImageError

_SECONDS = 3600
"""How long the engine may say nothing: it does while it unpacks a layer."""
_CONFLICT = 409
_RESTART: Any = {"Name": "unless-stopped"}
_FAILURES = (DockerException, RequestException, OSError)


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
        env: further variables.
        folders: folders of this machine by the place where the container may read them.
    """

    name: str
    image: str
    port: int
    labels: dict[str, str]
    stop_seconds: int
    gpus: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Box:
    """A container: its name, and the id of its image."""

    name: str
    image: str


class Engine:
    """A connection; every method raises ImageError when the engine refuses what it was asked.

    Args:
        place: what errors name.
        hint: what to do when no engine answers.

    Raises:
        HostError: when none answers.
    """

    def __init__(self, place: str, hint: str = "start docker, or set DOCKER_HOST to its socket") -> None:
        self._place = place
        try:
            self._client = docker.from_env(timeout=_SECONDS)
            self._client.ping()
        except _FAILURES as error:
            raise HostError(f"no docker engine answers: {_short(error)}", place=place, hint=hint) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def find(self, image: str) -> dict[str, str] | None:
        """Return the labels of an image that is there already, by id or name."""
        with self._errors(f"look for {image}"):
            try:
                return dict(self._client.images.get(image).labels)
            except ImageNotFound:
                return None

    def identify(self, image: str) -> str:
        """Return the id of an image that is there already, by id or name; empty when it is not there."""
        with self._errors(f"look for {image}"):
            try:
                return str(self._client.images.get(image).id)
            except ImageNotFound:
                return ""

    def load(self, chunks: Iterator[bytes]) -> str:
        """Load a `docker save` archive as it comes and return the image's id.

        An exception of ``chunks`` that is not an OSError comes through; the engine drops what it got.
        """
        with self._errors("take the image"):
            # Its types know files only; requests sends whatever can be iterated over.
            (loaded, *_) = self._client.images.load(cast(Any, chunks))
        return str(loaded.id)

    def tag(self, image: str, name: str) -> None:
        """Give an image one more name."""
        with self._errors(f"tag {name}"):
            self._client.images.get(image).tag(name)

    def pull(self, reference: str) -> str:
        """Pull an image by digest and return its id."""
        with self._errors(f"pull {reference}"):
            return str(self._client.images.pull(reference).id)

    def labelled(self, label: str, value: str) -> list[Box]:
        """Return the containers, running or not, that were started with this label, by name."""
        with self._errors(f"list containers of {value}"):
            found = self._client.containers.list(
                all=True, filters={"label": f"{label}={value}"}, ignore_removed=True
            )
            boxes = [Box(str(box.name), str(box.attrs["Image"])) for box in found]
        return sorted(boxes, key=lambda box: box.name)

    def discard(self, image: str) -> bool:
        """Remove an image by id; tell whether it is gone: what something else uses or names stays."""
        with self._errors(f"remove {image}"):
            try:
                self._client.images.remove(image)
            except ImageNotFound:
                return True
            except APIError as error:
                if error.status_code != _CONFLICT:
                    raise
                return False
        return True

    def start(self, launch: Launch) -> None:
        """Create and start a container; one of the same name is replaced."""
        self.remove(launch.name)
        devices = [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])] if launch.gpus else None
        with self._errors(f"start {launch.name}"):
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
                    **launch.env,
                },
                volumes={folder: {"bind": place, "mode": "ro"} for place, folder in launch.folders.items()},
                labels=launch.labels,
                device_requests=devices,
            )

    def start_again(self, name: str) -> None:
        """Start a stopped container."""
        with self._errors(f"start {name}"):
            self._client.containers.get(name).start()

    def status(self, name: str) -> tuple[str, int]:
        """Return ``running``, ``exited`` (with its status) or ``missing``."""
        with self._errors(f"look at {name}"):
            try:
                state = self._client.containers.get(name).attrs["State"]
            except NotFound:
                return "missing", 0
        return ("running", 0) if state["Running"] else ("exited", int(state["ExitCode"]))

    def logs(self, name: str) -> str:
        """Return the container's last lines; nothing when it has none to give."""
        with contextlib.suppress(APIError):
            text: bytes = self._client.containers.get(name).logs(tail=5)
            return text.decode("utf-8", "replace").strip()
        return ""

    def keep(self, name: str) -> None:
        """Let the engine start the container again after a crash or a reboot."""
        with contextlib.suppress(APIError):
            self._client.containers.get(name).update(restart_policy=_RESTART)

    def stop(self, name: str, seconds: int) -> None:
        """Stop it gracefully; nothing happens when it is gone."""
        with self._errors(f"stop {name}"), contextlib.suppress(NotFound):
            self._client.containers.get(name).stop(timeout=seconds)

    def remove(self, name: str) -> None:
        """Remove it, running or not; nothing happens when it is gone."""
        with self._errors(f"remove {name}"), contextlib.suppress(NotFound):
            self._client.containers.get(name).remove(force=True)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise ImageError(f"the engine did not {what}: {_short(error)}", place=self._place) from None


def _short(error: Exception) -> str:
    text = (getattr(error, "explanation", None) or str(error)).strip()
    return str(text).splitlines()[0][:300] if text else type(error).__name__
