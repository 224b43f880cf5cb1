"""`ralbuild explain`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ralbuild.cli.options import add_config_option

if TYPE_CHECKING:
    from ralbuild.config.load import LoadedConfig
    from ralbuild.contract.bundle import Profile, Route, Rule
    from ralbuild.fold.rules import RuleSet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_config_option(parser)
    parser.add_argument("--route", default="", help="a route name, such as finance.retail")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the profile of a route, its rules in the order of precedence, and routes that overlap."""
    from ralbuild.config.load import load_config
    from ralbuild.contract.codec import to_plain
    from ralbuild.fold.folding import route_patterns
    from ralbuild.fold.input_rules import input_limits
    from ralbuild.fold.plan_text import limit_text, overlap_lines
    from ralbuild.fold.rules import collect_rules

    loaded = load_config(options.config)
    rule_set = collect_rules(loaded)
    patterns = route_patterns(loaded, rule_set)
    matched = [rule_set.routes[number] for number in patterns.matching(options.route)]
    profile = rule_set.profiles[matched[0].profile if matched else 0]
    rules = [rule_set.rules[number] for number in profile.rules]
    overlaps, limits = patterns.overlaps(), input_limits(loaded)
    if options.json:
        answer = {
            "route": options.route,
            "matches": matched,
            "profile": profile,
            "rules": rules,
            "input_rules": [rule_set.rules[n] for n in rule_set.profiles[rule_set.input_profile].rules],
            "input_limits": limits,
            "overlaps": overlaps.found,
            "overlaps_complete": overlaps.complete,
        }
        print(json.dumps(to_plain(answer), indent=2))
        return 0
    _print_route(options.route, matched)
    _print_profile(loaded, profile, rules)
    _print_input(rule_set)
    for limit in limits:
        print(f"  input    {limit_text(limit)}  {limit.name}")
    for line in overlap_lines(loaded.path.name, rule_set.routes, overlaps):
        print(line)
    return 0


def _print_route(name: str, matched: list[Route]) -> None:
    if not matched:
        print(f"route {name or '(none)'} matches no rule: the default applies")
        return
    taken = matched[0]
    print(f"route {name} matches {taken.match} (priority {taken.priority}): {taken.action}")
    for other in matched[1:]:
        print(f"  also matches {other.match} (priority {other.priority}), which comes later")


def _print_profile(loaded: LoadedConfig, profile: Profile, rules: list[Rule]) -> None:
    for line in profile.sampling.lines():
        print(f"  sampling {line}, whatever the request says")
    action = loaded.actions.get(profile.name)
    for bias in action.sampling.logit_bias if action else ():
        token = f"token {bias.id}" if bias.text is None else json.dumps(bias.text, ensure_ascii=False)
        print(f"  sampling logit_bias {bias.bias:+g} for {token}, whatever the request says")
    for rule in sorted(rules, key=lambda rule: rule.kind != "redact"):
        print(_rule_line(rule.kind, rule))


def _print_input(rule_set: RuleSet) -> None:
    for number in rule_set.profiles[rule_set.input_profile].rules:
        print(_rule_line("input", rule_set.rules[number]))


def _rule_line(kind: str, rule: Rule) -> str:
    return f"  {kind:<8} {json.dumps(rule.text, ensure_ascii=False):<40} {rule.source}, {rule.place}"
