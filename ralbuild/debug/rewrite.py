"""The rules of one request, applied to OpenAI-shaped JSON: what the image would do, done to another server.

Bans act while a token is drawn, which nobody can do from outside: a banned phrase is reported, not removed.
"""

from __future__ import annotations

import codecs
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ralbuild.contract.bans import BANNED, BanSlot
from ralbuild.contract.bundle import CHARACTERS, RUN, TOKENS, Sampling
from ralbuild.debug.rules import Rules


class RefusedError(Exception):
    """The image would refuse the request; ``body`` is its answer in OpenAI's shape, with status 422."""

    def __init__(self, message: str, extra: dict[str, object]) -> None:
        super().__init__(message)
        error = {"message": message, "type": "invalid_request_error", "code": "input_too_long", "param": None}
        self.body = {"error": error | extra}


class Choice:
    """One text of an answer, as it comes.

    Attributes:
        before, after: what the server sent so far, and what the rules make of it.
        done: the text has ended.
    """

    def __init__(self, rules: Rules, profile: int, counts: Counter[int], *, observed: bool) -> None:
        self.before = ""
        self.after = ""
        self.done = False
        self._rules = rules
        self._profile = profile
        self._counts = counts
        self._observed = observed
        self._slot = rules.machine.start(profile)
        self._bans = BanSlot(rules.bans, profile)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, text: str, *, end: bool) -> str:
        """Return what a client gets for a further piece of the text; ``end`` decides what is held."""
        data = text.encode("utf-8", "replace")
        out = self._slot.feed(data) + (self._slot.finish() if end else b"")
        self._watch(data)
        self._counts.update(self._slot.events)
        self._slot.events.clear()
        shown = self._decoder.decode(out, end)
        self.before += text
        self.after += shown
        self.done = self.done or end
        return text if self._observed else shown

    def _watch(self, data: bytes) -> None:
        for byte in data:
            if self._bans.step(bytes([byte])) != BANNED:
                self._bans.advance(bytes([byte]))
                continue
            self._bans = BanSlot(self._rules.bans, self._profile)
            self._counts[-1] += 1


