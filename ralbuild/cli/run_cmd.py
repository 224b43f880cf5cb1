"""`ralbuild run`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ralbuild.cli.options import add_report_options, add_rules_folder_options, chosen_report, least_serial
from ralbuild.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("image", metavar="oci:DIR", help="an OCI layout folder that `ralbuild image` wrote")
    parser.add_argument("--tag", default="", help="which image, when the layout holds several")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port; default: 8000")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.add_argument(
        "--mode",
        choices=("auto", "namespace", "direct"),
        default="auto",
        help="user namespace, or the image's own loader where the host forbids one",
    )
    add_rules_folder_options(parser)
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Unpack the image into the user's cache and run its entrypoint there, unprivileged."""
    from ralbuild.image.local_run import run_image

    if not 0 < options.port < 65536:
        raise UsageError(f"needs a port from 1 to 65535, found {options.port}", place="--port")
    if not options.image.startswith("oci:"):
        raise UsageError(f"needs oci:DIR, found {options.image!r}", hint="ralbuild run oci:./ral-image")
    env, folders = _rules(options)
    return run_image(
        Path(options.image.removeprefix("oci:")),
        options.port,
        chosen_report(options),
        host=options.host,
        mode=options.mode,
        name=options.tag,
        folders=folders,
        env=env,
    )


def _rules(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the variables and the folder of the serving side's rules; the server checks the files."""
    least = least_serial(options)
    if not options.rules_folder:
        return {}, {}
    folder = Path(options.rules_folder)
    from ralbuild.release.runtime_rules import MOUNTED, rules_env

    if not folder.is_dir():
        raise UsageError("is no folder", place=str(folder), hint="it holds rules.json and key.pem")
    return rules_env(least), {MOUNTED: folder}
