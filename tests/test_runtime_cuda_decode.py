"""The GPU's decode loop on a device made of memory: kernels run from their PTX, graphs are frozen.

What `torch.cuda` and a real driver do is not here. What is: which buffers, in which order, with which
feedback, and that texts, tokens and events are those of the CPU target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import cuda_device
import cuda_stub
import pytest
import torch
from cuda_device import SimulatedDriver, StubDevice, WatchedPool
from cuda_stub import Stub
from runtime_fixtures import Image, Rules, make_image, make_model
from test_runtime_decode import by_transformers

from ralbuild.contract import places
from ralbuild.contract.bundle import Engine as EngineSizes
from ralbuild.contract.bundle import PatchStep
from ralbuild.runtime.boot import boot
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.service import Service
from ralbuild.runtime.settings import Settings

OURS = ("penalize", "sample", "transduce", "feedback")
PROFILES = (
    Rules(),
    Rules(bold="e", append=" END", ban="an"),
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


def for_cuda(image: Image, names: tuple[str, ...] = OURS) -> Image:
    """Turn an image for the CPU into one for GPUs: the same tables, and kernels."""
    chosen = tuple(cuda_stub.kernel(name) for name in names)
    for name in names:
        for data in (cuda_stub.compiled(name).cubin, cuda_stub.compiled(name).ptx):
            (image.path(places.OBJECTS_DIR) / cuda_stub.sha256_hex(data)).write_bytes(data)
    patch = tuple(PatchStep(name, "1" if name == "feedback" else "slots") for name in names)
    image.rewrite(target="cuda", kernels=chosen, patch=patch)
    return image


def on_device(stub: Stub) -> Iterator[None]:
    stub.reset()
    cuda_device.ARRAYS.clear()
    with pytest.MonkeyPatch.context() as patched:
        for kind in (SimulatedDriver, StubDevice, WatchedPool):
            patched.setattr(kind, "stub", stub, raising=False)
        for name in (
            "CUDA_DISABLE_PTX_JIT",
            "CUDA_CACHE_DISABLE",
            "CUDA_MODULE_LOADING",
            "CUDA_FORCE_PTX_JIT",
        ):
            patched.setenv(name, "unset")
        patched.setattr("ralbuild.runtime.cuda.driver.Driver", SimulatedDriver)
        patched.setattr("ralbuild.runtime.cuda.device.Device", StubDevice)
        patched.setattr("ralbuild.runtime.cuda.buffers.Pool", WatchedPool)
        yield
    assert stub.faults == []


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
    device = on_device(stub)
    next(device)
    service = start(image)
    yield service
    service.engine.stop()
    next(device, None)


def collect(service: Service, orders: list[Order]) -> list[list[Piece]]:
    """Submit all and wait for all; pieces by request."""
    box: Queue[tuple[int, Piece]] = Queue()
    for number, item in enumerate(orders):
        service.submit(item, lambda piece, number=number: box.put((number, piece)))
    out: list[list[Piece]] = [[] for _ in orders]
    while not all(pieces and (pieces[-1].finish or pieces[-1].error) for pieces in out):
        number, piece = box.get(timeout=120)
        out[number].append(piece)
    return out


def ends(found: list[list[Piece]]) -> list[tuple[str, str, int]]:
    return [("".join(p.text for p in pieces), pieces[-1].finish, pieces[-1].tokens) for pieces in found]


def test_texts_of_many_requests_are_those_of_the_cpu(cpu: Service, gpu: Service) -> None:
    draws = [
        Draw(),
        Draw(temperature=0.9, seed=3),
        Draw(temperature=1.2, top_k=9, top_p=0.8, seed=4),
        Draw(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2),
        Draw(logit_bias=((50, 3.0), (70, -100.0)), temperature=0.7, min_p=0.05, seed=1 << 63),
    ]
    orders = [
        Order(
            PROMPTS[number % len(PROMPTS)], 3 + number % 9, draws[number % len(draws)], number % len(PROFILES)
        )
        for number in range(14)
    ]
    assert ends(collect(gpu, orders)) == ends(collect(cpu, orders))