@dataclass(slots=True)
class Exchange:
    """One request and its answer.

    Attributes:
        rules, route, profile: what applies.
        observed: report only; the client gets what the server sent.
        counts: matches by rule id; -1 counts phrases that a ban would have refused.
        changes: what became of the request: text rewritten, sampling imposed.
    """

    rules: Rules
    route: str
    profile: int
    observed: bool
    counts: Counter[int] = field(default_factory=Counter)
    changes: list[str] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request as the server gets it.

        Raises:
            RefusedError: when the image would refuse it for its length.
        """
        texts = _texts(body)
        self._check(texts)
        out: dict[str, Any] = json.loads(json.dumps(body))
        for holder, key in _holders(out):
            data, events = self.rules.machine.rewrite(
                self.rules.folded.rule_set.input_profile, holder[key].encode("utf-8", "replace")
            )
            self.counts.update(events)
            holder[key] = data.decode("utf-8", "replace")
        if _texts(out) != texts:
            self.changes.append("input rewritten")
        profile = self.rules.folded.rule_set.profiles[self.profile]
        for name, value in _imposed(profile.sampling, body):
            if body.get(name) != value:
                self.changes.append(f"{name} {body.get(name)} -> {value}")
                out[name] = value
        return body if self.observed else out

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer with every choice rewritten."""
        for item in _choices(body):
            holder, key = _answer_text(item, "message")
            if holder is not None:
                holder[key] = self._choice(item).feed(holder[key], end=True)
        return body

    def chunk(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return one chunk of a stream with every piece rewritten."""
        for item in _choices(body):
            ends = item.get("finish_reason") is not None
            holder, key = _answer_text(item, "delta")
            choice = self._choice(item)
            if holder is None and ends and not choice.done:
                holder, key = (item, "text") if "delta" not in item else (_delta(item), "content")
                holder[key] = ""
            if holder is not None:
                # What comes after the end was not seen by the rules: no client may see it.
                holder[key] = "" if choice.done else choice.feed(holder[key], end=ends)
        return body

    def rest(self, last: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Return chunks with what is still held, for a stream that ended without saying so."""
        out = []
        for index, choice in self.choices.items():
            if choice.done or last is None:
                continue
            text = choice.feed("", end=True)
            chat = any("delta" in item for item in _choices(last))
            item = {"index": index, "finish_reason": None} | (
                {"delta": {"content": text}} if chat else {"text": text}
            )
            if text:
                out.append({**last, "choices": [item]})
        return out

    def report(self, *, show_text: bool) -> dict[str, Any]:
        """Return what the rules did, as JSON holds it; texts only on request, for they may be secret."""
        rule_set = self.rules.folded.rule_set
        matched = []
        for number, count in sorted(self.counts.items()):
            if number >= 0:
                rule = rule_set.rules[number]
                place = self.rules.place(rule)
                matched.append(
                    {"id": number, "kind": rule.kind, "text": rule.text, "place": place, "count": count}
                )
        answer: dict[str, Any] = {
            "route": self.route,
            "profile": rule_set.profiles[self.profile].name,
            "request": self.changes,
            "rules": matched,
            "bans_that_would_refuse": self.counts[-1],
            "changed": any(choice.before != choice.after for choice in self.choices.values()),
        }
        if show_text:
            answer["choices"] = [
                {"index": index, "before": choice.before, "after": choice.after}
                for index, choice in sorted(self.choices.items())
            ]
        return answer

    def _choice(self, item: dict[str, Any]) -> Choice:
        index = item.get("index")
        key = index if isinstance(index, int) else 0
        if key not in self.choices:
            self.choices[key] = Choice(self.rules, self.profile, self.counts, observed=self.observed)
        return self.choices[key]

    def _check(self, texts: list[str]) -> None:
        encode = self.rules.encode
        measured = {
            RUN: max((len(word) for text in texts for word in text.split()), default=0),
            CHARACTERS: sum(map(len, texts)),
            # The template's own tokens are not known here: a lower bound.
            TOKENS: sum(len(encode(text)) for text in texts) if encode is not None else 0,
        }
        for limit in self.rules.folded.input_limits:
            if (found := measured[limit.unit]) > limit.max_length:
                accepts = f"{limit.max_length} ({limit.unit})"
                message = f"token filter {limit.name!r} accepts at most {accepts}; found {found}"
                self.changes.append(f"refused: {message}")
                if not self.observed:
                    raise RefusedError(message, {"measured": found, "allowed": limit.max_length})


def route_of(body: dict[str, Any], header: str | None, served: str) -> tuple[str, str | None]:
    """Return the route of a request, and the model's name without it where the name holds one."""
    model = body.get("model")
    if header is not None:
        return header, None
    if isinstance(model, str) and model.startswith(f"{served}/"):
        return model[len(served) + 1 :], served
    return "", None


def _holders(body: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield where a request's texts stand, as container and key."""
    for message in _items(body.get("messages")):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield message, "content"
        for part in _items(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part, "text"
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield body, "prompt"
    for number, item in enumerate(_items(prompt)):
        if isinstance(item, str):
            yield prompt, number


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(body: dict[str, Any]) -> list[str]:
    return [holder[key] for holder, key in _holders(body)]


def _choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    choices = body.get("choices")
    return [item for item in choices if isinstance(item, dict)] if isinstance(choices, list) else []


def _delta(item: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("delta"), dict):
        item["delta"] = {}
    found: dict[str, Any] = item["delta"]
    return found


def _answer_text(item: dict[str, Any], name: str) -> tuple[dict[str, Any] | None, str]:
    """Return where a choice's text stands: in its message or delta, or in itself."""
    inner = item.get(name)
    if isinstance(inner, dict) and isinstance(inner.get("content"), str):
        return inner, "content"
    return (item, "text") if isinstance(item.get("text"), str) else (None, "")


_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
"""What a request that does not say it asks for; 0 for all other values."""


def _imposed(sampling: Sampling, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sampling values that the image would use instead of the request's; bad ones stay."""
    for name, bounds in sampling.bounded:
        asked = body.get(name)
        value = _NEUTRAL.get(name, 0.0) if asked is None else asked
        if not isinstance(value, int | float):
            continue
        if name == "top_k" and value <= 0:  # all tokens
            value = math.inf
        within = bounds.clamp(value)
        if within != value:
            yield name, int(within) if name == "top_k" else within
    if sampling.seed is not None:
        yield "seed", sampling.seed
    asked = body.get("logit_bias")
    if sampling.logit_bias and (asked is None or isinstance(asked, dict)):
        yield "logit_bias", {**(asked or {}), **{str(item.token): item.bias for item in sampling.logit_bias}}
