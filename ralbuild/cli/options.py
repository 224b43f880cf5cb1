"""Options that several verbs share, and the report they choose."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.errors import UsageError
from ralbuild.report import Report, make_report

if TYPE_CHECKING:
    from ralbuild.pipeline import BuildRequest, Checks
    from ralbuild.signing import PrivateKey


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


def add_model_option(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --model and how strictly it is checked."""
    parser.add_argument(
        "--model",
        type=Path,
        required=required,
        metavar="DIR",
        help="model folder: safetensors and tokenizer.json",
    )
    add_check_options(parser)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add how strictly a model folder is checked; `chosen_checks` reads it."""
    parser.add_argument(
        "--rehash", action="store_true", help="read every weight byte, whatever the cache knows"
    )
    parser.add_argument(
        "--strict", action="store_true", help="warnings about the model or a user kernel are errors"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="ID",
        help="a finding about the model that does not count; repeatable",
    )
    parser.add_argument(
        "--signature-key", type=Path, metavar="PUB.pem", help="check the model's own signature with this key"
    )


def chosen_checks(options: argparse.Namespace) -> Checks:
    """Return the checks that the options ask for.

    Raises:
        UsageError: when --ignore names no finding.
    """
    from ralbuild.pipeline import Checks
    from ralbuild.weights.rules import find_rule

    ignored: set[str] = set()
    for word in options.ignore:
        rule = find_rule(word)
        if rule is None:
            hint = "`ralbuild verify --reference` lists them all"
            raise UsageError(f"knows no finding {word!r}", place="--ignore", hint=hint)
        ignored.add(rule.id)
    return Checks(options.rehash, options.strict, frozenset(ignored), options.signature_key)


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


def add_build_options(parser: argparse.ArgumentParser, *, model_required: bool = True) -> None:
    """Add what `compile`, `render` and `image` need to compile a model."""
    add_model_option(parser, required=model_required)
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
        checks=chosen_checks(options),
        check_repro=getattr(options, "check_repro", False),
        ignored_secrets=tuple(getattr(options, "ignore_secret", ())),
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


def add_key_option(
    parser: argparse.ArgumentParser, name: str, purpose: str, *, required: bool = False
) -> None:
    """Add the option that takes a private key."""
    parser.add_argument(name, type=Path, metavar="KEY", dest="sign_key", required=required, help=purpose)


def signing_key(options: argparse.Namespace) -> PrivateKey | None:
    """Return the private key that the user names; `RALBUILD_KEY_PASSWORD` is its password."""
    if options.sign_key is None:
        return None
    from ralbuild.signing import load_private_key

    password = os.environ.get("RALBUILD_KEY_PASSWORD")
    return load_private_key(options.sign_key, password.encode() if password else None)


def stored_path(text: str) -> Path:
    """Return the folder or file that ``oci:DIR``, ``archive:FILE`` or a bare path names."""
    return Path(text.removeprefix("oci:").removeprefix("archive:"))


def layout_path(text: str, place: str) -> Path:
    """Return the folder that ``oci:DIR`` names, or raise UsageError."""
    if not text.startswith("oci:") or text == "oci:":
        raise UsageError(f"needs oci:DIR, found {text!r}", place=place, hint="an OCI image layout folder")
    return Path(text.removeprefix("oci:"))
