"""What a request may say: served, ignored, or refused with the field's name before any work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.requests import Wishes, parse_chat, parse_completion

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refusal(body: dict[str, Any] | bytes, parse: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    return caught.value


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps(CHAT | fields).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["audio"]},
        {"min_tokens": 4},
        {"ignore_eos": True},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"guided_regex": "a+"},
        {"structured_outputs": {"choice": ["a"]}},
        {"grammar": "root ::= x"},
        {"stop_token_ids": [5]},
        {"repeat_penalty": 1.1},
        {"prompt_logprobs": 0},
        {"include_stop_str_in_output": True},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"chat_template": "x"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "x"}]},
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any]) -> None:
    error = refusal(CHAT | fields)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ],
)
def test_what_would_be_left_out_inside_a_field_is_refused_by_its_place(
    fields: dict[str, Any], param: str
) -> None:
    error = refusal(CHAT | fields)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)


def test_an_integer_of_thousands_of_digits_is_refused_without_advice_for_programmers() -> None:
    body = json.dumps(CHAT).encode()[:-1] + b', "max_tokens": ' + b"9" * 5000 + b"}"
    assert "thousands of digits" in refusal(body).message


def test_values_that_ask_for_nothing_and_unknown_fields_are_accepted() -> None:
    ask = chat(
        n=1, logprobs=False, tools=[], tool_choice="auto", response_format={"type": "text"}, logit_bias={},
        presence_penalty=0, frequency_penalty=0.0, user="u", metadata={}, whatever=[1], stop=None, seed=None,
        chat_template_kwargs={}, add_generation_prompt=True, stream_options={"continuous_usage_stats": False},
    )  # fmt: skip
    assert ask.messages == ({"role": "user", "content": "hi"},)
    assert ask.stops == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1, "5": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": [1]}, "stream_options"),
        ({"model": ""}, "model"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_the_field_s_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(CHAT | fields)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a":1,"a":2}', b'"x"', b"\xff", b"[" * 100000])
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


def test_text_parts_are_joined_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = chat(messages=[{"role": "developer", "content": parts}, {"role": "assistant", "content": None}])
    assert ask.messages == ({"role": "system", "content": "ab"}, {"role": "assistant", "content": ""})
    assert ask.input_length == 2


def test_sampling_values_are_read_and_left_out_ones_stay_unknown() -> None:
    ask = chat(
        temperature=0.5, top_k=-1, top_p=1, min_p=0.1, repetition_penalty=1.2, presence_penalty=-1,
        frequency_penalty=2, seed=-3, logit_bias={"7": -100, "3": 1.5}, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    assert ask.wishes == Wishes(0.5, 0, 1.0, 0.1, 1.2, -1.0, 2.0, -3, ((3, 1.5), (7, -100.0)))
    assert ask.logprobs == 2
    assert chat().wishes == Wishes()
    assert (chat().logprobs, chat(logprobs=True).logprobs) == (None, 0)
    completion = parse_completion(b'{"model":"m","prompt":"x","logprobs":0}')
    assert completion.logprobs == 0


def test_max_completion_tokens_beats_the_older_name() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat().max_tokens is None


def test_a_completion_takes_one_string_and_sixteen_tokens_by_default() -> None:
    ask = parse_completion(b'{"model":"m","prompt":["text"]}')
    assert (ask.prompt, ask.max_tokens) == ("text", 16)
    assert refusal({"model": "m", "prompt": [1, 2]}, parse_completion).param == "prompt"
    assert refusal({"model": "m", "prompt": ["a", "b"]}, parse_completion).param == "prompt"
    assert refusal({"model": "m", "prompt": "a", "echo": True}, parse_completion).param == "echo"
