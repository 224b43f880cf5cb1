"""The decode loop itself: queue, cache reservation, cancellation and failure, on a tiny model in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import openai
import pytest
import torch
from runtime_fixtures import Image, Rules, ThreadWorker, collect, make_image, make_model

from ralbuild.contract.bundle import Engine as EngineSizes
from ralbuild.runtime.app import Api
from ralbuild.runtime.boot import boot
from ralbuild.runtime.engine import Engine
from ralbuild.runtime.errors import ApiError, DriverError
from ralbuild.runtime.exposition import ServerMetrics
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.listening import bind
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.serve import Server
from ralbuild.runtime.service import Service
from ralbuild.runtime.settings import Settings
from ralbuild.runtime.supervisor import Supervisor

PROMPT = tuple(range(20, 60))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    folder = tmp_path_factory.mktemp("tiny")
    return make_image(folder / "root", make_model(folder / "model"), engine=EngineSizes(4, 512, "float32"))


@pytest.fixture
def serve(image: Image) -> Iterator[Callable[..., Service]]:
    engines: list[Engine] = []

    def start(**settings: Any) -> Service:
        lifecycle = Lifecycle()
        service = boot(Settings(root=str(image.root), threads=1, **settings), lifecycle, Metrics("0"))
        lifecycle.enter("ready")
        engines.append(service.engine)
        return service

    yield start
    for engine in engines:
        engine.stop()


def order(count: int = 30, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Order:
    return Order(prompt, count, Draw(), 0, **fields)


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def sample(service: Service, name: str) -> float:
    value = service.metrics.registry.get_sample_value(name)
    assert value is not None
    return value


def test_more_requests_than_slots_all_end_in_the_order_they_came(serve: Callable[..., Service]) -> None:
    service = serve(queue=40)
    prompts = [tuple(range(20 + n, 40 + 3 * n)) for n in range(20)]
    alone = [text(collect(service, [order(prompt=prompt)])[0]) for prompt in prompts]
    together = collect(service, [order(prompt=prompt) for prompt in prompts])
    assert [text(pieces) for pieces in together] == alone
    assert service.engine.busy == 0


def test_short_prompts_answer_before_a_long_one_is_read_and_the_long_one_goes_on(
    serve: Callable[..., Service],
) -> None:
    service = serve()
    box: Queue[tuple[str, Piece]] = Queue()

    def submit(name: str, prompt: tuple[int, ...]) -> None:
        service.submit(order(2, prompt=prompt), lambda piece: box.put((name, piece)))

    with service.engine._wake:  # all are there before the first is read
        submit("long", PROMPT * 11)
        for number in range(3):
            submit(f"short {number}", PROMPT[number:])
    ended: list[str] = []
    while len(ended) < 4:
        name, piece = box.get(timeout=60)
        if piece.finish:
            ended.append(name)
    assert ended[3] == "long"


def test_a_pass_reads_whole_prompts_beside_the_oldest_one(serve: Callable[..., Service]) -> None:
    """Part of a prompt answers nobody, and makes those wait whose prompts end in the same pass."""
    service = serve()
    passes: list[list[tuple[int, bool]]] = []
    advance = service.engine._graph.advance

    def watch(reads: Any, lanes: Any) -> Any:
        passes.append([(len(read.tokens), read.last) for read in reads])
        return advance(reads, lanes)

    service.engine._graph.advance = watch  # type: ignore[method-assign]
    ended: Queue[Piece] = Queue()
    with service.engine._wake:  # all are there before the first is read
        for count in (50, 30, 20, 25):
            service.submit(order(1, prompt=tuple(range(20, 20 + count))), ended.put)
    assert all(ended.get(timeout=60).finish for _ in range(4))
    # 64 tokens a pass: half for the oldest, then the shortest; what is too little for the next is the oldest's.
    assert passes == [[(44, False), (20, True)], [(6, True), (25, True), (30, True)]]


def test_a_small_cache_makes_requests_wait_and_none_fail(serve: Callable[..., Service]) -> None:
    roomy, tight = serve(), serve()
    # One full-length text fits, two do not.
    cost = tight.engine._graph.cache.cost(512)
    tight.engine._kv_bytes = cost
    most = 0

    def watch(bytes_held: float) -> None:
        nonlocal most
        most = max(most, tight.engine._taken())

    tight.metrics.kv_bytes.set = watch  # type: ignore[method-assign]
    orders = [order(450, prompt=PROMPT[n:]) for n in range(4)]
    assert [text(p) for p in collect(tight, orders)] == [text(p) for p in collect(roomy, orders)]
    assert most == 1


def test_a_full_queue_is_refused_and_the_rest_is_served(serve: Callable[..., Service]) -> None:
    service = serve(queue=2)
    held = threading.Event()
    pieces: Queue[Piece] = Queue()

    def slow(piece: Piece) -> None:
        held.wait(30)
        pieces.put(piece)

    refused: list[ApiError] = []
    accepted = 0
    while not refused:
        try:
            service.submit(order(3), slow)
            accepted += 1
        except ApiError as error:
            refused.append(error)
    held.set()
    assert (refused[0].status, refused[0].code) == (429, "queue_full")
    assert refused[0].retry_after > 0
    assert accepted <= 4 + 2
    ended = 0
    while ended < accepted:
        ended += bool(pieces.get(timeout=30).finish)


def test_a_cancelled_request_draws_at_most_one_more_token(serve: Callable[..., Service]) -> None:
    service = serve()
    drawn: list[int] = []
    generation: list[Any] = []
    started, cancelled = threading.Event(), threading.Event()

    def sink(piece: Piece) -> None:
        drawn.append(piece.tokens)
        started.wait(30)
        if len(drawn) == 5:
            service.engine.cancel(generation[0])
            cancelled.set()

    generation.append(service.submit(order(400), sink))
    started.set()
    assert cancelled.wait(30)
    while service.engine.busy:
        time.sleep(0.01)
    assert sample(service, "ralbuild_generated_tokens_total") <= drawn[4] + 1


def test_a_waiting_request_that_is_cancelled_never_runs(serve: Callable[..., Service]) -> None:
    service = serve(queue=8)
    running = [service.submit(order(400), lambda _: None) for _ in range(4)]
    waiting = service.submit(order(prompt=(7,) * 100), lambda _: pytest.fail("it ran"))
    service.engine.cancel(waiting)
    for generation in running:
        service.engine.cancel(generation)
    while service.engine.busy:
        time.sleep(0.01)
    assert sample(service, "ralbuild_kv_cache_bytes") == 0


class Breaks:
    """A step that fails once, at its n-th call."""

    def __init__(self, calls: int, error: Exception | None = None) -> None:
        self.calls = calls
        self.error = error or RuntimeError("broken on purpose")

    def run(self, _logits: Any, _slots: Any) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise self.error


@pytest.mark.parametrize("calls", [1, 2, 9])
def test_a_failed_step_ends_its_requests_and_the_next_ones_are_whole(
    serve: Callable[..., Service], calls: int, capsys: pytest.CaptureFixture[str]
) -> None:
    service = serve()
    good = text(collect(service, [order()])[0])
    patch = service.engine._graph.patch
    patch.steps = (*patch.steps, Breaks(calls))
    (pieces,) = collect(service, [order()])
    assert pieces[-1].error
    assert good.startswith(text(pieces))
    assert text(collect(service, [order()])[0]) == good
    assert sample(service, "ralbuild_step_failures_total") == 1
    assert sample(service, "ralbuild_requests_running") == 0
    assert "step failed error=RuntimeError" in capsys.readouterr().err


def test_a_lost_device_ends_the_loop_with_the_status_of_its_error(
    serve: Callable[..., Service], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such an error stays with the process: every later step would fail as well."""
    service = serve()
    patch = service.engine._graph.patch
    patch.steps = (*patch.steps, Breaks(3, DriverError("an illegal memory access")))
    pieces, waiting = collect(service, [order(), order()])
    assert pieces[-1].error
    assert waiting[-1].error
    service.engine.join(30)
    assert not service.engine.alive
    assert service.engine.failure is not None
    assert service.engine.failure.exit_code == 88
    assert "step failed error=DriverError" in capsys.readouterr().err


