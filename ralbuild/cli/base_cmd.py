"""`ralbuild base`: makes a base, or renders one for a container engine, or chooses its packages anew."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ralbuild.cli.options import add_registry_options, add_report_options, chosen_report, registry_options
from ralbuild.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "what",
        nargs="?",
        choices=("build", "render", "lock"),
        default="build",
        help="make a base (the default), write a Dockerfile with locked packages that makes one on an image "
        "of your choice, or resolve the Python packages anew and rewrite their lock",
    )
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="what the base is for")
    parser.add_argument("--out", metavar="FORM", help="where to write it, as of `ralbuild image --output`")
    parser.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the base in its output")
    parser.add_argument("--refresh", action="store_true", help="resolve Debian's packages again")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="lock to use, or to rewrite; default: the one of ralbuild"
    )
    parser.add_argument(
        "--from",
        dest="origin",
        default="",
        metavar="NAME@sha256:DIGEST",
        help="with `render`: the image below; default for cuda: NVIDIA's of CUDA 12.2.2",
    )
    parser.add_argument("--dry-run", action="store_true", help="with `lock`: only print what would change")
    add_registry_options(parser)
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Build the base, or take the finished one of this version; print its digest. Or change its lock."""
    if options.what == "lock":
        return _lock(options)
    from ralbuild.image.outputs import parse_output, parse_tag
    from ralbuild.pipeline.writing import write_base

    if options.out is None:
        raise UsageError("needs a place for the base", place="--out", hint="--out oci:./base")
    if options.dry_run:
        raise UsageError("is for `ralbuild base lock`", place="--dry-run")
    if options.what == "render":
        return _render(options)
    if options.origin:
        raise UsageError("is for `ralbuild base render`", place="--from")
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

    if options.tag or options.refresh:
        raise UsageError(
            "is for making a base here; the engine's build command names it", place="--tag, --refresh"
        )
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

    if options.out is not None or options.tag or options.refresh or options.origin:
        raise UsageError(
            "is for making a base, `base lock` makes none", place="--out, --tag, --refresh, --from"
        )
    report = chosen_report(options)
    with report.stage("lock") as stage:
        done = refresh_lock(options.target, options.lock, dry_run=options.dry_run)
        written = "not written" if options.dry_run else f"written to {done.path}"
        stage.summary = f"{done.packages} packages, {format_bytes(done.size)}, {written}"
    for line in done.notes:
        report.note(line)
    sys.stdout.write("".join(f"{line}\n" for line in done.changes or ("no change",)))
    return 0
