"""A Compose file with two colours behind HAProxy, and the proxy's own files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from ralbuild.release.proxy import haproxy_files
from ralbuild.release.references import require_digest
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
    require_digest(image, "--image")
    require_digest(proxy_image, "--proxy-image")
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
