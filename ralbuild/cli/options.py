"""Options that several verbs share, and the report they choose."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.errors import UsageError
from ralbuild.report import Report, make_report

if TYPE_CHECKING:
    from ralbuild.pipeline import BuildRequest


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add how progress is shown; it goes to standard error."""
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument(
        "--progress",
        choices=("auto", "rich", "plain", "json"),
        default="auto",
        help="how progress is shown on standard error",
    )


def chosen_report(options: argparse.Namespace) -> Report:
    """Return the report that the options ask for."""
    return make_report(options.progress, quiet=options.quiet)


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add --model."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="model folder: safetensors and tokenizer.json",
    )
    parser.add_argument(
        "--rehash", action="store_true", help="read every weight byte, whatever the cache knows"
    )


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add --config."""
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("ral-config.yaml"),
        metavar="FILE",
        help="default: ral-config.yaml",
    )


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    """Add --cache."""
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(".ral_cache"),
        metavar="DIR",
        help="compiled objects; default: .ral_cache",
    )


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Add what `compile`, `render` and `image` need to compile a model."""
    add_model_option(parser)
    add_config_option(parser)
    add_cache_option(parser)
    parser.add_argument(
        "--target", choices=("cpu", "cuda"), default="cpu", help="what it will run on; default: cpu"
    )
    parser.add_argument(
        "--arch",
        action="append",
        metavar="sm_NN",
        help="compile for this GPU instead of the config's; repeatable",
    )


def build_request(options: argparse.Namespace, base: Path | None = None) -> BuildRequest:
    """Return the request that the options of `add_build_options` describe."""
    from ralbuild.pipeline import BuildRequest

    return BuildRequest(
        model=options.model,
        config=options.config,
        target=options.target,
        archs=tuple(options.arch) if options.arch else None,
        cache_dir=options.cache,
        base=base,
        rehash=options.rehash,
        check_repro=getattr(options, "check_repro", False),
        simulate=getattr(options, "simulate", False),
    )


def add_base_option(parser: argparse.ArgumentParser) -> None:
    """Add --base."""
    parser.add_argument("--base", metavar="oci:DIR", help="base to build on; default: the embedded one")


def base_folder(options: argparse.Namespace) -> Path | None:
    """Return the layout that --base names, or None for the embedded base."""
    text: str | None = options.base
    if text is None:
        return None
    if not text.startswith("oci:"):
        hint = "give an OCI layout: --base oci:DIR, as `ralbuild base --out oci:DIR` makes"
        raise UsageError("bases from registries are not supported in this version", place="--base", hint=hint)
    return Path(text.removeprefix("oci:"))
