"""Rules of the serving side on a site: one signed file in a folder that both colours have mounted."""

from __future__ import annotations

import time
from pathlib import Path

from ralbuild.errors import GateError, HostError, UsageError
from ralbuild.files import write_atomically
from ralbuild.release.service_client import NoAnswerError, ServiceClient
from ralbuild.release.site import Site
from ralbuild.signing import load_public_key
from ralbuild.supply.runtime_rules import Checked, open_signed

FOLDER, RULES, KEY = "rules", "rules.json", "key.pem"
MOUNTED = "/run/ral/rules"
"""Where containers see the folder."""
LEAST = "RAL_RUNTIME_RULES_LEAST"
SEEN_SECONDS = 8.0
"""A server looks at its file every second."""


def rules_env(least: int = 0) -> dict[str, str]:
    """Return what tells a server where the rules are, and below which serial it takes none."""
    places = {"RAL_RUNTIME_RULES": f"{MOUNTED}/{RULES}", "RAL_RUNTIME_RULES_KEY": f"{MOUNTED}/{KEY}"}
    return places | ({LEAST: str(least)} if least else {})


def install(site: Site, rules: Checked, key: Path) -> None:
    """Put key and first file into the site's folder, from where containers get them.

    Raises:
        HostError: when they cannot be written.
    """
    try:
        (site.folder / FOLDER).mkdir(exist_ok=True)
        (site.folder / FOLDER).chmod(0o755)  # the server is another user; the site's folder is closed
        _write(site, KEY, key.read_bytes())
        _write(site, RULES, rules.data)
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(site.folder / FOLDER)) from None


def container_settings(site: Site) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of a container, and the folders that it gets to read by their place in it.

    However often the container starts, it takes no older file than the one that is there now.
    """
    if not site.settings.runtime_rules:
        return {}, {}
    folder = site.folder / FOLDER
    now = open_signed(folder / RULES, load_public_key(folder / KEY))
    return rules_env(now.rules.serial), {MOUNTED: str(folder)}


def publish(site: Site, path: Path) -> Checked:
    """Replace the file; return when the colour that serves has it in force.

    Raises:
        UsageError: when the site has no key for such rules, the file is not signed by it, or is not newer.
        GateError: when the server refuses it or does not take it; the file before is back.
    """
    if not site.settings.runtime_rules:
        hint = "`ralbuild release init --runtime-rules FILE --rules-key PUB`, then release an image"
        raise UsageError("this site has no rules of the serving side", place=str(site.folder), hint=hint)
    folder = site.folder / FOLDER
    key = load_public_key(folder / KEY)
    found, before = open_signed(path, key), open_signed(folder / RULES, key)
    if found.sha256 != before.sha256 and found.rules.serial <= before.rules.serial:
        message = f"has the serial {found.rules.serial}, {before.rules.serial} is in force"
        raise UsageError(message, place=str(path), hint="raise `serial`, and compile it again")
    _write(site, RULES, found.data)
    active = site.state.active
    if active and (refusal := _await(site, active, found.sha256)):
        _write(site, RULES, before.data)
        raise GateError(refusal, place="release rules", hint="the file before is back")
    return found


def why_not_in_force(site: Site, colour: str) -> str:
    """Return why ``colour`` does not apply the site's file; empty when it does, or the site has none."""
    if not site.settings.runtime_rules:
        return ""
    folder = site.folder / FOLDER
    return _await(site, colour, open_signed(folder / RULES, load_public_key(folder / KEY)).sha256)


def _await(site: Site, colour: str, sha256: str) -> str:
    """Wait until ``colour`` says that the file is in force; return what is wrong otherwise."""
    client = ServiceClient("127.0.0.1", site.settings.port(colour), timeout=10.0)
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            body = client.get("/ral/info").body
        except NoAnswerError as error:
            return str(error)
        said = body.get("runtime_rules") if isinstance(body, dict) else None
        if not isinstance(said, dict):
            return f"{colour} was started without rules of the serving side: release its image again"
        if said.get("sha256") == sha256:
            return ""
        if time.monotonic() > deadline:
            reason = said.get("refused") or f"not in force after {SEEN_SECONDS:.0f} s"
            return f"{colour}: {str(reason)[:200]}"
        time.sleep(0.2)


def _write(site: Site, name: str, data: bytes) -> None:
    write_atomically(site.folder / FOLDER / name, data, durable=True, mode=0o644)
