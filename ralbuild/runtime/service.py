"""One loaded bundle, ready to answer: what the HTTP layer asks for, without HTTP."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ralbuild.contract.bundle import Bounds, Bundle, Rule, select_profile
from ralbuild.contract.places import INPUT_LENGTH_HEADER
from ralbuild.contract.routes import RouteTable
from ralbuild.runtime.engine import Engine, Generation
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.prompts import Prompts
from ralbuild.runtime.requests import Ask, find_route, parse_chat, parse_completion
from ralbuild.runtime.runtime_rules import RuleSet, read_rule_set, texts_of
from ralbuild.runtime.sampler import Draw

_OPEN_KINDS = frozenset({"allow", "append", "ban", "bold", "escape"})
"""Rules that let the model's own text be seen, so that its tokens may be named."""
_PRIVATE_KINDS = ("ban", "redact")
"""Rules whose literal is what must not be seen; they are shown by their place in the config."""


@dataclass(slots=True)
class Service:
    """The parts that one request passes through."""

    bundle: Bundle
    routes: RouteTable
    digest: str
    prompts: Prompts
    engine: Engine
    metrics: Metrics

    def build_rules(self, payload: bytes) -> RuleSet:
        """Return the rules of a signed payload, ready to run; a large one takes seconds."""
        return read_rule_set(payload, self.metrics)

    def make_order(self, ask: Ask, route_header: str | None, later: RuleSet | None = None) -> Order:
        """Turn a request into tokens and limits; all refusals happen here, before any work.

        Args:
            ask: what is asked.
            route_header: None without.
            later: rules of the serving side, which follow the image's.

        Raises:
            ApiError: 404 for another model, 422 for input limits, 400 when the context is too short or a
                rule of the serving side refuses the text.
        """
        if later is not None:
            later.admit(texts_of(ask), logprobs=ask.logprobs is not None)
        profile = select_profile(
            self.bundle, self.routes, find_route(self.bundle.model, ask.model, route_header)
        )
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

    def accept(
        self, message: Mapping[str, Any], body: bytes, later: RuleSet | None
    ) -> tuple[dict[str, Any], list[Order]]:
        """Check a request as it arrived; return what its answer begins with, and an order for each choice.

        Args:
            message: ``chat``, ``route`` and ``length`` (the headers, None without).
            body: the JSON of the request.
            later: rules of the serving side; None without.

        Raises:
            ApiError: whatever can be refused, before any work.
        """
        ask = (parse_chat if message["chat"] else parse_completion)(body)
        _check_input_length(message["length"], ask)
        order = self.make_order(ask, message["route"], later)
        accepted = {
            "model": ask.model,
            "profile": self.bundle.profiles[order.profile].name,
            "prompt_tokens": len(order.prompt),
            "choices": ask.choices,
            "stream": ask.stream,
            "include_usage": ask.include_usage,
            "logprobs": ask.logprobs is not None,
        }
        # Choice i is what a request alone with the i-th seed after this one gets.
        seeds = [(order.draw.seed + choice) % (1 << 64) for choice in range(ask.choices)]
        return accepted, [replace(order, draw=replace(order.draw, seed=seed)) for seed in seeds]

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

    def info(self) -> dict[str, Any]:
        """Return the body of `/ral/info`; the supervisor adds matches and the rules of the serving side."""
        bundle = self.bundle
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
                | {"place": rule.place}
                for number, rule in enumerate(bundle.rules)
            ],
        }


def _check_input_length(header: str | None, ask: Ask) -> None:
    """A gateway that measured the input says so: a difference means that text was lost on the way."""
    if header is not None and header.strip() != str(ask.input_length):
        said = header.strip()[:32]
        message = f"{INPUT_LENGTH_HEADER} says {said!r}, the texts have {ask.input_length} characters"
        raise ApiError(422, "input_length_mismatch", message, extra={"measured": ask.input_length})


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
