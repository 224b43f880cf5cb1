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

    loaded = load_config(options.config)
    rule_set = collect_rules(loaded)
    matched = [route for route in rule_set.routes if re.fullmatch(route.match, options.route)]
    profile = rule_set.profiles[matched[0].profile if matched else 0]
    rules = [rule_set.rules[number] for number in profile.rules]
    if options.json:
        answer = {"route": options.route, "matches": matched, "profile": profile, "rules": rules}
        print(json.dumps(to_plain(answer), indent=2))
        return 0
    if matched:
        taken = matched[0]
        print(f"route {options.route} matches {taken.match} (priority {taken.priority}): {taken.action}")
        for other in matched[1:]:
            print(f"  also matches {other.match} (priority {other.priority}), which comes later")
    else:
        print(f"route {options.route or '(none)'} matches no rule: the default applies")
    for line in profile.sampling.lines():
        print(f"  sampling {line}, whatever the request says")
    action = loaded.actions.get(profile.name)
    for bias in action.sampling.logit_bias if action else ():
        token = f"token {bias.id}" if bias.text is None else json.dumps(bias.text, ensure_ascii=False)
        print(f"  sampling logit_bias {bias.bias:+g} for {token}, whatever the request says")
    for rule in sorted(rules, key=lambda rule: rule.kind != "redact"):
        print(f"  {rule.kind:<8} {json.dumps(rule.text, ensure_ascii=False):<40} {rule.source}, {rule.place}")
    for number in rule_set.profiles[rule_set.input_profile].rules:
        rule = rule_set.rules[number]
        print(f"  input    {json.dumps(rule.text, ensure_ascii=False):<40} {rule.source}, {rule.place}")
    for _, name, settings in loaded.filters:
        if settings.max_length is not None:
            print(f"  input    at most {settings.max_length} characters without a space  {name}")
    return 0
