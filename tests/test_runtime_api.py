"""The API as clients see it: a real process, real HTTP, the real `openai` client.

Expected texts come from transformers' `generate` and `str.replace`, not from our code.
"""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from runtime_fixtures import Image, Rules, Runtime, make_image, make_model, running, token_bytes
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ralbuild.contract.bundle import Bounds, Engine, InputLimit, Route, Sampling

ASKED = "Tell me about the capital of France."
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": ASKED}],
    "temperature": 0,
    "max_tokens": 60,
}
ONE_THREAD = {"RAL_THREADS": "1"}


def greedy(folder: Path, asked: str, count: int) -> list[bytes]:
    """What the bare model says, as the bytes of each token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known = token_bytes(folder)
    model.generation_config.suppress_tokens = list(range(len(known), model.config.vocab_size))
    found: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    ids = model.generate(found, attention_mask=torch.ones_like(found), max_new_tokens=count, do_sample=False)
    return [known[token] for token in ids[0, found.shape[1] :].tolist()]


def words_of(tokens: list[bytes]) -> list[str]:
    """Pairs of ASCII characters in the text, each once; those that two tokens make together come first."""
    text = b"".join(tokens)
    joints = [a[-1:] + b[:1] for a, b in itertools.pairwise(tokens)]
    pairs = [*joints, *(text[n : n + 2] for n in range(len(text) - 1))]
    good = [
        pair.decode() for pair in pairs if len(pair) == 2 and pair.isascii() and pair.decode().isprintable()
    ]
    return list(dict.fromkeys(pair for pair in good if pair[0] != pair[1] and not set(pair) & set("<>/[]b ")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[bytes]:
    return greedy(model, ASKED, 60)


@pytest.fixture(scope="module")
def plain(tokens: list[bytes]) -> bytes:
    return b"".join(tokens)


@pytest.fixture(scope="module")
def words(tokens: list[bytes]) -> list[str]:
    found = words_of(tokens)
    assert len(found) >= 4, tokens
    return found


@pytest.fixture(scope="module")
def image(model: Path, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Default: one bold word. ``finance.*``: another is redacted, a text appended, a third banned."""
    return make_image(
        tmp_path_factory.mktemp("image") / "root",
        model,
        (
            Rules(bold=words[0]),
            Rules(redact=words[0], append="\nNot investment advice.", ban=words[2]),
            Rules(sampling=Sampling(temperature=Bounds(0.0, 0.0))),
        ),
        routes=(Route("finance.*", "action1", 10, 1), Route("cold", "action2", 20, 2)),
        limits=(InputLimit("normalizer", 64),),
        engine=Engine(8, 512, "float32"),
    )


@pytest.fixture(scope="module")
def runtime(image: Image) -> Iterator[Runtime]:
    with running(image, ONE_THREAD) as started:
        yield started


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{runtime.url}/v1", api_key="none", max_retries=0)


def say(runtime: Runtime, headers: dict[str, str] | None = None, **fields: Any) -> str:
    status, body, _ = runtime.post("/v1/chat/completions", CHAT | fields, headers)
    assert status == 200, body
    content: str = body["choices"][0]["message"]["content"]
    return content


