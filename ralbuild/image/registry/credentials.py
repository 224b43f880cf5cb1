"""Who the user is at a registry: docker's config.json, its credential helpers, podman's auth file.

Nothing here is ever logged or put into a message.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.digests import open_regular
from ralbuild.errors import HostError, UsageError

_LIMIT = 1 << 20
_HELPER_SECONDS = 60
_HELPER_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NOT_FOUND = "credentials not found"  # what docker's helpers print for a host that they do not know
_TOKEN_USER = "<token>"  # noqa: S105 - docker's mark that the secret is an identity token


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name and password, or an identity token to exchange; empty strings for what is not there."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an ``Authorization`` header of HTTP Basic, or an empty string without a user."""
        if not self.user:
            return ""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


ANONYMOUS = Credentials()


def find_credentials(host: str, environment: Mapping[str, str] = os.environ) -> Credentials:
    """Return the credentials that docker or podman would use for ``host``; `ANONYMOUS` without any.

    Looked for in ``$DOCKER_CONFIG/config.json`` (``~/.docker`` unless set): its helper for the host,
    its entry, its store; then in podman's ``$REGISTRY_AUTH_FILE`` or ``$XDG_RUNTIME_DIR/containers``.

    Raises:
        UsageError: when a file cannot be understood.
        HostError: when a credential helper fails.
    """
    for path in _files(environment):
        config = _read(path)
        if config is None:
            continue
        found = _from_config(config, host, path)
        if found is not None:
            return found
    return ANONYMOUS


def _files(environment: Mapping[str, str]) -> list[Path]:
    home = environment.get("HOME", "")
    docker = environment.get("DOCKER_CONFIG") or (f"{home}/.docker" if home else "")
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    podman = environment.get("REGISTRY_AUTH_FILE") or (f"{runtime}/containers/auth.json" if runtime else "")
    return [Path(folder, "config.json") for folder in (docker,) if folder] + (
        [Path(podman)] if podman else []
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with open_regular(path) as file:
            value = parse_json(file.read(_LIMIT), path.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except FormatError:
        value = None
    if not isinstance(value, dict):
        raise UsageError("is not a JSON object", place=str(path), hint="`docker login` writes this file")
    return value


def _from_config(config: Mapping[str, Any], host: str, path: Path) -> Credentials | None:
    helpers = config.get("credHelpers")
    if isinstance(helpers, dict) and isinstance(helpers.get(host), str):
        return _ask_helper(helpers[host], host)
    entry = _entry(config.get("auths"), host)
    if entry is not None and (found := _from_entry(entry[1], path)) is not None:
        return found
    store = config.get("credsStore")
    if isinstance(store, str) and store:
        return _ask_helper(store, entry[0] if entry else host)
    return None


def _entry(auths: Any, host: str) -> tuple[str, dict[str, Any]] | None:
    """Return the key and the entry of ``host``; old files name it as a URL."""
    if not isinstance(auths, dict):
        return None
    for key, value in auths.items():
        name = re.sub(r"^https?://", "", key).partition("/")[0]
        if name == host and isinstance(value, dict):
            return key, value
    return None


def _from_entry(entry: Mapping[str, Any], path: Path) -> Credentials | None:
    user, password, token = (entry.get(name) or "" for name in ("username", "password", "identitytoken"))
    encoded = entry.get("auth")
    if isinstance(encoded, str) and encoded:
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise UsageError("an entry of `auths` is not base64", place=str(path)) from None
    if not all(isinstance(text, str) for text in (user, password, token)) or not (user or token):
        return None
    return Credentials(user, password.rstrip("\0"), token)


def _ask_helper(name: str, host: str) -> Credentials | None:
    """Run ``docker-credential-NAME get``: host on its input, JSON on its output."""
    if not _HELPER_NAME.fullmatch(name):
        raise UsageError(f"{name[:80]!r} is not the name of a credential helper", place="config.json")
    command = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [command, "get"], input=host.encode(), capture_output=True, timeout=_HELPER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        what = "took too long" if isinstance(error, subprocess.TimeoutExpired) else f"cannot be run: {error}"
        hint = "config.json names it as the keeper of this registry's password"
        raise HostError(what, place=command, hint=hint) from None
    if done.returncode:
        if _NOT_FOUND in done.stdout.decode(errors="replace").lower():
            return None
        raise HostError(f"failed with status {done.returncode} for {host}", place=command)
    try:
        answer = json.loads(done.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise HostError("did not answer with a user name and a secret", place=command) from None
    return Credentials(identity_token=secret) if user == _TOKEN_USER else Credentials(user, secret)
