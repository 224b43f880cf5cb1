"""What a registry takes: ``data/registries.toml``, and the user's own file on top of it."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, from_plain, to_plain
from ralbuild.digests import open_regular
from ralbuild.errors import ImageError, UsageError
from ralbuild.image.assemble import Image

SINGLE, CHUNKED = "single", "chunked"
"""Ways to send a blob: one PUT, or PATCH in chunks and a PUT that closes."""
GENERIC = "generic"
_USER_FILE = Path("ralbuild", "registries.toml")
_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Profile:
    """What one kind of registry takes; the fields are explained in ``data/registries.toml``.

    Sizes are in bytes; 0 means that no limit is known.
    """

    name: str
    max_layers: int
    max_layer_bytes: int
    limit: str
    upload: tuple[str, ...]
    chunk_bytes: int
    max_chunks: int
    mount: bool
    referrers: bool

    def chunk(self, size: int, asked: int = 0, least: int = 0) -> int:
        """Return the bytes of a chunk for a blob of ``size``.

        Args:
            size: of the blob.
            asked: by the user; 0 takes the profile's.
            least: that the registry said it takes (``OCI-Chunk-Min-Length``).
        """
        fewest = -(-size // self.max_chunks) if self.max_chunks else 0
        return max(asked or self.chunk_bytes or 1, least, fewest)


def find_profile(host: str, name: str = "", environment: Mapping[str, str] = os.environ) -> Profile:
    """Return the profile called ``name``, else the one that the user's file has for ``host``, else generic.

    The user's file is ``$XDG_CONFIG_HOME/ralbuild/registries.toml`` (``~/.config`` unless set).

    Raises:
        UsageError: when there is no such profile, or the user's file is wrong.
    """
    path, own = _user_file(environment)
    wanted = name or _host_entry(own, host, path).get("profile", GENERIC)
    known = _shipped() | _own_profiles(own, path)
    if wanted not in known:
        place = "--registry-profile" if name else str(path)
        raise UsageError(f"no profile {wanted!r}", place=place, hint=f"profiles: {', '.join(sorted(known))}")
    return known[wanted]


def find_login(host: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name under which the credentials of ``host`` are filed: the user's file may say another.

    Raises:
        UsageError: when the user's file is wrong.
    """
    path, own = _user_file(environment)
    return _host_entry(own, host, path).get("login", host)


def check_limits(image: Image, profile: Profile) -> None:
    """Refuse an image that the registry would refuse, before a byte of it is sent.

    Raises:
        ImageError: naming the layer.
    """
    if len(image.layers) > profile.max_layers:
        raise ImageError(
            f"the image has {len(image.layers)} layers, {profile.name} takes at most {profile.max_layers}",
            hint="--reshard SIZE makes fewer and larger weight files",
        )
    check_sizes(((layer.descriptor.name, layer.digest.size) for layer in image.unique_layers), profile)


def check_sizes(layers: Iterable[tuple[str, int]], profile: Profile) -> None:
    """Refuse layers, given as name and bytes, that are above the profile's cap.

    Raises:
        ImageError: naming the first one.
    """
    cap = profile.max_layer_bytes
    for name, size in layers:
        if cap and size > cap:
            raise ImageError(
                f"has {size} bytes, {profile.name} takes at most {cap} ({profile.limit} limit)",
                place=name,
                hint=f"--reshard {_below(cap)} cuts the weights into smaller files, without loss",
            )


def _below(cap: int) -> str:
    """Return a round size with room for headers below ``cap``."""
    return "5GB" if cap > 5_500_000_000 else f"{max(1, cap * 9 // 10)}"


@functools.cache
def _shipped() -> dict[str, Profile]:
    text = resources.files("ralbuild").joinpath("data/registries.toml").read_text("utf-8")
    return {name: _profile(name, values) for name, values in tomllib.loads(text).items()}


def _profile(name: str, values: Mapping[str, Any]) -> Profile:
    profile = from_plain(Profile, {"name": name, **values}, name)
    if not profile.upload or not {SINGLE, CHUNKED}.issuperset(profile.upload):
        raise FormatError(f"{name}.upload", "needs ways to upload: single, chunked")
    return profile


def _own_profiles(own: Mapping[str, Any], path: Path) -> dict[str, Profile]:
    profiles = own.get("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(item, dict) for item in profiles.values()):
        raise UsageError("needs tables [profile.NAME]", place=str(path))
    known: dict[str, Profile] = {}
    for name, values in profiles.items():
        try:
            start = to_plain(_shipped()[values.pop("based_on", GENERIC)])
            del start["name"]
            known[name] = _profile(name, {**start, **values})
        except (FormatError, KeyError, TypeError) as error:
            raise UsageError(f"profile {name}: {error}", place=str(path)) from None
    return known


def _host_entry(own: Mapping[str, Any], host: str, path: Path) -> dict[str, str]:
    hosts = own.get("host", {})
    entry = hosts.get(host, {}) if isinstance(hosts, dict) else None
    if (
        not isinstance(entry, dict)
        or not {"profile", "login"}.issuperset(entry)
        or not all(isinstance(value, str) for value in entry.values())
    ):
        raise UsageError('needs tables [host."NAME"] with profile = "..." or login = "..."', place=str(path))
    return entry


def _user_file(environment: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    folder = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '')}/.config"
    path = Path(folder) / _USER_FILE
    try:
        with open_regular(path) as file:
            return path, tomllib.loads(file.read(_LIMIT).decode())
    except FileNotFoundError:
        return path, {}
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"is not TOML: {error}", place=str(path)) from None
