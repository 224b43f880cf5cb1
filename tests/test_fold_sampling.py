"""What a route imposes on sampling: from the config's text over the bundle to a request's draw."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ralbuild.config.load import LoadedConfig, load_config
from ralbuild.contract.bundle import Bounds, Profile, Route, Sampling, TokenBias
from ralbuild.contract.codec import from_plain, parse_json, to_plain
from ralbuild.contract.routes import read_routes
from ralbuild.errors import CompileError, ConfigError
from ralbuild.fold.folding import fold
from ralbuild.fold.routes import RoutePatterns
from ralbuild.fold.rules import collect_rules
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.requests import parse_chat
from ralbuild.runtime.service import Service

TOKENS = [bytes([byte]) for byte in range(256)] + [b" yes", b" yes", b"no", b""]


def config(tmp_path: Path, action: str) -> LoadedConfig:
    path = tmp_path / "c.yaml"
    path.write_text(
        'version: "0.3"\nmodel: m\nrouting: {rules: [{match: a, action: act}]}\n'
        f"actions:\n  act:\n    {action}\n"
    )
    return load_config(path)


def profile_of(loaded: LoadedConfig) -> Profile:
    return fold(loaded, TOKENS).rule_set.profiles[1]


def test_numbers_are_imposed_and_ranges_bound(tmp_path: Path) -> None:
    found = profile_of(
        config(
            tmp_path,
            "sampling: {temperature: {max: 0.7}, top_k: 40, min_p: {min: 0.05}, seed: -3, presence_penalty: 0.5,"
            ' logit_bias: [{text: " yes", bias: 2}, {id: 258, bias: -100}]}',
        )
    ).sampling
    assert found == Sampling(
        temperature=Bounds(0.0, 0.7),
        top_k=Bounds(40.0, 40.0),
        min_p=Bounds(0.05, 1.0),
        presence_penalty=Bounds(0.5, 0.5),
        seed=-3,
        logit_bias=(TokenBias(256, 2.0), TokenBias(257, 2.0), TokenBias(258, -100.0)),
    )
    again = from_plain(Sampling, parse_json(json.dumps(to_plain(found)), "t"), "t")
    assert again == found
    assert profile_of(config(tmp_path, "sampling: {greedy: true}")).sampling.temperature == Bounds(0.0, 0.0)


@pytest.mark.parametrize(
    ("action", "place", "wording"),
    [
        ("sampling: {temperature: 2.5}", "6:29", "needs a number from 0 to 2, found 2.5"),
        ("sampling: {temperature: hot}", "6:29", "needs a number, or a mapping with 'min', 'max' or both"),
        ("sampling: {top_k: {min: 1.5}}", "6:23", "needs a whole number, found 1.5"),
        ("sampling: {min_p: {mni: 0.1}}", "6:24", "unknown key 'mni' (did you mean 'min'?)"),
        ("sampling: {top_p: {min: 0.9, max: 0.1}}", "6:23", "needs 'min' of at most 'max'"),
        ("sampling: {greedy: true, temperature: 1}", "6:15", "'greedy' (which is temperature 0)"),
        ("sampling: {logit_bias: [{bias: 1}]}", "6:29", "needs exactly one of 'text' and 'id'"),
        ("allow: {}", "6:12", "needs 'texts', 'characters' or both"),
        ("allow: {characters: 'a]b'}", "6:25", "needs the inside of a character class"),
        ("allow: {characters: 'z-a'}", "6:25", "bad character range"),
        ("sampling: {logit_bias: [{id: 999, bias: 1}]}", "6:29", "id 999 is no token: the tokenizer has 260"),
        ("sampling: {logit_bias: [{text: 'nope', bias: 1}]}", "6:29", "'nope' is not one token"),
        ("sampling: {logit_bias: [{id: 258, bias: 1}, {text: 'no', bias: 1}]}", "6:49", "has a bias already"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_at_its_place(tmp_path: Path, action: str, place: str, wording: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fold(config(tmp_path, action), TOKENS)
    (problem,) = caught.value.problems
    assert wording in problem.message
    assert problem.place == f"c.yaml:{place}"


def test_an_allowed_text_must_be_writable_and_not_banned(tmp_path: Path) -> None:
    allowed = config(tmp_path, "allow: {texts: ['né', 'x']}")
    assert [rule.kind for rule in collect_rules(allowed).rules] == ["allow", "allow"]
    fold(allowed, TOKENS)
    with pytest.raises(CompileError, match="no token for a byte of 'né'"):
        fold(allowed, [token for token in TOKENS if token != b"\xc3"])
    with pytest.raises(CompileError, match="allows 'maybe no' and bans it"):
        fold(config(tmp_path, "{allow: {texts: ['maybe no']}, ban: ['NO']}"), TOKENS)


def service(sampling: Sampling, kind: str = "bold") -> Service:
    bundle: Any = SimpleNamespace(
        model="m",
        routes=(Route("a", "act", 1, 1),),
        profiles=(Profile("default", (), Sampling()), Profile("act", (0,), sampling)),
        rules=(SimpleNamespace(kind=kind),),
        engine=SimpleNamespace(max_seq_len=100),
    )
    prompts: Any = SimpleNamespace(chat=lambda _: (1, 2), vocab=TOKENS)
    routes = read_routes(RoutePatterns(["a"]).table(), "routes", 1)
    return Service(bundle, routes, "", prompts, None, None)  # type: ignore[arg-type]


def draw_of(route: str, sampling: Sampling, kind: str = "bold", **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return service(sampling, kind).make_order(parse_chat(json.dumps(body).encode()), route).draw


def test_a_route_moves_wishes_into_its_bounds_and_leaves_others_alone() -> None:
    imposed = Sampling(
        temperature=Bounds(0.2, 0.7),
        top_k=Bounds(0, 50),
        frequency_penalty=Bounds(1, 1),
        seed=9,
        logit_bias=(TokenBias(5, 1.0),),
    )
    wishes = {
        "temperature": 1.5,
        "frequency_penalty": -1,
        "seed": 4,
        "min_p": 0.1,
        "logit_bias": {"5": -9, "6": 2},
    }
    bound = draw_of("a", imposed, **wishes)
    assert (bound.temperature, bound.top_k, bound.frequency_penalty, bound.seed) == (0.7, 50, 1, 9)
    assert (bound.min_p, bound.logit_bias) == (0.1, ((5, 1.0), (6, 2.0)))
    assert draw_of("a", imposed, temperature=0).temperature == 0.2
    assert draw_of("a", imposed, top_k=7).top_k == 7
    assert draw_of("a", Sampling(top_k=Bounds(10, 1_000_000)), top_k=3).top_k == 10
    free = draw_of("b", imposed, **wishes)
    assert (free.temperature, free.top_k, free.frequency_penalty, free.seed) == (1.5, 0, -1, 4)
    assert draw_of("b", imposed).seed != draw_of("b", imposed).seed


def test_log_probabilities_are_refused_where_a_rule_hides_text_and_ids_must_be_tokens() -> None:
    assert draw_of("a", Sampling(), "ban", logprobs=True).logprobs == 0
    for kind in ("redact", "a kind of tomorrow"):
        with pytest.raises(ApiError) as caught:
            draw_of("a", Sampling(), kind, logprobs=True)
        assert (caught.value.status, caught.value.param) == (400, "logprobs")
    with pytest.raises(ApiError) as caught:
        draw_of("b", Sampling(), logit_bias={"260": 1})
    assert (caught.value.status, caught.value.param) == (400, "logit_bias")
