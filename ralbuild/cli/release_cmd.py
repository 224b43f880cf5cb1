"""`ralbuild release`: init, up, rollback, rules, resume, undo, status, proxy and remove."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.cli.options import add_report_options, add_rules_options, chosen_report, signed_rules
from ralbuild.errors import UsageError

if TYPE_CHECKING:
    from ralbuild.release.journal import Plan
    from ralbuild.release.planning import Wishes
    from ralbuild.release.removal import Removal
    from ralbuild.release.site import Settings, Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(title="commands", dest="what", metavar="COMMAND", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--site", type=Path, default=Path("ral-release"), metavar="DIR", help="folder of this host's release"
    )
    shared.add_argument("--json", action="store_true", help="print JSON")
    add_report_options(shared)
    init = verbs.add_parser("init", parents=[shared], help="write the proxy's configuration and start it")
    init.add_argument("--listen", default="127.0.0.1:8000", help="what clients use; default: 127.0.0.1:8000")
    init.add_argument(
        "--ports", default="18001,18002", metavar="BLUE,GREEN", help="loopback ports of the colours"
    )
    init.add_argument(
        "--proxy", choices=("haproxy", "nginx"), default="haproxy", help="what stands before the colours"
    )
    init.add_argument(
        "--drain", type=int, default=300, metavar="SECONDS", help="for running requests; default: 300"
    )
    init.add_argument(
        "--park", type=int, default=300, metavar="SECONDS", help="most a request waits in place"
    )
    init.add_argument("--watch", type=int, default=30, metavar="SECONDS", help="after a switch; default: 30")
    init.add_argument(
        "--on-crash", choices=("old", "503"), default="old", help="who answers for a dead colour"
    )
    add_rules_options(init, "signed rules of the serving side, for every image")
    init.add_argument("--no-start", action="store_true", help="only write and check the configuration")
    for name, text in (("up", "release an image"), ("rollback", "serve the image before")):
        verb = verbs.add_parser(name, parents=[shared], help=text)
        if name == "up":
            verb.add_argument(
                "image", metavar="IMAGE", help="oci:DIR, archive:FILE, docker:NAME, NAME@sha256:..."
            )
            verb.add_argument("--tag", default="", help="which image of a layout or archive")
            verb.add_argument(
                "--key",
                type=Path,
                action="append",
                default=[],
                metavar="PUB",
                help="must have signed it; for a layout, an archive or a registry",
            )
        verb.add_argument(
            "--mode",
            choices=("auto", "blue-green", "in-place"),
            default="auto",
            help="both images at once, or one after the other; auto: as memory allows",
        )
        verb.add_argument(
            "--probes", type=Path, metavar="FILE", help="golden prompts and guardrails of the gate"
        )
        verb.add_argument("--keep-warm", action="store_true", help="leave the old container running")
        verb.add_argument(
            "--ready-timeout", type=int, default=0, metavar="SECONDS", help="default: by the image's size"
        )
        verb.add_argument(
            "--dry-run",
            action="store_true",
            help="print the plan and check the proxy; give the engine no image, change nothing",
        )
    rules = verbs.add_parser("rules", parents=[shared], help="publish signed rules of the serving side")
    rules.add_argument("rules", type=Path, metavar="FILE", help="what `ralbuild rules compile` wrote")
    verbs.add_parser("resume", parents=[shared], help="go on with a release that was interrupted")
    verbs.add_parser("undo", parents=[shared], help="go back from a release that was interrupted")
    verbs.add_parser("status", parents=[shared], help="show what serves")
    proxy = verbs.add_parser("proxy", parents=[shared], help="start or stop the proxy")
    proxy.add_argument("do", choices=("start", "stop"), help="let it answer, or finish its answers and end")
    remove = verbs.add_parser("remove", parents=[shared], help="stop everything of the site and delete it")
    remove.add_argument("--images", action="store_true", help="remove the images of both colours as well")
    remove.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(options: argparse.Namespace) -> int:
    """Run one of the commands."""
    commands = {"init": _init, "status": _status, "proxy": _proxy, "rules": _rules, "remove": _remove}
    if options.what in commands:
        return commands[options.what](options)
    try:
        return _release(options)
    except KeyboardInterrupt:
        print("`ralbuild release resume` goes on with it, `ralbuild release undo` goes back", file=sys.stderr)
        raise


def _init(options: argparse.Namespace) -> int:
    from ralbuild.release.proxy import proxy_of
    from ralbuild.release.runtime_rules import install
    from ralbuild.release.site import SETTINGS_FILE, Site, default_settings

    rules = signed_rules(options)
    blue, green = _ports(options.ports)
    settings = default_settings(
        proxy=options.proxy,
        listen=_listen(options.listen, (blue, green)),
        blue=blue,
        green=green,
        drain_seconds=_seconds(options.drain, "--drain"),
        park_seconds=_seconds(options.park, "--park"),
        watch_seconds=_seconds(options.watch, "--watch"),
        on_crash=options.on_crash,
        runtime_rules=rules is not None,
    )
    before = Site.open(options.site) if (options.site / SETTINGS_FILE).exists() else None
    if before is not None:
        _check_running(before, settings)
    with _undone_when_refused(options.site.absolute(), before):
        site = Site.create(options.site, settings)
        with site.locked():
            if rules is not None:
                install(site, rules, options.rules_key)
            proxy = proxy_of(site)
            proxy.write_files()
            proxy.check()
            if not options.no_start:
                proxy.start()
    print(json.dumps({"site": str(site.folder)}) if options.json else options.site)
    return 0


@contextlib.contextmanager
def _undone_when_refused(folder: Path, before: Site | None) -> Iterator[None]:
    """Leave ``folder`` as it was when what is done in it fails: no site, or the one ``before``."""
    from ralbuild.release.proxy import proxy_of
    from ralbuild.release.removal import remove_files
    from ralbuild.release.site import Site

    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if before is not None:
            proxy_of(Site.create(folder, before.settings)).write_files()
        elif folder.is_dir():
            remove_files(folder)
            for path in made:
                with contextlib.suppress(OSError):  # gone already, or somebody else put something there
                    path.rmdir()
        raise


def _check_running(site: Site, settings: Settings) -> None:
    """Refuse to move a site under a running proxy, which keeps its address and ports until it ends."""
    from ralbuild.release.proxy import proxy_of

    before = site.settings
    moved = [
        f"{name} {getattr(before, name)} to {getattr(settings, name)}"
        for name in ("proxy", "listen", "blue", "green")
        if getattr(before, name) != getattr(settings, name)
    ]
    if moved and proxy_of(site).running():
        hint = "stop it first: `ralbuild release proxy stop`"
        raise UsageError(
            f"its proxy runs; cannot change {', '.join(moved)}", place=str(site.folder), hint=hint
        )


def _release(options: argparse.Namespace) -> int:
    from ralbuild.engine import Engine
    from ralbuild.release.journal import Journal
    from ralbuild.release.machine import Release
    from ralbuild.release.planning import plan_rollback, plan_up
    from ralbuild.release.proxy import proxy_of
    from ralbuild.release.signed import check_signature
    from ralbuild.release.site import Site
    from ralbuild.release.source import fetch, look, parse_source

    site = Site.open(options.site)
    report = chosen_report(options)
    with site.locked():
        proxy = proxy_of(site)
        if options.what in ("resume", "undo"):
            journal = Journal.read(site.folder)
            if journal is None:
                raise UsageError("no release was interrupted here", place=str(site.folder))
        else:
            source = parse_source(options.image, options.tag) if options.what == "up" else None
            host = Engine("release")
            if source is not None:
                if options.key:
                    with report.stage("verify") as stage:
                        stage.summary = check_signature(source, options.key)
                with report.stage("read" if options.dry_run else "load") as stage:
                    found = look(source, host) if options.dry_run else fetch(source, host)
                    stage.summary = f"{source.reference}, {found.image[:19]}"
                plan = plan_up(site, host, proxy, source.reference, found, _wishes(options))
            else:
                plan = plan_rollback(site, host, proxy, _wishes(options))
            if options.dry_run:
                proxy.check()
                return _show_plan(plan, as_json=options.json)
            journal = Journal.begin(site.folder, plan)
        proxy.start()
        release = Release(site, journal, Engine("release"), proxy, report)
        if options.what == "undo":
            serving = release.undo()
        else:
            release.run()
            serving = journal.plan.colour
    print(json.dumps({"serving": serving}) if options.json else f"{serving} serves")
    return 0


def _wishes(options: argparse.Namespace) -> Wishes:
    from ralbuild.release.planning import Wishes

    return Wishes(options.mode, options.probes, options.keep_warm, options.ready_timeout)


def _show_plan(plan: Plan, *, as_json: bool) -> int:
    from ralbuild.contract.codec import to_plain
    from ralbuild.release.machine import BLUE_GREEN, IN_PLACE

    steps = BLUE_GREEN if plan.mode == "blue-green" else IN_PLACE
    if as_json:
        print(json.dumps(to_plain(plan) | {"steps": list(steps)}, indent=2))
        return 0
    print(f"{plan.action} {plan.new.reference}: {plan.old or 'nothing'} -> {plan.colour}, {plan.mode}")
    print(f"  image      {plan.new.image}")
    print(f"  container  {plan.new.container}, about {plan.new.needs >> 20} MiB")
    print(f"  ready      within {plan.ready_seconds} s")
    print(f"  steps      {', '.join(steps)}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from ralbuild.engine import Engine
    from ralbuild.release.journal import Journal
    from ralbuild.release.proxy import proxy_of
    from ralbuild.release.service_client import ServiceClient
    from ralbuild.release.site import COLOURS, Site

    site = Site.open(options.site)
    proxy, host, state = proxy_of(site), Engine("release"), site.state
    journal = Journal.read(site.folder)
    rows: list[dict[str, Any]] = []
    for colour in COLOURS:
        deployed = state.colours.get(colour)
        if deployed is None:
            continue
        client = ServiceClient("127.0.0.1", site.settings.port(colour), timeout=5)
        status = host.status(deployed.container)[0]
        rows.append(
            {
                "colour": colour,
                "active": colour == state.active,
                "container": deployed.container,
                "status": status,
                "ready": status == "running" and client.ready()[0],
                "image": deployed.image,
                "reference": deployed.reference,
                "in_flight": client.in_flight() if status == "running" else 0,
            }
        )
    answer = {
        "active": state.active,
        "proxy": {"kind": site.settings.proxy, "running": proxy.running(), "sends_to": proxy.active()},
        "listen": site.settings.listen,
        "interrupted": journal.done if journal else None,
        "colours": rows,
    }
    print(json.dumps(answer, indent=2) if options.json else _table(answer))
    return 0


def _table(answer: dict[str, Any]) -> str:
    proxy = answer["proxy"]
    state = "running" if proxy["running"] else "not running"
    lines = [f"{answer['listen']}  {proxy['kind']} {state}, sends to {proxy['sends_to'] or 'nothing'}"]
    for row in answer["colours"]:
        mark = "*" if row["active"] else " "
        ready = "ready" if row["ready"] else row["status"]
        lines.append(f"{mark} {row['colour']:<5}  {ready:<8} {row['image'][7:19]}  {row['reference']}")
    if not answer["colours"]:
        lines.append("  nothing was released yet: ralbuild release up IMAGE")
    if answer["interrupted"] is not None:
        last = answer["interrupted"][-1] if answer["interrupted"] else "its plan"
        lines.append(f"  a release was interrupted after {last}: ralbuild release resume, or undo")
    return "\n".join(lines)


def _proxy(options: argparse.Namespace) -> int:
    from ralbuild.release.proxy import proxy_of
    from ralbuild.release.site import Site

    site = Site.open(options.site)
    with site.locked():
        proxy = proxy_of(site)
        proxy.start() if options.do == "start" else proxy.stop()
    return 0


def _remove(options: argparse.Namespace) -> int:
    from ralbuild.contract.codec import to_plain
    from ralbuild.engine import Engine
    from ralbuild.release.proxy import proxy_of
    from ralbuild.release.removal import plan_removal, remove
    from ralbuild.release.site import SETTINGS_FILE, Site

    if not (options.site / SETTINGS_FILE).exists():
        said = f"no release site is here: {options.site}"
        print(json.dumps({"site": str(options.site.absolute()), "removed": None}) if options.json else said)
        return 0
    site, host = Site.open(options.site), Engine("release")
    with site.locked():
        proxy = proxy_of(site)
        found = plan_removal(site, host, proxy, images=options.images)
        if not options.dry_run:
            found = remove(site, host, proxy, found, chosen_report(options))
    if options.json:
        print(json.dumps({"site": str(site.folder), "removed": to_plain(found)}, indent=2))
    else:
        print("\n".join(_removed(found, "would remove" if options.dry_run else "removed")))
    return 0


def _removed(found: Removal, word: str) -> list[str]:
    parts = ["the proxy, which runs"] if found.proxy else []
    parts += [f"container {name}" for name in found.containers]
    parts += [f"image {image}" for image in found.images]
    parts += [str(path) for path in found.files]
    return [*(f"{word} {part}" for part in parts), *(f"keeps {name}" for name in found.others)]


def _rules(options: argparse.Namespace) -> int:
    from ralbuild.release.runtime_rules import publish
    from ralbuild.release.site import Site

    site = Site.open(options.site)
    with site.locked():
        found = publish(site, options.rules)
    facts = {"sha256": found.sha256, "serial": found.rules.serial, "rules": len(found.rules.rules)}
    print(json.dumps(facts) if options.json else found.summary)
    return 0


def _ports(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) == 2 and all(
        part.isascii() and part.isdecimal() and 0 < int(part) < 65536 for part in parts
    ):
        blue, green = int(parts[0]), int(parts[1])
        if blue != green:
            return blue, green
    raise UsageError(f"needs two different ports such as 18001,18002, found {text!r}", place="--ports")


def _listen(text: str, ports: tuple[int, int]) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        needed = "needs ADDRESS:PORT with a port from 1 to 65535"
        raise UsageError(f"{needed}, found {text!r}", place="--listen")
    if int(port) in ports:
        raise UsageError(f"{port} is a port of --ports: clients need one of their own", place="--listen")
    return text


def _seconds(value: int, name: str) -> int:
    if not 0 <= value <= 86400:
        raise UsageError(f"needs 0 to 86400 seconds, found {value}", place=name)
    return value
