"""The GPU's decode loop on a device made of memory: kernels run from their PTX, graphs are frozen.

What `torch.cuda` and a real driver do is not here. What is: which buffers, in which order, with which
feedback, and that texts, tokens and events are those of the CPU target.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import cuda_device
import cuda_stub
import pytest
import torch
from cuda_device import StubDevice, know, on_device
from cuda_stub import Stub
from runtime_fixtures import Image, Rules, Runtime, collect, make_image, make_model, refused, token_bytes
from test_runtime_decode import by_transformers

from ralbuild.contract import places
from ralbuild.contract.bundle import Engine as EngineSizes
from ralbuild.contract.bundle import PatchStep
from ralbuild.contract.decoder_spec import read_spec
from ralbuild.runtime import worker
from ralbuild.runtime.boot import boot
from ralbuild.runtime.cuda.decode import _split
from ralbuild.runtime.cuda.device import cuda_errors
from ralbuild.runtime.cuda.report import Line
from ralbuild.runtime.cuda.start import require_memory
from ralbuild.runtime.errors import DriverError, OutOfMemoryError
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.preflight import check_files
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.service import Service
from ralbuild.runtime.settings import Settings
from ralbuild.simulate.buffers import Tables as SimulatedTables
from ralbuild.simulate.buffers import slot_buffers, table_buffers

OURS = ("penalize", "sample", "transduce", "feedback")
PROFILES = (
    Rules(),
    Rules(bold="e", append=" END", ban="o"),
    Rules(redact="a", with_="[hidden]"),
    Rules(stop="k", append="!"),
)
SIZES = EngineSizes(4, 300, "float32")
PROMPTS = [
    tuple(range(20, 60)),
    (5,),
    tuple(range(100, 130)),
    (7, 8) * 20,
    (9, 30, 31),
    tuple(range(300, 340)),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(cuda_stub.build_stub(tmp_path_factory.mktemp("cuda")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


def for_cuda(image: Image, arch: str = cuda_stub.ARCH) -> Image:
    """Turn an image for the CPU into one for GPUs: the same tables, and kernels."""
    chosen = tuple(cuda_stub.kernel(name, arch) for name in OURS)
    for name in OURS:
        done = cuda_stub.compiled(name, arch)
        for data in (done.cubin, done.ptx):
            (image.path(places.OBJECTS_DIR) / cuda_stub.sha256_hex(data)).write_bytes(data)
    patch = tuple(PatchStep(name, "1" if name == "feedback" else "slots") for name in OURS)
    image.rewrite(target="cuda", kernels=chosen, patch=patch)
    return image


def start(image: Image) -> Service:
    lifecycle = Lifecycle()
    return boot(Settings(root=str(image.root), threads=1, queue=100), lifecycle, Metrics("0"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cpu(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = start(make_image(tmp_path_factory.mktemp("cpu") / "root", model, PROFILES, engine=SIZES))
    yield service
    service.engine.stop()


@pytest.fixture(scope="module")
def gpu(stub: Stub, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    image = for_cuda(make_image(tmp_path_factory.mktemp("gpu") / "root", model, PROFILES, engine=SIZES))
    with on_device(stub):
        for name in OURS:
            know(cuda_stub.kernel(name), cuda_stub.compiled(name).ptx)
        service = start(image)
        yield service
        service.engine.stop()


pieces_of = partial(collect, seconds=120)  # the simulator is slow


def ends(found: list[list[Piece]]) -> list[tuple[str, str, int]]:
    return [("".join(p.text for p in pieces), pieces[-1].finish, pieces[-1].tokens) for pieces in found]


def counted(service: Service, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a series, by its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in service.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def many(count: int) -> list[Order]:
    draws = [
        Draw(),
        Draw(temperature=0.9, seed=3),
        Draw(temperature=1.2, top_k=9, top_p=0.8, seed=4),
        Draw(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2),
        Draw(logit_bias=((50, 3.0), (70, -100.0)), temperature=0.7, min_p=0.05, seed=1 << 63),
    ]
    return [
        Order(PROMPTS[n % len(PROMPTS)], 3 + n % 9, draws[n % len(draws)], n % len(PROFILES))
        for n in range(count)
    ]


SERIES = (
    "ralbuild_rule_events_total", "ralbuild_ban_refusals_total", "ralbuild_draws_masked_total",
    "ralbuild_ban_exhausted_total", "ralbuild_generated_tokens_total", "ralbuild_prompt_tokens_total",
)  # fmt: skip


def test_texts_and_counts_of_many_requests_are_those_of_the_cpu(cpu: Service, gpu: Service) -> None:
    before = [[counted(service, name) for name in SERIES] for service in (cpu, gpu)]
    orders = many(20)
    found = ends(pieces_of(gpu, orders))
    assert found == ends(pieces_of(cpu, orders))
    assert {reason for _, reason, _ in found} == {"length", "stop"}
    after = [[counted(service, name) for name in SERIES] for service in (cpu, gpu)]
    more = [
        [{key: now[key] - then[key] for key in now} for then, now in zip(*sides, strict=True)]
        for sides in zip(before, after, strict=True)
    ]
    assert more[0] == more[1]
    assert sum(more[0][0].values()) >= 4
    assert more[0][1][()] > 0
    assert gpu.engine._graph.cache.held_bytes() == 0


def test_greedy_tokens_are_those_of_transformers(gpu: Service, model: Path) -> None:
    count, words = 12, token_bytes(model)
    wanted = by_transformers(model, [list(prompt) for prompt in PROMPTS], count)
    texts = [b"".join(words[token] for token in tokens).decode(errors="replace") for tokens in wanted]
    assert all(2 not in tokens for tokens in wanted), "no text ends by itself"
    found = ends(pieces_of(gpu, [Order(prompt, count, Draw(), 0) for prompt in PROMPTS]))
    assert [text for text, _, _ in found] == texts


def test_requests_that_come_go_and_give_up_leave_the_others_as_they_are(cpu: Service, gpu: Service) -> None:
    orders = many(16)
    alone = ends(pieces_of(cpu, orders))
    chance, box, live = random.Random(4), Queue[tuple[int, Piece]](), dict[int, Any]()
    texts, kept, waiting = [""] * len(orders), set[int](), list(range(len(orders)))
    while waiting or live:
        for number in waiting[: chance.randrange(3)]:
            waiting.remove(number)
            live[number] = gpu.submit(orders[number], lambda piece, n=number: box.put((n, piece)))
        if live:
            number, piece = box.get(timeout=60)
            if number not in live:
                continue
            texts[number] += piece.text
            assert not piece.error
            if piece.finish:
                kept.add(number)
                del live[number]
            elif chance.random() < 0.1:
                gpu.engine.cancel(live.pop(number))
    assert len(kept) > len(orders) // 2
    assert len(kept) < len(orders)
    assert {n: texts[n] for n in kept} == {n: alone[n][0] for n in kept}


def test_a_step_is_launched_before_the_one_before_is_read_and_none_too_many(gpu: Service) -> None:
    device = gpu.engine._graph._device
    del device.trace[:]
    ((text, reason, tokens),) = ends(pieces_of(gpu, [Order(PROMPTS[0], 6, Draw(), 0)]))
    assert (reason, tokens) == ("length", 6)
    assert text
    assert device.trace == ["launch", *["launch", "wait"] * 5, "wait"]


def test_log_probabilities_are_those_of_the_cpu_also_where_a_token_is_banned(
    cpu: Service, gpu: Service
) -> None:
    draws = [
        Draw(logprobs=3),
        Draw(logprobs=0, temperature=0.8, seed=5),
        Draw(logprobs=2, repetition_penalty=1.5),
    ]
    orders = [Order(PROMPTS[n], 6, draw, n % 2) for n, draw in enumerate(draws)]
    both = [pieces_of(service, orders) for service in (cpu, gpu)]
    for one, other in zip(*both, strict=True):
        mine, theirs = ([item for piece in pieces for item in piece.logprobs] for pieces in (one, other))
        assert [item.data for item in mine] == [item.data for item in theirs]
        assert len(mine) == 6
        for a, b in zip(mine, theirs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [x.data for x in a.top] == [x.data for x in b.top]


def test_a_client_s_stop_string_cuts_the_text_and_not_what_the_rules_append(
    cpu: Service, gpu: Service
) -> None:
    whole = ends(pieces_of(cpu, [Order(PROMPTS[2], 12, Draw(), 1)]))[0][0]
    stop = whole.removesuffix(" END")[4:6]
    orders = [Order(PROMPTS[2], 12, Draw(), profile, (stop,)) for profile in (1, 0)]
    found = ends(pieces_of(gpu, orders))
    assert found == ends(pieces_of(cpu, orders))
    assert found[0][0] == whole[: whole.index(stop)] + " END"


def test_what_chats_begin_with_is_read_once_and_copied(cpu: Service, gpu: Service) -> None:
    prefix = gpu.prompts.prefix()
    assert gpu.engine._graph._prefix == tuple(prefix)
    assert gpu.engine._graph.kept_bytes > 0
    orders = [Order((*prefix, *PROMPTS[4]), 5, Draw(), 0), Order((*prefix[:-1], 9), 5, Draw(), 0)]
    assert ends(pieces_of(gpu, orders)) == ends(pieces_of(cpu, orders))


def test_long_prompts_meet_the_longer_graphs(cpu: Service, gpu: Service) -> None:
    spans = sorted({span for _, span in gpu.engine._graph.shapes})
    assert len(spans) == 2
    prompt = tuple(20 + n * 7 % 300 for n in range(spans[0] - 3))
    orders = [Order(prompt, 6, Draw(), 0)]  # its steps begin in one graph and end in the other
    assert ends(pieces_of(gpu, orders)) == ends(pieces_of(cpu, orders))


def test_no_number_is_left_in_a_row_for_the_next_text(gpu: Service) -> None:
    """Attention would multiply it by 0, and 0 times NaN is NaN."""
    pool = gpu.engine._graph.cache.pool
    with torch.inference_mode():
        for layer in pool.layers:
            layer.fill_(float("nan"))
    found = ends(pieces_of(gpu, [Order(PROMPTS[n], 3, Draw(), 0) for n in range(4)]))
    assert all(text and tokens == 3 for text, _, tokens in found)


def test_tables_are_bound_as_the_simulator_binds_them(gpu: Service) -> None:
    """The simulator's binding is that which was compared with the plain executors."""
    graph = gpu.engine._graph
    tables = SimulatedTables(
        graph._tables.machine.table, graph._tables.bans, graph._tables.vocab, graph._sizes.eos_ids
    )
    for name, value in table_buffers(tables).items():
        if isinstance(value, int):
            assert graph._buffers.values[name] == value, name
        else:
            found = graph._buffers.tensors[name].numpy()
            assert found.tobytes() == value.tobytes(), name
            assert graph._buffers.values[name] == found.ctypes.data
    assert set(table_buffers(tables) | slot_buffers(tables, 1, 1)) - {"slots"} <= set(graph._buffers.values)


