"""Options that several verbs share, and the report they choose."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.errors import UsageError
from ralbuild.report import Report, make_report

if TYPE_CHECKING:
    from ralbuild.checking import Checks
    from ralbuild.image.bases import BaseSource
    from ralbuild.image.registry.connect import RegistryOptions
    from ralbuild.pipeline.request import BuildRequest
    from ralbuild.signing import PrivateKey
    from ralbuild.supply.runtime_rules import Checked


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
    from ralbuild.checking import Checks
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


def build_request(
    options: argparse.Namespace, base: BaseSource | None = None, registry: RegistryOptions | None = None
) -> BuildRequest:
    """Return the request that the options of `add_build_options` describe."""
    from ralbuild.image.registry.connect import RegistryOptions
    from ralbuild.pipeline.request import BuildRequest

    return BuildRequest(
        model=options.model,
        config=options.config,
        target=options.target,
        archs=tuple(options.arch) if options.arch else None,
        cache_dir=options.cache,
        base=base,
        registry=registry or RegistryOptions(),
        checks=chosen_checks(options),
        check_repro=getattr(options, "check_repro", False),
        ignored_secrets=tuple(getattr(options, "ignore_secret", ())),
        simulate=getattr(options, "simulate", False),
        volume=getattr(options, "weights", "") == "volume",
        modelpack=getattr(options, "modelpack", False),
    )


def add_base_option(parser: argparse.ArgumentParser) -> None:
    """Add --base."""
    parser.add_argument(
        "--base",
        metavar="IMAGE",
        help="image to build on, oci:DIR or HOST/NAME@sha256:DIGEST; default: the embedded base",
    )


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


def add_rules_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add the options that name a signed file of the serving side's rules, and its key."""
    parser.add_argument("--runtime-rules", type=Path, metavar="FILE", help=purpose)
    parser.add_argument("--rules-key", type=Path, metavar="PUB", help="public key that must have signed it")


def add_rules_folder_options(parser: argparse._ActionsContainer) -> None:
    """Add where a server finds rules of the serving side, and how old they may be."""
    parser.add_argument(
        "--rules-folder", default="", metavar="DIR", help="rules.json and key.pem of the serving side"
    )
    parser.add_argument(
        "--rules-least", type=int, default=0, metavar="SERIAL", help="start with no older rules; default: 0"
    )


def least_serial(options: argparse.Namespace) -> int:
    """Return --rules-least; raises UsageError for what is no serial, or without rules."""
    least: int = options.rules_least
    if not 0 <= least < 1 << 53:
        raise UsageError(f"needs 0 to {(1 << 53) - 1}, found {least}", place="--rules-least")
    if least and not (options.rules_folder or getattr(options, "rules_configmap", "")):
        raise UsageError("is for rules of the serving side, and there are none", place="--rules-least")
    return least


def signed_rules(options: argparse.Namespace) -> Checked | None:
    """Return the file that the options name, when its signature holds; None when they name none."""
    if (options.runtime_rules is None) != (options.rules_key is None):
        missing = "--rules-key" if options.rules_key is None else "--runtime-rules"
        raise UsageError("is missing: a file of rules needs the key that signed it", place=missing)
    if options.runtime_rules is None:
        return None
    from ralbuild.signing import load_public_key
    from ralbuild.supply.runtime_rules import open_signed

    return open_signed(options.runtime_rules, load_public_key(options.rules_key))


def stored_path(text: str) -> Path:
    """Return the folder or file that ``oci:DIR``, ``archive:FILE`` or a bare path names."""
    return Path(text.removeprefix("oci:").removeprefix("archive:"))


def layout_path(text: str, place: str) -> Path:
    """Return the folder that ``oci:DIR`` names, or raise UsageError."""
    if not text.startswith("oci:") or text == "oci:":
        raise UsageError(f"needs oci:DIR, found {text!r}", place=place, hint="an OCI image layout folder")
    return Path(text.removeprefix("oci:"))


def chosen_base(options: argparse.Namespace) -> BaseSource | None:
    """Return the base that --base names, or None for the embedded one."""
    from ralbuild.image.bases import parse_base

    return parse_base(options.base) if options.base is not None else None


def add_registry_options(parser: argparse.ArgumentParser) -> None:
    """Add how to speak with registries."""
    group = parser.add_argument_group("registries")
    group.add_argument(
        "--registry-profile",
        default="",
        metavar="NAME",
        help="what the registry takes: generic, docker-hub, ghcr, ecr, gar, acr, harbor, ...",
    )
    group.add_argument(
        "--insecure-registry", action="store_true", help="allow plain HTTP to other machines than this one"
    )
    group.add_argument("--registry-ca", type=Path, metavar="FILE", help="trust a PEM file's certificates too")
    group.add_argument(
        "--chunk-size", metavar="SIZE", help="send blobs in chunks of SIZE (64MB), for proxies with a limit"
    )
    group.add_argument("--push-jobs", type=int, default=4, metavar="N", help="blobs sent at once; default: 4")


def registry_options(options: argparse.Namespace) -> RegistryOptions:
    """Return what the options of `add_registry_options` say.

    Raises:
        UsageError: for a number that makes no sense.
    """
    from ralbuild.image.registry.connect import RegistryOptions

    if not 1 <= options.push_jobs <= 64:
        raise UsageError(f"needs 1 to 64, found {options.push_jobs}", place="--push-jobs")
    return RegistryOptions(
        profile=options.registry_profile,
        insecure=options.insecure_registry,
        ca_file=options.registry_ca,
        chunk_size=parse_size(options.chunk_size, "--chunk-size") if options.chunk_size else 0,
        jobs=options.push_jobs,
    )


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str, place: str) -> int:
    """Return the bytes that ``5GB``, ``512MiB`` or ``1000`` mean.

    Raises:
        UsageError: naming the option ``place``.
    """
    match = re.fullmatch(r"([0-9]{1,18})\s*([A-Za-z]{0,3})", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise UsageError(f"needs a size such as 5GB or 512MiB, found {text!r}", place=place)
    return int(match[1]) * unit