def series(runtime: Runtime) -> dict[str, float]:
    """Samples by name, summed over labels."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(runtime.get("/metrics")[1].decode()):
        for sample in family.samples:
            out[sample.name] = out.get(sample.name, 0) + sample.value
    return out


def test_log_probabilities_name_the_drawn_tokens_in_both_apis(
    client: openai.OpenAI, runtime: Runtime
) -> None:
    asked: dict[str, Any] = {"model": "tiny/cold", "messages": CHAT["messages"], "max_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    choice = whole.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert (
        b"".join(bytes(item.bytes or []) for item in content).decode(errors="replace")
        == choice.message.content
    )
    assert all(item.top_logprobs[0].logprob == item.logprob for item in content)  # the route is greedy
    assert all(item.logprob >= item.top_logprobs[2].logprob for item in content)
    stream = client.chat.completions.create(**asked, logprobs=True, stream=True)
    parts = [part.choices[0].logprobs for part in stream if part.choices]
    streamed = [item.logprob for part in parts if part for item in part.content or []]
    assert streamed == [item.logprob for item in content]
    prompt = {"model": "tiny/cold", "prompt": "The risk", "max_tokens": 5}
    older = client.completions.create(**prompt, logprobs=2).choices[0]  # type: ignore[call-overload]
    assert older.logprobs is not None
    assert "".join(older.logprobs.tokens) == older.text
    assert all(1 <= len(item) <= 2 for item in older.logprobs.top_logprobs)  # two broken bytes look alike
    assert client.chat.completions.create(**asked).choices[0].logprobs is None
    status, body, _ = runtime.post(
        "/v1/chat/completions", CHAT | {"logprobs": True}, {"x-ral-route": "finance.x"}
    )
    assert (status, body["error"]["param"]) == (400, "logprobs")


def test_a_bias_and_penalties_decide_what_comes(client: openai.OpenAI, model: Path) -> None:
    asked: dict[str, Any] = {"model": "tiny/cold", "messages": CHAT["messages"], "max_tokens": 4}
    one, other = (token_bytes(model).index(letter) for letter in (b"a", b"e"))
    same = client.chat.completions.create(**asked, logit_bias={str(one): 100, str(other): 30})
    assert same.choices[0].message.content == "aaaa"
    asked |= {"max_tokens": 14, "logit_bias": {str(one): 100, str(other): 100}}
    turns = client.chat.completions.create(**asked, frequency_penalty=2)
    assert set(turns.choices[0].message.content or "") == {"a", "e"}


def events(runtime: Runtime, path: str, body: dict[str, Any]) -> list[bytes]:
    """Return the lines of a stream."""
    where = urlsplit(runtime.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    connection.request(
        "POST", path, json.dumps(body | {"stream": True}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    lines = response.read().split(b"\n\n")
    assert lines.pop() == b""
    return lines


def test_the_rules_are_applied_to_the_model_s_own_text(
    runtime: Runtime, plain: bytes, words: list[str]
) -> None:
    expected = plain.replace(words[0].encode(), f"<b>{words[0]}</b>".encode())
    assert say(runtime) == expected.decode(errors="replace")


def test_streamed_and_whole_answers_are_the_same_text(client: openai.OpenAI) -> None:
    for fields in (
        {},
        {"temperature": 1.0, "seed": 7},
        {"stop": ["e"]},
        {"extra_headers": {"x-ral-route": "finance.x"}},
    ):
        whole = client.chat.completions.create(**CHAT | fields)
        stream = client.chat.completions.create(
            **CHAT | fields, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage


def test_completions_stream_and_whole_are_the_same_text(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "The risk of a market",
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.completions.create(**body)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))
    assert text == whole.choices[0].text != ""
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40


def test_a_route_selects_the_rules_by_header_or_by_model_name(
    runtime: Runtime, plain: bytes, words: list[str]
) -> None:
    by_header = say(runtime, {"x-ral-route": "finance.retail"})
    assert by_header == say(runtime, model="tiny/finance.retail")
    assert by_header.endswith("\nNot investment advice.")
    assert words[0] not in by_header
    assert words[2] not in by_header
    assert words[2] in plain.decode(errors="replace")
    assert "[gone]" in by_header
    assert say(runtime, {"x-ral-route": "other"}, model="tiny/finance.retail") == say(runtime)


def test_a_banned_phrase_never_appears_whatever_is_drawn(runtime: Runtime, words: list[str]) -> None:
    headers = {"x-ral-route": "finance.x"}
    texts = [say(runtime, headers, temperature=1.5, seed=seed, max_tokens=120) for seed in range(6)]
    assert len(set(texts)) == 6
    assert not any(words[2] in text for text in texts)


def test_a_route_s_sampling_beats_the_request_s(runtime: Runtime) -> None:
    texts = {say(runtime, {"x-ral-route": "cold"}, temperature=2.0, seed=seed) for seed in range(3)}
    assert len(texts) == 1


def test_eight_requests_decoded_together_give_what_each_gives_alone(runtime: Runtime) -> None:
    fields = [
        {"temperature": 0.9, "seed": seed, "max_tokens": 40 + 9 * seed, "top_p": 0.9} for seed in range(8)
    ]
    alone = [say(runtime, **item) for item in fields]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda item: say(runtime, **item), fields))
    assert together == alone


def test_a_stop_string_ends_the_text_before_it(runtime: Runtime, words: list[str]) -> None:
    whole = say(runtime)
    stop = f"<b>{words[0]}</b>"
    status, body, _ = runtime.post("/v1/chat/completions", CHAT | {"stop": [stop]})
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["message"]["content"] == whole[: whole.index(stop)]


def test_a_stop_string_does_not_cut_what_a_rule_appends(runtime: Runtime, plain: bytes) -> None:
    first = plain.decode(errors="replace")[0]
    text = say(runtime, {"x-ral-route": "finance.x"}, stop=[first, "Not investment"])
    assert text == "\nNot investment advice."


def test_the_length_limit_gives_out_what_was_held_back(
    runtime: Runtime, tokens: list[bytes], words: list[str]
) -> None:
    word = words[0].encode()
    inside = next(n for n in range(1, 60) if b"".join(tokens[:n]).endswith(word[:1]))
    for count in (1, 2, 17, inside, 60):
        status, body, _ = runtime.post("/v1/chat/completions", CHAT | {"max_tokens": count})
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == count
        expected = b"".join(tokens[:count]).replace(word, b"<b>" + word + b"</b>")
        assert body["choices"][0]["message"]["content"] == expected.decode(errors="replace")


def test_chat_stream_events_have_the_shape_that_clients_need(runtime: Runtime) -> None:
    lines = events(runtime, "/v1/chat/completions", CHAT | {"max_tokens": 5})
    assert lines[-1] == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_last_and_only_when_asked(runtime: Runtime) -> None:
    body = CHAT | {"max_tokens": 5, "stream_options": {"include_usage": True}}
    lines = events(runtime, "/v1/chat/completions", body)
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-1]["usage"]["total_tokens"] == 5 + chunks[-1]["usage"]["prompt_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_models_are_listed_with_and_without_a_key(runtime: Runtime, client: openai.OpenAI) -> None:
    assert [item.id for item in client.models.list()] == ["tiny"]
    found = client.models.retrieve("tiny")
    # vLLM's extension, by which clients find out how much fits.
    assert (found.id, found.model_dump()["max_model_len"]) == ("tiny", 512)
    assert runtime.get("/v1/models")[0] == 200
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "fields", "headers", "status", "code"),
    [
        ("/v1/chat/completions", {"model": "gpt-4"}, {}, 404, "model_not_found"),
        ("/v1/chat/completions", {"model": "tinyx"}, {}, 404, "model_not_found"),
        ("/v1/chat/completions", {"max_tokens": 500}, {}, 400, "context_length_exceeded"),
        ("/v1/chat/completions", {"n": 17}, {}, 400, "invalid_value"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_object"}},
            {},
            400,
            "unsupported_parameter",
        ),
        ("/ral/unload", {}, {}, 403, "admin_disabled"),
        ("/v1/chat/completions", {}, {"x-ral-input-length": "35"}, 422, "input_length_mismatch"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 65}]},
            {},
            422,
            "input_too_long",
        ),
        ("/v1/completions", {"prompt": ["a", "b"]}, {}, 400, "invalid_value"),
        ("/v1/embeddings", {}, {}, 404, "not_found"),
        ("/v1/chat/completions/", {}, {}, 404, "not_found"),
        ("/v1/models", {}, {}, 405, "method_not_allowed"),
    ],
)
def test_refusals_have_the_status_and_openai_s_shape(
    runtime: Runtime, path: str, fields: dict[str, Any], headers: dict[str, str], status: int, code: str
) -> None:
    found, body, _ = runtime.post(path, CHAT | fields, headers)
    assert found == status
    assert body["error"]["code"] == code
    assert {"message", "type", "param", "code"} <= body["error"].keys()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://proxy.example/v1/models", 200),
        ("HTTP://proxy.example:8000/v1/models?x=1", 200),
        ("http://proxy.example", 404),
        ("http://proxy.example/v1/models/a%3Fb", 404),
        ("ftp://proxy.example/v1/models", 404),
    ],
)
def test_a_target_may_be_written_as_for_a_proxy(runtime: Runtime, target: str, expected: int) -> None:
    """RFC 9112, 3.2.2: a server must accept the absolute form."""
    address = urlsplit(runtime.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    connection.putrequest("GET", target)
    connection.endheaders()
    reply = connection.getresponse()
    assert (reply.status, b'"object"' in reply.read()) == (expected, expected == 200)
    connection.close()


def test_the_right_input_length_is_accepted(runtime: Runtime) -> None:
    assert say(runtime, {"x-ral-input-length": str(len(ASKED))}, max_tokens=1) != ""


def test_a_body_above_the_limit_is_refused_before_it_is_read(runtime: Runtime) -> None:
    where = urlsplit(runtime.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("content-length", str(5 << 20))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["measured"] == 5 << 20


def test_a_request_id_comes_back_and_one_is_made_when_there_is_none(runtime: Runtime) -> None:
    body = CHAT | {"max_tokens": 1}
    assert runtime.post("/v1/chat/completions", body, {"x-request-id": "abc-1"})[2]["x-request-id"] == "abc-1"
    assert len(runtime.post("/v1/chat/completions", body)[2]["x-request-id"]) == 32


def test_rule_events_and_tokens_are_counted(runtime: Runtime, plain: bytes, words: list[str]) -> None:
    def count() -> tuple[int, float]:
        info = json.loads(runtime.get("/ral/info")[1])
        return info["rules"][0]["events"], series(runtime)["ralbuild_generated_tokens_total"]

    events_before, tokens_before = count()
    say(runtime)
    events_after, tokens_after = count()
    assert events_after - events_before == plain.count(words[0].encode())
    assert tokens_after - tokens_before == 60


def test_metrics_have_the_names_that_dashboards_ask_for(runtime: Runtime) -> None:
    text = runtime.get("/metrics")[1].decode()
    found = series(runtime)
    assert found["container_cuda_mem_advise_zeroed_bytes"] == 0
    assert "no CUDA call of this name exists" in text
    assert found["ralbuild_ready"] == 1
    assert found["ralbuild_slots"] == 8
    for name in ("ralbuild_requests_running", "ralbuild_requests_waiting", "ralbuild_kv_cache_bytes"):
        assert found[name] == 0
    assert found["ralbuild_time_to_first_token_seconds_count"] > 0


def test_info_names_rules_but_not_the_words_that_must_not_be_seen(
    runtime: Runtime, image: Image, words: list[str]
) -> None:
    text = runtime.get("/ral/info")[1].decode()
    info = json.loads(text)
    assert info["bundle"] == f"sha256:{image.digest}"
    assert [rule["name"] for rule in info["rules"]][:2] == [f"bold:{words[0]}", "redact@1:1#1"]
    assert info["routes"][0] == {"match": "finance.*", "action": "action1", "priority": 10}


def test_the_log_has_no_text_of_requests_or_answers(runtime: Runtime) -> None:
    answer = say(runtime)
    assert "path=/v1/chat/completions status=200" in runtime.log
    assert ASKED not in runtime.log
    assert answer[:12] not in runtime.log


def hang_up_after(runtime: Runtime, fields: dict[str, Any], seconds: float) -> None:
    where = urlsplit(runtime.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    body = json.dumps(CHAT | {"max_tokens": 470} | fields)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    if fields.get("stream"):
        connection.getresponse().read(100)
    else:
        time.sleep(seconds)
    assert connection.sock is not None
    connection.sock.close()
    connection.close()


def busy(found: dict[str, float]) -> bool:
    return bool(found["ralbuild_requests_running"] or found["ralbuild_requests_waiting"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_stops_the_generation(runtime: Runtime, stream: bool) -> None:
    before = series(runtime)
    hang_up_after(runtime, {"stream": stream, "temperature": 1.0, "seed": 1}, 0.1)
    hung_up = before["ralbuild_requests_cancelled_total"] + 1
    while (after := series(runtime))["ralbuild_requests_cancelled_total"] < hung_up or busy(after):
        time.sleep(0.01)
    assert after["ralbuild_requests_cancelled_total"] == hung_up
    assert after["ralbuild_generated_tokens_total"] - before["ralbuild_generated_tokens_total"] < 470
    assert after["ralbuild_kv_cache_bytes"] == 0


@pytest.mark.parametrize("choices", [1, 3])
def test_a_client_that_hangs_up_at_once_is_counted_once(runtime: Runtime, choices: int) -> None:
    """Cut while its text is still being prepared, or with some of its choices at work: it is one client."""
    before = series(runtime)
    for _ in range(20):
        hang_up_after(runtime, {"n": choices, "temperature": 1.0}, 0.0)
    hung_up = before["ralbuild_requests_cancelled_total"] + 20
    while (after := series(runtime))["ralbuild_requests_cancelled_total"] < hung_up or busy(after):
        time.sleep(0.01)
    assert after["ralbuild_requests_cancelled_total"] == hung_up


def open_stream(runtime: Runtime, tokens: int) -> http.client.HTTPResponse:
    """Start a stream and read its first bytes."""
    where = urlsplit(runtime.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port)
    body = json.dumps(CHAT | {"max_tokens": tokens, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.read(10)
    return response


def test_a_full_queue_is_429_with_retry_after_and_the_client_says_so(model: Path, tmp_path: Path) -> None:
    image = make_image(tmp_path / "root", model, engine=Engine(1, 512, "float32"))
    with running(image, ONE_THREAD | {"RAL_QUEUE": "0"}) as runtime:
        stream = open_stream(runtime, 470)
        status, body, headers = runtime.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
        client = openai.OpenAI(base_url=f"{runtime.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**CHAT)
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_health_is_live_and_ready_tells_the_stage_from_the_first_second(image: Image) -> None:
    runtime = Runtime(image, ONE_THREAD)
    try:
        runtime.wait_listening()
        assert runtime.get("/health")[0] == 200
        status, body = runtime.get("/ready")
        assert status == 503
        assert json.loads(body)["stage"] in ("check", "import", "load")
        assert json.loads(body)["percent"] < 100
        found, answer, headers = runtime.post("/v1/chat/completions", CHAT)
        assert (found, answer["error"]["code"]) == (503, "model_loading")
        assert int(headers["retry-after"]) > 0
        assert runtime.get("/metrics")[0] == 200
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(timeout=60) == 0
    finally:
        runtime.close()


def test_sigterm_lets_streams_end_refuses_new_work_and_exits_with_0(image: Image) -> None:
    with running(image, ONE_THREAD) as runtime:
        stream = open_stream(runtime, 470)
        runtime.process.send_signal(signal.SIGTERM)
        while runtime.get("/ready")[0] == 200:
            time.sleep(0.005)
        status, body, headers = runtime.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "draining")
        assert headers["connection"] == "close"
        assert runtime.get("/health")[0] == 200
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert runtime.process.wait(timeout=60) == 0
        assert "stopped" in runtime.log


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_stream_with_an_error_and_no_trace(image: Image, sent: signal.Signals) -> None:
    with running(image, ONE_THREAD) as runtime:
        stream = open_stream(runtime, 470)
        runtime.process.send_signal(sent)
        while runtime.get("/ready")[0] == 200:
            time.sleep(0.005)
        runtime.process.send_signal(sent)
        last = stream.read().strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shut_down"
        assert runtime.process.wait(timeout=60) == 0
        assert "Traceback" not in runtime.log
        assert "stopped" in runtime.log


def test_the_end_does_not_wait_for_a_prompt_that_is_being_prepared(model: Path, tmp_path: Path) -> None:
    """The template hangs on these messages; the drain is shorter than a rendering may take."""
    changed = tmp_path / "model"
    shutil.copytree(model, changed)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (changed / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'bad' %}" + loops + "{% endif %}x"
    )
    bad = CHAT | {"messages": [{"role": "user", "content": "bad"}], "max_tokens": 1}
    with running(make_image(tmp_path / "root", changed), ONE_THREAD | {"RAL_DRAIN_SECONDS": "0"}) as runtime:
        where = urlsplit(runtime.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port)
        connection.request("POST", "/v1/chat/completions", json.dumps(bad))
        assert say(runtime, max_tokens=1) != ""
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(timeout=60) == 0
        connection.close()
        assert "template ended" not in runtime.log
        assert "Traceback" not in runtime.log
