"""Requests that mean harm or make no sense, against API, supervisor and desk in this process.

The engine behind them answers at once.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_fixtures import Rules, ThreadWorker, make_image, make_tokenizer

from ralbuild.runtime import service as serving
from ralbuild.runtime import supervisor as supervising
from ralbuild.runtime.app import Api
from ralbuild.runtime.errors import ApiError
from ralbuild.runtime.exposition import ServerMetrics
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.preflight import check_files
from ralbuild.runtime.prompts import Prompts
from ralbuild.runtime.rendering import TemplateProcess, find_template
from ralbuild.runtime.service import Service
from ralbuild.runtime.settings import PREPARE_THREADS, Settings
from ralbuild.runtime.steps import read_tables
from ralbuild.runtime.supervisor import Supervisor
from ralbuild.runtime.tokens import Tokenizer
from ralbuild.runtime.worker import Desk

T = TypeVar("T")
PATHS = ("/v1/chat/completions", "/v1/completions")
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


class InstantEngine:
    """Ends every text at once, in a thread as the real one does."""

    alive = True

    def submit(self, _order: Order, sink: Callable[[Piece], None]) -> object:
        threading.Thread(target=sink, args=(Piece("x", 1, finish="stop"),)).start()
        return object()

    def cancel(self, _generation: object) -> None:
        """Nothing runs."""


LOOP = asyncio.new_event_loop()


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on the one loop that the supervisor lives on."""
    return asyncio.run_coroutine_threadsafe(work, LOOP).result(60)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("hostile")
    (root / "model").mkdir()
    make_tokenizer(root / "model")
    config = {"architectures": ["X"], "model_type": "x", "vocab_size": 400, "eos_token_id": 2}
    (root / "model" / "config.json").write_text(json.dumps(config))
    image = make_image(root / "root", root / "model", input_rules=Rules(redact="ROI"))
    checked = check_files(Settings(root=str(image.root)))
    metrics = Metrics("0")
    metrics.describe(checked.bundle, checked.digest)
    source = find_template(checked.files)
    assert source is not None
    template = TemplateProcess(source, PREPARE_THREADS)
    tables = read_tables(checked.bundle, checked.objects)
    prompts = Prompts(checked.bundle, tables, Tokenizer(checked.files["tokenizer.json"]), template, metrics)
    engine: Any = InstantEngine()
    yield Service(checked.bundle, tables.routes, checked.digest, prompts, engine, metrics)
    template.close()


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[Api]:
    worker: Any = ThreadWorker(service)
    thread = threading.Thread(target=LOOP.run_forever)
    thread.start()
    lifecycle, server_metrics = Lifecycle(), ServerMetrics()
    supervisor = Supervisor(worker, lifecycle, server_metrics, None)

    async def begin() -> None:
        supervisor.begin()
        await supervisor.load()

    on_loop(begin())
    yield Api(lifecycle, server_metrics, supervisor)
    LOOP.call_soon_threadsafe(supervisor.close)
    LOOP.call_soon_threadsafe(LOOP.stop)
    thread.join()


async def call(
    api: Api,
    path: str,
    body: bytes = b"",
    headers: Sequence[tuple[bytes, bytes]] = (),
    hang_up: asyncio.Event | None = None,
) -> tuple[int, Any, dict[bytes, bytes]]:
    """Send one request through ASGI; the client stays until ``hang_up`` is set."""
    arrived = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        if (message := next(arrived, None)) is not None:
            return message
        await (hang_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST" if body else "GET", "path": path}
    scope |= {"headers": list(headers), "query_string": b"", "http_version": "1.1", "scheme": "http"}
    scope |= {"raw_path": path.encode(), "root_path": "", "client": None, "server": None}
    await api(scope, receive, send)
    start = sent[0]
    answer = b"".join(item.get("body", b"") for item in sent[1:])
    return start["status"], json.loads(answer) if answer else None, dict(start["headers"])


def post(api: Api, body: Any, path: str = PATHS[0], headers: Sequence[tuple[bytes, bytes]] = ()) -> Any:
    return on_loop(call(api, path, json.dumps(body).encode(), headers))


def error_of(found: Any) -> dict[str, Any]:
    """Return the error object after checking that it has OpenAI's shape."""
    error: dict[str, Any] = found["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str)
    assert len(error["message"]) < 1000
    assert isinstance(error["code"], str)
    return error


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
ANY = st.recursive(
    SCALARS | st.just("user") | st.just("text"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]) | st.text(max_size=4), inner, max_size=3
        )
    ),
    max_leaves=8,
)
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed",
    "stop", "stream_options", "n", "tools", "tool_choice", "response_format", "logit_bias", "logprobs",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), ANY, min_size=1, max_size=3), alone=ANY)
def test_every_json_value_is_answered_or_refused_in_openai_s_shape(
    api: Api, path: str, changes: dict[str, Any], alone: Any
) -> None:
    for body in (CHAT | {"prompt": "hi"} | changes, alone):
        status, found, _ = post(api, body, path)
        if status != 200:
            assert status in (400, 404, 422)
            error_of(found)


@pytest.mark.parametrize("role", [[], {}, None, 3, "x" * 100_000])
def test_a_role_of_any_shape_is_a_400(api: Api, role: Any) -> None:
    status, found, _ = post(api, CHAT | {"messages": [{"role": role, "content": "x"}]})
    assert (status, error_of(found)["param"]) == (400, "messages[0].role")