@pytest.fixture
def image(model: Path, tmp_path: Path) -> Image:
    return for_cuda(make_image(tmp_path / "root", model, PROFILES, engine=SIZES))


def test_without_a_driver_the_server_says_so_and_does_not_start_again(image: Image) -> None:
    status, log = refused(image)
    assert status == 84
    assert "libcuda.so.1: cannot be loaded" in log
    assert "docker run --gpus all" in log
    assert "worker died" not in log


def test_a_driver_that_fails_ends_the_worker_and_another_one_is_tried(image: Image, stub: Stub) -> None:
    env = {"LD_LIBRARY_PATH": str(Path(stub.path).parent), "STUB_FAIL": "cuDevicePrimaryCtxRetain"}
    runtime = Runtime(image, env)
    try:
        while runtime.log.count("start failed error=DriverError") < 2:
            assert runtime.process.poll() is None, runtime.log
            time.sleep(0.05)
        assert 'worker died how="status 88"' in runtime.log
        assert "cuDevicePrimaryCtxRetain failed with CUDA_ERROR_OUT_OF_MEMORY" in runtime.log
    finally:
        runtime.close()


@pytest.mark.parametrize(("failure", "status"), [(DriverError("an illegal memory access"), 88), (None, 1)])
def test_a_worker_whose_loop_has_ended_ends_with_the_status_of_the_reason(
    failure: DriverError | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = SimpleNamespace(alive=False, failure=failure)
    service = SimpleNamespace(
        engine=ended, info=dict, bundle=SimpleNamespace(engine=SimpleNamespace(idle_unload=0))
    )
    monkeypatch.setattr(worker, "_load", lambda _line, _settings: service)
    heard = threading.Event()
    monkeypatch.setattr(
        worker.os, "_exit", lambda _status: heard.set()
    )  # its listener's, at the socket's end
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs:
            assert worker.main([str(os.dup(theirs.fileno()))]) == status
        assert heard.wait(30)  # before `_exit` is the real one again
    finally:
        signal.signal(signal.SIGINT, before)
        gc.unfreeze()


def test_a_cubin_for_other_devices_is_refused_before_torch_is_imported(image: Image, stub: Stub) -> None:
    image.rewrite(
        kernels=tuple(
            replace(item, objects=(replace(item.objects[0], arch="sm_90"),)) for item in image.bundle.kernels
        )
    )
    status, log = refused(image, {"LD_LIBRARY_PATH": str(Path(stub.path).parent)})
    assert status == 84
    assert "needs a cubin that runs on sm_80, found sm_90" in log


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: an illegal memory access was encountered\nCompile with ...", DriverError),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", DriverError),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
    ],
)
def test_errors_of_the_device_are_told_from_ours(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=text.partition("\n")[0].partition("`")[0]) as caught, cuda_errors():
        raise RuntimeError(text)
    assert isinstance(caught.value, DriverError) == (kind is DriverError)
    with pytest.raises(torch.cuda.OutOfMemoryError), cuda_errors():
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("settings", "free", "message"),
    [
        ((128, 4096), 64 << 20, r"texts of 4096 tokens \d+ MiB; 64 MiB of the device are free"),
        ((1, 300), 1 << 20, "0 MiB"),
    ],
)
def test_what_does_not_fit_into_the_device_is_refused_with_numbers(
    image: Image, settings: tuple[int, int], free: int, message: str
) -> None:
    image.rewrite(engine=EngineSizes(*settings, "float32"))
    checked = check_files(Settings(root=str(image.root)))
    spec = read_spec(json.loads(checked.files["config.json"]))
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        require_memory(checked, spec, 0 if settings[0] == 1 else free)
    assert "max_batch_size" in caught.value.hint
    rows = settings[0] * -(-(settings[1] + 1) // 64) * 64
    cache = rows * 2 * spec.layers * spec.kv_heads * spec.dim * 4
    require_memory(checked, spec, checked.manifest.parameters * 4 + cache)


@pytest.mark.parametrize(
    ("text", "size", "tail", "parts"),
    [
        (b"ab END", 6, b" END", (b"ab", b" END")),
        (b"ab", 2, b"", (b"ab", b"")),
        (b"AB end", 6, b" END", (b"AB end", b"")),  # a user's kernel has been there
        (b"x" * 4096, 4098, b" END", (b"x" * 4094, b" END")),
        (b"x" * 4096, 9000, b" END", (b"x" * 4096, b" END")),
    ],
)
def test_the_end_of_a_text_is_parted_from_what_the_rules_append(
    text: bytes, size: int, tail: bytes, parts: tuple[bytes, bytes]
) -> None:
    assert _split(Line(2, 1, -1, size, 0, 0, 0, text), tail) == parts


# The device of memory itself: what a GPU would punish, made on purpose


@pytest.fixture
def device(stub: Stub) -> Iterator[StubDevice]:
    stub.reset()
    stub.call("cuInit", 0)
    driver = cuda_device.Driver(library=stub.path)
    yield StubDevice(stub)
    driver.release()


def test_a_replay_sees_new_contents_and_no_decision_of_the_host(device: StubDevice) -> None:
    source, target = torch.tensor([1.0, 2.0]), torch.zeros(2)
    factor = 3.0
    with device.active():
        replay = device.capture(lambda: target.copy_((source * factor).relu()))
        factor = 100.0
        source.copy_(torch.tensor([-5.0, 7.0]))
        replay()
    assert target.tolist() == [0, 21]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x[0].item(), lambda x: torch.tensor([1, 2]), lambda x: x.nonzero(),
        lambda x: bool(x.any()),
    ],
)  # fmt: skip
def test_a_capture_that_waits_for_the_device_fails(device: StubDevice, mistake: Any) -> None:
    with pytest.raises(DriverError, match="not permitted when stream is capturing"), device.active():
        device.capture(lambda: mistake(torch.ones(3)))


def test_what_the_device_copies_is_garbage_until_it_is_waited_for(device: StubDevice) -> None:
    host, source = device.pinned(2, dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    device.fetch(host, source)
    wait = device.mark()
    source.fill_(9)
    assert host.tolist() != [4, 5]
    wait()
    assert host.tolist() == [4, 5]
