"""`ralbuild rules`: compile and check the signed rules of the serving side."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ralbuild.cli.options import add_key_option, signing_key
from ralbuild.errors import UsageError

if TYPE_CHECKING:
    from ralbuild.supply.runtime_rules import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    verbs = parser.add_subparsers(title="commands", dest="what", metavar="COMMAND", required=True)
    build = verbs.add_parser("compile", help="compile and sign a file of rules")
    build.add_argument("rules", type=Path, metavar="FILE", help="such as runtime-rules.yaml")
    add_key_option(build, "--key", "P-256 private key (PEM)", required=True)
    build.add_argument("--out", type=Path, required=True, metavar="FILE", help="the signed file")
    build.add_argument("--json", action="store_true", help="print JSON instead of the digest")
    check = verbs.add_parser("check", help="check a signed file and show what it does")
    check.add_argument("rules", type=Path, metavar="FILE", help="what `rules compile` wrote")
    check.add_argument(
        "--key", type=Path, required=True, metavar="PUB", help="public key that must have signed it"
    )
    check.add_argument(
        "--text", type=Path, metavar="FILE", help="apply it to a text and print what comes out"
    )
    check.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run one of the commands."""
    return _compile(options) if options.what == "compile" else _check(options)


def _compile(options: argparse.Namespace) -> int:
    from ralbuild.config.runtime_rules import load_runtime_rules
    from ralbuild.fold.runtime_rules import fold_runtime_rules
    from ralbuild.supply.runtime_rules import publish

    for source in (options.rules, options.sign_key):
        if options.out.exists() and source.exists() and options.out.samefile(source):
            raise UsageError(f"would replace {source}, which it is made from", place="--out")
    loaded = load_runtime_rules(options.rules)
    key = signing_key(options)
    assert key is not None  # the option is required
    folded = fold_runtime_rules(loaded)
    digest = publish(folded.rules, key, options.out)
    facts = {
        "sha256": digest,
        "serial": folded.rules.serial,
        "rules": len(folded.rules.rules),
        "states": folded.size.states,
        "held_bytes": folded.size.max_held,
    }
    print(json.dumps(facts) if options.json else f"sha256:{digest}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from ralbuild.signing import load_public_key
    from ralbuild.supply.runtime_rules import open_signed

    checked = open_signed(options.rules, load_public_key(options.key))
    if options.text is not None:
        print(_applied(checked, options.text), end="")
        return 0
    print(json.dumps(_facts(checked), indent=2) if options.json else "\n".join(_lines(checked)))
    return 0


def _applied(checked: Checked, path: Path) -> str:
    from ralbuild.contract.runtime_rules import OUTPUT

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", place=str(path)) from None
    out, _ = checked.machine.rewrite(OUTPUT, data)
    return out.decode("utf-8", "replace")


def _facts(checked: Checked) -> dict[str, Any]:
    from ralbuild.contract.codec import to_plain

    rules = checked.rules
    return {
        "sha256": checked.sha256,
        "serial": rules.serial,
        "key": checked.key,
        "held_bytes": checked.machine.table.max_held,
        "rules": to_plain(rules.rules),
    }


def _lines(checked: Checked) -> Iterator[str]:
    from ralbuild.cli import text

    columns, rules = text.width(), checked.rules
    facts = [
        ("serial", str(rules.serial)),
        ("signed by", checked.key[:16]),
        ("payload", text.digest(f"sha256:{checked.sha256}", columns)),
        ("held back", f"at most {checked.machine.table.max_held} bytes"),
    ]
    yield from text.rows(facts, columns, 0)
    yield from ("", f"rules ({len(rules.rules)})")
    for rule in rules.rules:
        yield text.cut(f"  {rule.kind:<8} {rule.text!r}  {rule.place}", columns)
