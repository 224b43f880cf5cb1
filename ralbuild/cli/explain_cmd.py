"""`ralbuild explain`."""

from __future__ import annotations

import argparse
import json
import re

from ralbuild.cli.options import add_config_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_option(parser)
    parser.add_argument("--route", default="", help="a route name, such as finance.retail")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the profile of a route and its rules in the order of precedence."""
    from ralbuild.config.load import load_config
    from ralbuild.contract.codec import to_plain
    from ralbuild.fold.rules import collect_rules

    rule_set = collect_rules(load_config(options.config))
    matched = [route for route in rule_set.routes if re.fullmatch(route.match, options.route)]
    profile = rule_set.profiles[matched[0].profile if matched else 0]
    rules = [rule_set.rules[number] for number in profile.rules]
    if options.json:
        answer = {"route": options.route, "matches": matched, "profile": profile, "rules": rules}
        print(json.dumps(to_plain(answer), indent=2))
        return 0
    if matched:
        taken = matched[0]
        print(f"route {options.route!r} matches {taken.match!r} (priority {taken.priority}): {taken.action}")
        for other in matched[1:]:
            print(f"  also matches {other.match!r} (priority {other.priority}), which comes later")
    else:
        print(f"route {options.route!r} matches no rule: the default applies")
    for rule in sorted(rules, key=lambda rule: rule.kind != "redact"):
        print(f"  {rule.kind:<8} {rule.text!r:<40} {rule.source}, {rule.place}")
    return 0