def test_a_failure_inside_a_stream_reaches_the_openai_client_as_an_error(
    serve: Callable[..., Service],
) -> None:
    service = serve()
    lifecycle, metrics = Lifecycle(), ServerMetrics()
    worker: Any = ThreadWorker(service)
    api = Api(lifecycle, metrics, Supervisor(worker, lifecycle, metrics, None))
    listener = bind({"RAL_HOST": "127.0.0.1", "RAL_PORT": "0"})
    port = listener.getsockname()[1]
    server = Server(api, 5)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not lifecycle.ready:
        time.sleep(0.01)
    try:
        patch = service.engine._graph.patch
        patch.steps = (*patch.steps, Breaks(6))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
        }
        with pytest.raises(openai.APIError, match="the decode step failed"):
            list(client.chat.completions.create(**body, stream=True))
        patch.steps = (*patch.steps[:-1], Breaks(1))
        with pytest.raises(openai.InternalServerError, match="the decode step failed"):
            client.chat.completions.create(**body)
    finally:
        server.should_exit = True
        thread.join()


def test_a_stop_rule_ends_the_text_and_what_the_rules_append_follows(tmp_path: Path) -> None:
    """The same model with and without the rule: the text is cut before the byte, the reason is ``stop``."""
    folder = make_model(tmp_path / "model")

    def answer(rules: Rules) -> tuple[str, str]:
        made = make_image(
            tmp_path / f"root{rules.stop}", folder, [rules], engine=EngineSizes(2, 512, "float32")
        )
        lifecycle = Lifecycle()
        service = boot(Settings(root=str(made.root), threads=1), lifecycle, Metrics("0"))
        lifecycle.enter("ready")
        pieces: Queue[Piece] = Queue()
        service.engine.submit(
            Order(profile=0, prompt=PROMPT, draw=Draw(), max_tokens=60, stops=()), pieces.put
        )
        text, last = "", pieces.get(timeout=60)
        while not last.finish:
            text, last = text + last.text, pieces.get(timeout=60)
        service.engine.stop()
        return text + last.text, last.finish

    whole, _ = answer(Rules())
    stop = next(char for char in whole[5:] if char.isascii() and char.isprintable())
    text, finish = answer(Rules(stop=stop, append=" END"))
    assert text == whole[: whole.index(stop)] + " END"
    assert finish == "stop"
