"""On a GPU: what tests/test_runtime_cuda_decode.py proves of the wiring, with `torch.cuda` and a driver in it.

`ci/test tests/gpu -m gpu`, on a machine with an NVIDIA GPU (8.0 to 9.0), driver 535 or newer and a torch for
CUDA 12 in the virtual environment. **None of this has run yet.** Figures are in `python -m benchmarks.gpu`.
"""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_fixtures import Image, Runtime, make_image
from simulate_support import ARCHS
from test_runtime_cuda_decode import (  # noqa: F401 - the same tests, over the device of this module
    PROFILES,
    SIZES,
    cpu,
    for_cuda,
    model,
    one_thread,
    start,
    test_a_client_s_stop_string_cuts_the_text_and_not_what_the_rules_append,
    test_greedy_tokens_are_those_of_transformers,
    test_log_probabilities_are_those_of_the_cpu_also_where_a_token_is_banned,
    test_long_prompts_meet_the_longer_graphs,
    test_no_number_is_left_in_a_row_for_the_next_text,
    test_requests_that_come_go_and_give_up_leave_the_others_as_they_are,
    test_texts_and_counts_of_many_requests_are_those_of_the_cpu,
    test_what_chats_begin_with_is_read_once_and_copied,
)

from ralbuild.contract.archs import runs_on
from ralbuild.runtime.cuda.driver import Driver
from ralbuild.runtime.errors import DriverError
from ralbuild.runtime.service import Service

pytestmark = pytest.mark.gpu


def device_arch() -> str:
    """The newest architecture of ours that the first device runs."""
    driver = Driver()
    fits = [arch for arch in ARCHS if runs_on(arch, driver.capability)]
    driver.release()
    assert fits, f"no kernel of ours runs on {driver.capability}"
    return fits[-1]


@pytest.fixture(scope="module")
def image(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:  # noqa: F811
    root = tmp_path_factory.mktemp("gpu") / "root"
    return for_cuda(make_image(root, model, PROFILES, engine=SIZES), device_arch())


@pytest.fixture(scope="module")
def gpu(image: Image) -> Iterator[Service]:
    """Started by `boot`, so every captured graph has agreed with the oracle already."""
    service = start(image)
    yield service
    service.engine.stop()


def test_the_transducer_on_the_device_writes_the_bytes_of_the_plain_executor(gpu: Service) -> None:
    graph: Any = gpu.engine._graph
    machine, vocab = graph._tables.machine, graph._tables.vocab
    chance = random.Random(6)
    for number in range(300):
        profile = number % len(PROFILES)
        tokens = [chance.randrange(3, len(vocab)) for _ in range(chance.randrange(1, 40))]
        text = b"".join(vocab[token] for token in tokens)
        assert graph.rewrite(profile, tokens) == machine.rewrite(profile, text)[0]


def test_the_same_step_gives_the_same_logits_every_time(gpu: Service) -> None:
    graph: Any = gpu.engine._graph
    found = []
    with graph._device.active():
        for _ in range(3):
            graph._graphs.replay(1, 1)
            found.append(graph.logits(0).tobytes())
    assert len(set(found)) == 1


def test_ptx_is_compiled_by_nobody(gpu: Service) -> None:
    """With the variables set the driver itself refuses it; our door never gets so far."""
    del gpu
    ptx = b".version 8.2\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\0"
    with pytest.raises(DriverError, match="cuModuleLoadDataEx failed"):
        Driver()._call("cuModuleLoadDataEx", ctypes.byref(ctypes.c_void_p()), ptx, 0, None, None)


def used_mib() -> int:
    """Memory in use on the first device, of all processes, as NVML counts it."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_an_unload_gives_the_device_back(image: Image, tmp_path: Path) -> None:
    """Nothing else may use the device meanwhile."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    before = used_mib()
    runtime = Runtime(image, {"RAL_ADMIN_TOKEN_FILE": str(token)})
    try:
        runtime.wait_ready()
        loaded = used_mib()
        status, _, _ = runtime.post("/ral/unload", {}, {"authorization": "Bearer secret"})
        assert status == 200
        deadline = time.monotonic() + 10
        while (unloaded := used_mib()) - before > 5 and time.monotonic() < deadline:
            time.sleep(0.1)
        print(f"MiB before {before}, loaded {loaded}, unloaded {unloaded}")
        assert loaded > before
        assert unloaded - before <= 5
        told = re.search(
            r'ralbuild_gpu_memory_bytes{kind="used".*} (\S+)', runtime.get("/metrics")[1].decode()
        )
        assert told is not None
        assert abs(float(told[1]) / 2**20 - unloaded) <= 5
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert runtime.post("/v1/chat/completions", body)[0] == 200
    finally:
        runtime.close()
