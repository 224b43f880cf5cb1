"""`ralbuild base`: makes a base; `ralbuild base lock`: chooses its packages anew."""

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
        choices=("build", "lock"),
        default="build",
        help="make a base (the default), or resolve its Python packages anew and rewrite their lock",
    )
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="what the base is for")
    parser.add_argument("--out", metavar="FORM", help="where to write it, as of `ralbuild image --output`")
    parser.add_argument("--tag", default="", metavar="NAME[:TAG]", help="name of the base in its output")
    parser.add_argument("--refresh", action="store_true", help="resolve Debian's packages again")
    parser.add_argument(
        "--lock", type=Path, metavar="FILE", help="lock to use, or to rewrite; default: the one of ralbuild"
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
    output = parse_output(options.out)
    tag = parse_tag(options.tag) if options.tag else ""
    registry, report = registry_options(options), chosen_report(options)
    print(
        write_base(options.target, output, tag, registry, report, refresh=options.refresh, lock=options.lock)
    )
    return 0


def _lock(options: argparse.Namespace) -> int:
    """Resolve the target's packages; print one line a change."""
    from ralbuild.image.base.lock import refresh_lock
    from ralbuild.report import format_bytes

    if options.out is not None or options.tag or options.refresh:
        raise UsageError("is for making a base, `base lock` makes none", place="--out, --tag, --refresh")
    report = chosen_report(options)
    with report.stage("lock") as stage:
        done = refresh_lock(options.target, options.lock, dry_run=options.dry_run)
        written = "not written" if options.dry_run else f"written to {done.path}"
        stage.summary = f"{done.packages} packages, {format_bytes(done.size)}, {written}"
    for line in done.notes:
        report.note(line)
    sys.stdout.write("".join(f"{line}\n" for line in done.changes or ("no change",)))
    return 0
