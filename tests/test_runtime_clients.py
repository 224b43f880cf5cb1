"""Real clients beside `openai`, unchanged: what they make of our answers, streams, choices and errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from openai import AuthenticationError
from runtime_fixtures import Rules, Runtime, make_image, make_model, running

from ralbuild.contract.bundle import Engine

QUESTION = "Tell me about France."
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
KEY = "sk-one"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "keys").write_text(f"{KEY}\n")
    engine = Engine(4, 512, "float32")
    image = make_image(folder / "root", make_model(folder / "model"), [Rules(append=" [end]")], engine=engine)
    with running(image, {"RAL_THREADS": "1", "RAL_API_KEYS_FILE": str(folder / "keys")}) as started:
        yield started


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network for prices
    import litellm

    return litellm


@pytest.fixture(scope="module")
def answer(runtime: Runtime) -> str:
    """What plain HTTP gives."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], **FIELDS}
    status, found, _ = runtime.post("/v1/chat/completions", body, {"authorization": f"Bearer {KEY}"})
    assert status == 200, json.dumps(found)
    text = found["choices"][0]["message"]["content"]
    assert text.endswith(" [end]")
    return str(text)


def chain(runtime: Runtime, key: str = KEY) -> Any:
    return ChatOpenAI(
        base_url=f"{runtime.url}/v1", api_key=key, model="tiny", max_retries=0, stream_usage=True, **FIELDS
    )


def test_langchain_gets_text_streams_usage_and_log_probabilities(runtime: Runtime, answer: str) -> None:
    found = chain(runtime).invoke(QUESTION)
    assert found.content == answer
    assert found.usage_metadata["output_tokens"] == 12
    chunks = list(chain(runtime).stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == answer
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 12
    named = chain(runtime).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = named.response_metadata["logprobs"]["content"]
    assert len(tokens) == 12
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in tokens)


def test_langchain_raises_what_we_refuse(runtime: Runtime) -> None:
    with pytest.raises(AuthenticationError, match="Error code: 401"):
        chain(runtime, "sk-wrong").invoke(QUESTION)


def ask(litellm: Any, runtime: Runtime, **more: Any) -> Any:
    return litellm.completion(
        model="openai/tiny",
        api_base=f"{runtime.url}/v1",
        api_key=KEY,
        messages=[{"role": "user", "content": QUESTION}],
        max_retries=0,
        **FIELDS | more,
    )


def test_litellm_gets_text_streams_usage_and_choices(litellm: Any, runtime: Runtime, answer: str) -> None:
    found = ask(litellm, runtime, n=2)
    assert [choice.message.content for choice in found.choices] == [answer, answer]
    assert found.usage.completion_tokens == 24
    chunks = list(ask(litellm, runtime, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert chunks[-1].usage.completion_tokens == 12


def test_litellm_raises_what_we_refuse(litellm: Any, runtime: Runtime) -> None:
    with pytest.raises(litellm.BadRequestError, match="context is 512 tokens"):
        ask(litellm, runtime, max_tokens=5000)
