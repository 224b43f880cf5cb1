"""`ralbuild base`: makes a base, or renders one for a container engine, or chooses its packages anew."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ralbuild.cli.options import add_registry_options, add_report_options, chosen_report, registry_options
from ralbuild.errors import UsageError


def complete(words: Sequence[str]) -> list[str]:
    """Return the words after `base`, with `build` before them when they begin with no verb of its own."""
    named = words[:1] and words[0] in ("build", "render", "lock", "-h", "--help")
    return list(words) if named else ["build", *words]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs, each with the options that it has."""
    verbs = parser.add_subparsers(title="commands", dest="what", metavar="COMMAND", required=True)
    build = _add_verb(verbs, "build", "make a base, or copy the finished one; meant when no command is named")
    build.add_argument("--out", metavar="FORM", help="where to write it, as of `ralbuild image --output`")
    build.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the base in its output")
    build.add_argument("--refresh", action="store_true", help="resolve Debian's packages again")
    build.add_argument(
        "--lock", type=Path, metavar="FILE", help="lock of its Python packages; default: ralbuild's own"
    )
    add_registry_options(build)
    add_report_options(build)
    render = _add_verb(
        verbs, "render", "write a Dockerfile with locked packages that makes one on an image of your choice"
    )
    render.add_argument("--out", metavar="DIR", help="new folder for the Dockerfile and the wheels")
    render.add_argument(
        "--from",
        dest="origin",
        default="",
        metavar="NAME@sha256:DIGEST",
        help="the image below; default: for cuda NVIDIA's of CUDA 12.2.2, for cpu none",
    )
    render.add_argument(
        "--lock", type=Path, metavar="FILE", help="lock of its Python packages; default: ralbuild's own"
    )
    add_report_options(render)
    lock = _add_verb(verbs, "lock", "resolve the Python packages anew and rewrite their lock")
    lock.add_argument("--lock", type=Path, metavar="FILE", help="lock to rewrite; default: ralbuild's own")
    lock.add_argument("--dry-run", action="store_true", help="only print what would change")
    add_report_options(lock)


def _add_verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    verb.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="what the base is for")
    return verb


def run(options: argparse.Namespace) -> int:
    """Build the base, or take the finished one of this version; print its digest. Or change its lock."""
    if options.what == "lock":
        return _lock(options)
    if options.out is None:
        example = "oci:./base" if options.what == "build" else "./base"
        raise UsageError("needs a place for the base", place="--out", hint=f"--out {example}")
    return _render(options) if options.what == "render" else _build(options)


def _build(options: argparse.Namespace) -> int:
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.pipeline.writing import write_base

    output = parse_output(options.out)
    tag = parse_tag(options.tag) if options.tag else ""
    registry, report = registry_options(options), chosen_report(options)
    print(
        write_base(options.target, output, tag, registry, report, refresh=options.refresh, lock=options.lock)
    )
    return 0


def _render(options: argparse.Namespace) -> int:
    """Write a build context; print the path of its Dockerfile."""
    from ralbuild.image.base import write_base_context

    report = chosen_report(options)
    with report.stage("base") as stage:
        place = write_base_context(options.target, options.origin, Path(options.out), report, options.lock)
        stage.summary = f"build it: docker build --tag NAME {place.parent}"
    print(place)
    return 0


def _lock(options: argparse.Namespace) -> int:
    """Resolve the target's packages; print one line a change."""
    from ralbuild.image.base.lock import refresh_lock
    from ralbuild.report import format_bytes

    report = chosen_report(options)
    with report.stage("lock") as stage:
        done = refresh_lock(options.target, options.lock, dry_run=options.dry_run)
        written = "not written" if options.dry_run else f"written to {done.path}"
        stage.summary = f"{done.packages} packages, {format_bytes(done.size)}, {written}"
    for line in done.notes:
        report.note(line)
    sys.stdout.write("".join(f"{line}\n" for line in done.changes or ("no change",)))
    return 0
