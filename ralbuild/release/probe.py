"""Synthetic transactions against a running server: what a release gate and a cron job ask.

Each probe is one short conversation with a known outcome. None of them needs anything but HTTP, so
they can be run against a container, a colour behind a proxy, or a service in a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ralbuild.config.probes import Golden, Guardrail, ProbeSuite
from ralbuild.contract.places import INPUT_LENGTH_HEADER, ROUTE_HEADER
from ralbuild.release.service_client import Answer, Events, NoAnswerError, ServiceClient

PATH = "/v1/chat/completions"
GREETING = "Say hello."
BODY_LIMIT = 4 << 20
"""Bytes of a request body that the server reads (docs/runtime.md)."""

KINDS = ("smoke", "identity", "golden", "guardrail", "streaming", "limits")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe's outcome: ``message`` says what was found and needed, or, when it passed, what was seen."""

    kind: str
    name: str
    ok: bool
    seconds: float
    message: str


class _FailedError(Exception):
    """A probe's expectation does not hold."""


@dataclass(frozen=True, slots=True)
class Prober:
    """Runs probes against one server.

    Attributes:
        client: reaches it.
        suite: the user's own probes.
        bundle: digest (``sha256:...``) that ``/ral/info`` must name; empty to skip that probe.
    """

    client: ServiceClient
    suite: ProbeSuite
    bundle: str = ""

    def run(self, kinds: tuple[str, ...] = KINDS) -> Iterator[ProbeResult]:
        """Yield one result per probe, in the order of `KINDS`; a server that is gone fails them all."""
        model = ""
        if "smoke" in kinds:
            yield self._timed("smoke", "health", self._health)
            yield self._timed("smoke", "ready", self._ready)
        try:
            model = self._served_model()
        except (_FailedError, NoAnswerError) as error:
            yield ProbeResult("smoke", "models", False, 0.0, str(error))
            return
        for kind, name, probe in self._probes(model):
            if kind in kinds:
                yield self._timed(kind, name, probe)

    def _probes(self, model: str) -> Iterator[tuple[str, str, Callable[[], str]]]:
        yield "smoke", "chat", lambda: self._chat_works(model)
        if self.bundle:
            yield "identity", "bundle", self._identity
        for golden in self.suite.golden:
            yield "golden", golden.name, lambda item=golden: self._golden(model, item)  # type: ignore[misc]
        for guard in self.suite.guardrails:
            yield "guardrail", guard.name, lambda item=guard: self._guardrail(model, item)  # type: ignore[misc]
        yield "streaming", "stream", lambda: self._streaming(model)
        yield "limits", "unknown-model", self._unknown_model
        yield "limits", "invalid-json", self._invalid_json
        yield "limits", "input-length", lambda: self._input_length(model)
        yield "limits", "body-size", self._body_size

    def record(self, prompts: list[str], max_tokens: int) -> tuple[Golden, ...]:
        """Ask every prompt greedily and return the answers as golden probes.

        Raises:
            NoAnswerError: when the server does not answer as it should.
        """
        try:
            model = self._served_model()
            return tuple(
                Golden(
                    name=f"golden-{number}",
                    prompt=prompt,
                    max_tokens=max_tokens,
                    text=_text_of(self._ask(model, prompt, "", max_tokens)),
                )
                for number, prompt in enumerate(prompts, 1)
            )
        except _FailedError as error:
            raise NoAnswerError(str(error)) from None

    @staticmethod
    def _timed(kind: str, name: str, probe: Callable[[], str]) -> ProbeResult:
        started = time.monotonic()
        try:
            message, ok = probe(), True
        except (_FailedError, NoAnswerError) as error:
            message, ok = str(error), False
        return ProbeResult(kind, name, ok, time.monotonic() - started, message)

    # Smoke

    def _health(self) -> str:
        _needs(self.client.get("/health").status == 200, "/health is not 200")
        return "200"

    def _ready(self) -> str:
        ready, said = self.client.ready()
        _needs(ready, f"/ready: {said}")
        return said

    def _served_model(self) -> str:
        answer = self.client.get("/v1/models")
        _needs(answer.status == 200, f"/v1/models answers {answer.status}")
        try:
            return str(answer.body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise _FailedError("/v1/models lists no model") from None

    def _chat_works(self, model: str) -> str:
        answer = self._ask(model, GREETING, "", 8)
        tokens = _usage(answer.body)
        _needs(1 <= tokens <= 8, f"usage says {tokens} completion tokens, needs 1 to 8")
        return f"{tokens} tokens"

    def _identity(self) -> str:
        answer = self.client.get("/ral/info")
        found = answer.body.get("bundle") if isinstance(answer.body, dict) else None
        _needs(found == self.bundle, f"runs the bundle {found}, needs {self.bundle}")
        return str(found)

    # The user's own

    def _golden(self, model: str, item: Golden) -> str:
        found = _text_of(self._ask(model, item.prompt, item.route, item.max_tokens))
        if found != item.text:
            at = next(
                (i for i, (a, b) in enumerate(zip(found, item.text, strict=False)) if a != b),
                min(len(found), len(item.text)),
            )
            raise _FailedError(
                f"differs at character {at}: {found[at : at + 40]!r}, needs {item.text[at : at + 40]!r}"
            )
        return f"{len(found)} characters as recorded"

    def _guardrail(self, model: str, item: Guardrail) -> str:
        answer = self._ask(model, item.prompt, item.route, item.max_tokens)
        stream = self._stream(model, item.prompt, item.route, item.max_tokens)
        for how, text in (("answer", _text_of(answer)), ("stream", _joined(stream))):
            folded = text.casefold()
            for number, needle in enumerate(item.absent):
                # The text itself is what must not be seen: it stays out of reports.
                _needs(needle.casefold() not in folded, f"the {how} holds absent[{number}]")
            for needle in item.present:
                _needs(needle in text, f"the {how} lacks {needle!r}")
        return f"{len(item.absent)} absent, {len(item.present)} present"

    # Protocol

    def _streaming(self, model: str) -> str:
        whole = _text_of(self._ask(model, GREETING, "", 24))
        stream = self._stream(model, GREETING, "", 24)
        text = _joined(stream)
        _needs(text == whole, f"the stream gives {text[:40]!r}, the answer at once {whole[:40]!r}")
        bounds = self.suite.latency
        first, total = stream.first_text_seconds, stream.seconds
        if bounds.first_text is not None and first is not None:
            _needs(first <= bounds.first_text, f"first text after {first:.2f} s, needs {bounds.first_text} s")
        if bounds.total is not None:
            _needs(total <= bounds.total, f"ended after {total:.2f} s, needs {bounds.total} s")
        return f"{total:.2f} s" if first is None else f"first text {first:.2f} s, all {total:.2f} s"

    def _unknown_model(self) -> str:
        body = _chat("no-such-model-of-ours", GREETING, 1)
        return _refusal(self.client.post(PATH, body), 404, "model_not_found")

    def _invalid_json(self) -> str:
        return _refusal(self.client.post(PATH, b'{"model": '), 400, "invalid_json")

    def _input_length(self, model: str) -> str:
        wrong = ((INPUT_LENGTH_HEADER, str(len(GREETING) + 1)),)
        answer = self.client.post(PATH, _chat(model, GREETING, 1), wrong)
        return _refusal(answer, 422, "input_length_mismatch")

    def _body_size(self) -> str:
        try:
            answer = self.client.post(PATH, b" " * (BODY_LIMIT + 1))
        except NoAnswerError as error:
            # A server may answer and close before the whole body is sent.
            _needs("reset" in str(error).lower() or "pipe" in str(error).lower(), str(error))
            return "closed the connection"
        return _refusal(answer, 413, "")

    # Talking

    def _ask(self, model: str, prompt: str, route: str, max_tokens: int) -> Answer:
        answer = self.client.post(PATH, _chat(model, prompt, max_tokens), _route(route))
        _needs(answer.status == 200, f"answers {answer.status} {answer.error_code}".rstrip())
        return answer

    def _stream(self, model: str, prompt: str, route: str, max_tokens: int) -> Events:
        body = _chat(model, prompt, max_tokens) | {"stream": True}
        stream = self.client.stream(PATH, body, _route(route))
        _needs(stream.status == 200, f"the stream answers {stream.status}")
        for event in stream.events:
            if isinstance(event, dict) and "error" in event:
                raise _FailedError(f"the stream ends with an error: {str(event['error'])[:120]}")
        _needs(stream.done, "the stream ends without [DONE]: its text may be cut")
        return stream


def _chat(model: str, prompt: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _route(route: str) -> tuple[tuple[str, str], ...]:
    # http.client writes headers as Latin-1; the server reads UTF-8 where the bytes are that.
    return ((ROUTE_HEADER, route.encode().decode("latin-1")),) if route else ()


def _needs(holds: bool, message: str) -> None:
    if not holds:
        raise _FailedError(message)


def _usage(body: Any) -> int:
    try:
        return int(body["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        raise _FailedError("the answer has no usage") from None


def _text_of(answer: Answer) -> str:
    try:
        return str(answer.body["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError):
        raise _FailedError("the answer has no message") from None


def _joined(stream: Events) -> str:
    parts: list[str] = []
    finish = None
    for event in stream.events:
        try:
            choice = event["choices"][0]
            parts.append(choice["delta"].get("content") or "")
            finish = choice.get("finish_reason") or finish
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    _needs(finish is not None, "the stream has no finish_reason")
    return "".join(parts)


def _refusal(answer: Answer, status: int, code: str) -> str:
    _needs(answer.status == status, f"answers {answer.status}, needs {status}")
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    _needs(isinstance(error, dict) and bool(error.get("message")), "the error has not OpenAI's shape")
    _needs(not code or answer.error_code == code, f"the code is {answer.error_code!r}, needs {code!r}")
    return f"{status} {answer.error_code}".rstrip()
