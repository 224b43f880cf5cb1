"""A Compose file with two colours behind HAProxy, and the proxy's own files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from ralbuild.release.proxy import haproxy_files
from ralbuild.release.references import require_digest
from ralbuild.release.runtime_rules import MOUNTED, rules_env
from ralbuild.release.site import COLOURS, Settings
from ralbuild.render import RenderedFile, render_text

RUN = PurePosixPath("/var/lib/ralbuild")
"""Where the proxy's container finds its files."""


def render_compose(
    app: str,
    image: str,
    proxy_image: str,
    labels: Mapping[str, str],
    settings: Settings,
    gpus: int,
    *,
    rules_folder: str = "",
    rules_least: int = 0,
) -> list[RenderedFile]:
    """Return ``compose.yaml`` and the files of ``proxy/``.

    Args:
        app: name of the project.
        image, proxy_image: by digest.
        labels: of the image.
        settings: ports and drain.
        gpus: of a server; 0 is as the labels say.
        rules_folder: folder of the host with ``rules.json`` and ``key.pem`` of the serving side; relative
            to ``compose.yaml``, empty for none.
        rules_least: smallest serial that those rules may have when a server starts.

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
        "rules_folder": _path(rules_folder),
        "rules_place": MOUNTED,
        "rules_env": rules_env(rules_least) if rules_folder else {},
        "drain_seconds": settings.drain_seconds,
        "gpus": gpus or (1 if labels.get("io.ralbuild.target") == "cuda" else 0),
    }
    files = [RenderedFile("compose.yaml", render_text("compose.yaml.j2", values))]
    files += [RenderedFile(f"proxy/{name}", data) for name, data in haproxy_files(RUN, settings).items()]
    return files


def _path(text: str) -> str:
    """Return a path as Compose writes it: relative ones begin with a dot; ``$`` names a variable."""
    relative = text and not text.startswith(("/", "./", "../"))
    return f"{'./' if relative else ''}{text}".replace("$", "$$")
