"""A Compose file with two colours behind HAProxy, and the proxy's own files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from ralbuild.errors import UsageError
from ralbuild.release.kubernetes import BY_DIGEST
from ralbuild.release.proxy import haproxy_files
from ralbuild.release.site import COLOURS, Settings
from ralbuild.render import RenderedFile, render_text

RUN = PurePosixPath("/var/lib/ralbuild")
"""Where the proxy's container finds its files."""


def render_compose(
    app: str, image: str, proxy_image: str, labels: Mapping[str, str], settings: Settings, gpus: int
) -> list[RenderedFile]:
    """Return ``compose.yaml`` and the files of ``proxy/``.

    Raises:
        UsageError: for an image without a digest.
    """
    for option, name in (("--image", image), ("--proxy-image", proxy_image)):
        if not BY_DIGEST.match(name):
            hint = "a tag may name another image tomorrow: give NAME@sha256:DIGEST"
            raise UsageError(f"{name!r} is no image by digest", place=option, hint=hint)
    values = {
        "app": app,
        "image": image,
        "proxy_image": proxy_image,
        "run": RUN,
        "colours": [(colour, settings.port(colour)) for colour in COLOURS],
        "drain_seconds": settings.drain_seconds,
        "gpus": gpus or (1 if labels.get("io.ralbuild.target") == "cuda" else 0),
    }
    files = [RenderedFile("compose.yaml", render_text("compose.yaml.j2", values))]
    files += [RenderedFile(f"proxy/{name}", data) for name, data in haproxy_files(RUN, settings).items()]
    return files
