"""From a request's text to prompt tokens: input limits, token filters, chat template, tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ralbuild.contract.bundle import CHARACTERS, RUN, TOKENS, Bundle
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.rendering import Renderer
from ralbuild.runtime.steps import Tables
from ralbuild.runtime.tokens import Tokenizer

_COUNTED = {RUN: "characters without a space", CHARACTERS: "characters", TOKENS: "tokens"}


class Prompts:
    """Makes prompts by one bundle's input rules; may be used from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        tables: Tables,
        tokenizer: Tokenizer,
        template: Renderer | None,
        metrics: Metrics,
    ) -> None:
        self._limits = bundle.input_limits
        self._has_runs = any(limit.unit == RUN for limit in bundle.input_limits)
        self._profile = bundle.input_profile
        self._rewrites = bool(bundle.profiles[bundle.input_profile].rules)
        self._machine = tables.machine
        self.vocab = tables.vocab
        self._tokenizer = tokenizer
        self._template = template
        self._metrics = metrics
        offsets = tables.vocab.offsets
        longest = max((b - a for a, b in itertools.pairwise(offsets)), default=0)
        self._most_bytes = bundle.engine.max_seq_len * max(longest, tokenizer.longest, 1)

    def chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Return the prompt of a conversation, ending where the answer begins.

        Raises:
            ApiError: 422 when the prompt breaks an input limit, 400 when the text is longer than any that
                fits or when the template refuses the messages.
        """
        if self._template is None:
            message = "the model has no chat template; use /v1/completions"
            raise ApiError(400, "no_chat_template", message)
        texts = [item["content"] for item in messages]
        self._check_size(texts)
        self._check_characters(texts, "messages")
        guarded = [
            {"role": item["role"], "content": self._prepare(item["content"], f"messages[{index}].content")}
            for index, item in enumerate(messages)
        ]
        self._check_size([item["content"] for item in guarded])
        ids = self._tokenizer.encode(self._template.render(guarded), add_special_tokens=False)
        self._check(TOKENS, len(ids), "messages")
        return ids

    def prefix(self) -> tuple[int, ...]:
        """Return the tokens with which a template begins conversations that have no system message."""
        if self._template is None:
            return ()
        try:
            texts = [self._template.render([{"role": "user", "content": text}]) for text in ("a", "1")]
        except ApiError:  # the template wants more than one message
            return ()
        both = zip(*(self._tokenizer.encode(text, add_special_tokens=False) for text in texts), strict=False)
        return tuple(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

    def completion(self, prompt: str) -> tuple[int, ...]:
        """Return the prompt of a text; raises ApiError like `chat`."""
        self._check_size([prompt])
        self._check_characters([prompt], "prompt")
        prepared = self._prepare(prompt, "prompt")
        self._check_size([prepared])
        ids = self._tokenizer.encode(prepared, add_special_tokens=True)
        if not ids:
            raise ApiError(400, "invalid_value", "prompt: needs at least one token", param="prompt")
        self._check(TOKENS, len(ids), "prompt")
        return ids

    def _check_size(self, texts: Sequence[str]) -> None:
        """Refuse what cannot fit, before work that grows with it: no token is longer than the longest."""
        # The marks of `guard` become no tokens.
        size = sum(len(text.encode()) - self._tokenizer.mark_bytes(text) for text in texts)
        if size > self._most_bytes:
            message = f"the prompt has {size} bytes; the context holds at most {self._most_bytes}"
            extra = {"measured": size, "allowed": self._most_bytes}
            raise ApiError(400, "context_length_exceeded", message, extra=extra)

    def _prepare(self, text: str, param: str) -> str:
        self._check(RUN, max(map(len, text.split()), default=0) if self._has_runs else 0, param)
        if self._rewrites:
            data, events = self._machine.rewrite(self._profile, text.encode())
            self._metrics.count_events(events)
            text = data.decode()
        return self._tokenizer.guard(text)

    def _check_characters(self, texts: Sequence[str], param: str) -> None:
        self._check(CHARACTERS, sum(map(len, texts)), param)

    def _check(self, unit: str, measured: int, param: str) -> None:
        """Refuse what is longer than a token filter accepts: nothing is ever cut."""
        for limit in self._limits:
            if limit.unit == unit and measured > limit.max_length:
                message = (
                    f"{param}: token filter {limit.name!r} accepts at most {limit.max_length} "
                    f"{_COUNTED[unit]}; found {measured}"
                )
                extra = {"filter": limit.name, "measured": measured, "allowed": limit.max_length}
                raise ApiError(422, "input_too_long", message, param=param, extra=extra | {"unit": unit})
