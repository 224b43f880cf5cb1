"""One loaded bundle, ready to answer: what the HTTP layer asks for, without HTTP."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ralbuild.contract.bundle import Bounds, Bundle, Rule, select_profile
from ralbuild.contract.places import ROUTE_HEADER
from ralbuild.contract.routes import RouteTable
from ralbuild.runtime.engine import Engine, Generation
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.prompts import Prompts
from ralbuild.runtime.requests import Ask
from ralbuild.runtime.runtime_rules import WatchedRules, texts_of
from ralbuild.runtime.sampler import Draw

MAX_ROUTE = 256
"""Characters of a route name: it is a name and not a text, and the work per request stays bounded."""

_OPEN_KINDS = frozenset({"allow", "append", "ban", "bold", "escape"})
"""Rules that let the model's own text be seen, so that its tokens may be named."""
_PRIVATE_KINDS = ("ban", "redact")
"""Rules whose literal is what must not be seen; they are shown by their place in the config."""


@dataclass(frozen=True, slots=True)
class Service:
    """The parts that one request passes through."""

    bundle: Bundle
    routes: RouteTable
    digest: str
    prompts: Prompts
    engine: Engine
    metrics: Metrics
    runtime_rules: WatchedRules | None = None

    def make_order(self, ask: Ask, route_header: str | None) -> Order:
        """Turn a request into tokens and limits; all refusals happen here, before any work.

        Raises:
            ApiError: 404 for another model, 422 for input limits, 400 when the context is too short or a
                rule of the serving side refuses the text.
        """
        later = self.runtime_rules.current if self.runtime_rules is not None else None
        if later is not None:
            later.admit(texts_of(ask), logprobs=ask.logprobs is not None)
        profile = select_profile(self.bundle, self.routes, self._route(ask.model, route_header))
        prompt = self.prompts.chat(ask.messages) if ask.messages else self.prompts.completion(ask.prompt)
        most = self.bundle.engine.max_seq_len
        room = most - len(prompt)
        wanted = ask.max_tokens if ask.max_tokens is not None else max(room, 1)
        if wanted > room:
            message = (
                f"the context is {most} tokens; the prompt has {len(prompt)}, and {wanted} more may come"
            )
            raise ApiError(400, "context_length_exceeded", message, param="max_tokens")
        draw = self._draw(ask, profile)
        return Order(prompt, wanted, draw, profile, ask.stops, later)

    def _draw(self, ask: Ask, profile: int) -> Draw:
        """Return how to sample: what the request wishes, within what its route imposes."""
        rules = self.bundle.profiles[profile]
        imposed, wishes = rules.sampling, ask.wishes
        if ask.logprobs is not None:
            kinds = {self.bundle.rules[number].kind for number in rules.rules}
            if hidden := sorted(kinds - _OPEN_KINDS):
                message = (
                    f"log probabilities name the model's own tokens, which this route hides ({hidden[0]})"
                )
                raise ApiError(400, "unsupported_parameter", message, param="logprobs")
        size = len(self.prompts.vocab)
        for token, _ in wishes.logit_bias:
            if token >= size:
                message = f"logit_bias: {token} is no token id; the tokenizer has {size}"
                raise ApiError(400, "invalid_value", message, param="logit_bias")
        bias = dict(wishes.logit_bias) | {item.token: item.bias for item in imposed.logit_bias}
        seed = imposed.seed if imposed.seed is not None else wishes.seed
        return Draw(
            temperature=_within(imposed.temperature, wishes.temperature, 1.0),
            top_k=_top_k(imposed.top_k, wishes.top_k),
            # A nucleus of no mass still holds the most likely token.
            top_p=_within(imposed.top_p, wishes.top_p, 1.0),
            min_p=_within(imposed.min_p, wishes.min_p, 0.0),
            repetition_penalty=_within(imposed.repetition_penalty, wishes.repetition_penalty, 1.0),
            presence_penalty=_within(imposed.presence_penalty, wishes.presence_penalty, 0.0),
            frequency_penalty=_within(imposed.frequency_penalty, wishes.frequency_penalty, 0.0),
            seed=(seed if seed is not None else secrets.randbits(64)) % (1 << 64),
            logit_bias=tuple(sorted(bias.items())),
            logprobs=ask.logprobs,
        )

    def submit(self, order: Order, sink: Callable[[Piece], None]) -> Generation:
        """Queue an order; raises ApiError 429 when the queue is full."""
        return self.engine.submit(order, sink)

    def models(self) -> dict[str, Any]:
        """Return the body of `/v1/models`."""
        return {"object": "list", "data": [self.model(self.bundle.model)]}

    def model(self, name: str) -> dict[str, Any]:
        """Return one model's object, or raise ApiError 404."""
        self._route(name, None)
        return {"id": name, "object": "model", "created": 0, "owned_by": "ralbuild"}

    def info(self) -> dict[str, Any]:
        """Return the body of `/ral/info`: what was compiled in and how often each rule matched."""
        bundle = self.bundle
        counts = self.metrics.rule_counts
        return {
            "bundle": f"sha256:{self.digest}",
            "ralbuild": bundle.ralbuild,
            "model": bundle.model,
            "target": bundle.target,
            "engine": {
                "max_batch_size": bundle.engine.max_batch_size,
                "max_seq_len": bundle.engine.max_seq_len,
                "dtype": bundle.engine.dtype,
            },
            "patch": [step.kernel for step in bundle.patch],
            "routes": [
                {"match": route.match, "action": route.action, "priority": route.priority}
                for route in bundle.routes
            ],
            "rules": [
                {"id": number, "name": _rule_name(number, rule), "kind": rule.kind, "source": rule.source}
                | {"place": rule.place, "events": counts[number]}
                for number, rule in enumerate(bundle.rules)
            ],
            "runtime_rules": self.runtime_rules.info() if self.runtime_rules is not None else None,
        }

    def _route(self, model: str, header: str | None) -> str:
        served = self.bundle.model
        if model != served and not model.startswith(f"{served}/"):
            raise ApiError(
                404, "model_not_found", f"this server has {served!r}, not {model[:80]!r}", param="model"
            )
        route = header if header is not None else model[len(served) + 1 :]
        if len(route) > MAX_ROUTE:
            message = f"a route has at most {MAX_ROUTE} characters, this one {len(route)}"
            raise ApiError(400, "route_too_long", message, param=ROUTE_HEADER)
        return route


def _rule_name(number: int, rule: Rule) -> str:
    # The number tells apart what one line, or a built-in list, brings along.
    return f"{rule.kind}@{rule.place}#{number}" if rule.kind in _PRIVATE_KINDS else f"{rule.kind}:{rule.text}"


def _within(bounds: Bounds | None, wish: float | None, default: float) -> float:
    """Return the wish, or else the default, moved into the bounds."""
    value = default if wish is None else wish
    return bounds.clamp(value) if bounds is not None else value


def _top_k(bounds: Bounds | None, wish: int | None) -> int:
    """Return tokens to keep, 0 for all: "all" is the largest number there is, not the smallest."""
    kept = bounds.clamp(wish or math.inf) if bounds is not None else (wish or math.inf)
    return 0 if kept == math.inf else int(kept)