@pytest.mark.parametrize("fields", [{"model": "m" * 100_000}, {"stop": "s" * 1025}])
def test_a_huge_value_is_not_repeated(api: Api, fields: dict[str, Any]) -> None:
    status, found, _ = post(api, CHAT | fields)
    assert status in (400, 404)
    error_of(found)


@pytest.mark.parametrize("name", [b"x-ral-route", b"x-ral-input-length"])
def test_a_header_that_decides_may_come_once(api: Api, name: bytes) -> None:
    assert post(api, CHAT, headers=[(name, b"2")])[0] == 200
    status, found, _ = post(api, CHAT, headers=[(name, b"2"), (name, b"2")])
    assert (status, error_of(found)["code"]) == (400, "duplicate_header")
    assert error_of(found)["param"] == name.decode()


def test_an_unexpected_failure_is_a_json_500_and_logged(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("bug")

    monkeypatch.setattr(Prompts, "chat", broken)
    status, found, headers = post(api, CHAT)
    assert (status, error_of(found)["code"]) == (500, "internal_error")
    log = capsys.readouterr().err
    assert f"request failed id={headers[b'x-request-id'].decode()} error=KeyError" in log
    assert "code=internal_error" in log


def test_the_log_the_header_and_the_answer_have_one_id(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    for given_id in ([], [(b"x-request-id", b"abc-1")]):
        _, found, headers = post(api, CHAT, headers=given_id)
        name = headers[b"x-request-id"].decode()
        assert found["id"] == f"chatcmpl-{name}"
        assert f" id={name} " in capsys.readouterr().err


def test_a_refusal_s_code_is_in_the_log(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    post(api, CHAT | {"tools": [1]})
    assert "status=400" in (line := capsys.readouterr().err)
    assert "code=unsupported_parameter" in line


def test_sixty_thousand_keys_with_a_duplicate_are_refused_beside_a_probe(api: Api) -> None:
    body = "{" + ",".join(f'"k{number % 59_999}":1' for number in range(60_000)) + "}"

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(call(api, PATHS[0], body.encode()), call(api, "/health"))

    (status, found, _), (health, _, _) = on_loop(both())
    assert (status, error_of(found)["code"], health) == (400, "invalid_json", 200)


def test_bodies_are_never_parsed_by_the_event_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    make_order = Service.make_order

    def watched(*args: Any) -> Order:
        seen.append(threading.current_thread().name)
        return make_order(*args)

    monkeypatch.setattr(Service, "make_order", watched)
    assert post(api, CHAT)[0] == 200
    assert seen[0].startswith("prepare")


def test_preparation_is_bounded_and_a_hang_up_frees_its_place(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads are kept busy, the queue is filled, one more is refused; who hangs up is dropped."""
    release = threading.Event()
    begun: list[int] = []

    def slow(*_: Any) -> tuple[int, ...]:
        begun.append(1)
        release.wait()
        return (5,)

    monkeypatch.setattr(Prompts, "chat", slow)
    monkeypatch.setattr(supervising, "MAX_PENDING", 4)
    body = json.dumps(CHAT).encode()

    async def scenario() -> list[int]:
        hang_up = asyncio.Event()
        gone = [asyncio.create_task(call(api, PATHS[0], body, hang_up=hang_up)) for _ in range(4)]
        while len(begun) < PREPARE_THREADS:
            await asyncio.sleep(0.001)
        refused, found, headers = await call(api, PATHS[0], body)
        assert (refused, error_of(found)["code"], headers[b"retry-after"]) == (429, "queue_full", b"1")
        assert (await call(api, "/health"))[0] == 200
        hang_up.set()
        left = [status for status, _, _ in await asyncio.gather(*gone)]
        waiting = asyncio.create_task(call(api, PATHS[0], body))
        await asyncio.sleep(0.01)
        release.set()
        assert (await waiting)[0] == 200
        return left

    assert on_loop(scenario()) == [499] * 4
    assert len(begun) == PREPARE_THREADS + 1


def test_while_rules_are_built_only_what_is_asked_of_them_waits(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than threads wait; one that was asked before, one that goes away and a scrape do not."""
    go_on = threading.Event()
    said: queue.Queue[tuple[Any, ...]] = queue.Queue()

    class RefusesAll:
        def admit(self, *_: Any, **__: Any) -> None:
            raise ApiError(400, "content_refused", "no")

    def build(*_: Any) -> RefusesAll:
        assert go_on.wait(30)
        said.put(("built",))
        return RefusesAll()

    def say(message: dict[str, Any]) -> None:
        told = message["error"]["code"] if "error" in message else message["say"]
        said.put((told, message.get("job")))

    monkeypatch.setattr(serving, "read_rule_set", build)
    desk = Desk(service, say)
    waiting = range(2, 2 + PREPARE_THREADS + 2)  # those beyond the threads stand in a queue

    def ask(number: int) -> None:
        fields = {"do": "ask", "job": number, "id": "x", "chat": True, "route": None, "length": None}
        desk.handle(fields, json.dumps(CHAT).encode())

    def listen() -> None:
        ask(1)
        desk.handle({"do": "rules"}, b"")
        for number in waiting:
            ask(number)
        desk.handle({"do": "cancel", "job": waiting[-1]}, b"")
        desk.handle({"do": "series"}, b"")

    listening = threading.Thread(target=listen)
    listening.start()
    first = {said.get(timeout=20) for _ in range(3)}
    assert first == {("accepted", 1), ("piece", 1), ("series", None)}
    go_on.set()
    listening.join()
    assert said.get(timeout=20) == ("built",)
    refused = {said.get(timeout=20) for _ in waiting[:-1]}
    assert refused == {("content_refused", number) for number in waiting[:-1]}
