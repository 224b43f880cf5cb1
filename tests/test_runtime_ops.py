"""Supervisor and worker as an operator meets them: kill -9, unload and wake, keys, sockets, process 1."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from runtime_fixtures import Image, Runtime, make_image, make_model, running

from ralbuild.contract import places
from ralbuild.contract.bundle import Engine
from ralbuild.runtime import supervisor
from ralbuild.runtime.exposition import ServerMetrics
from ralbuild.runtime.keys import KeyFile
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.wire import pack

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me about France."}],
    "temperature": 0,
    "max_tokens": 5,
}
ADMIN = {"authorization": "Bearer top secret"}
UNSHARE = ("unshare", "--map-root-user", "--pid", "--net", "--mount-proc", "--kill-child", "--fork")
KEY = {"authorization": "Bearer sk-one"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    model = make_model(tmp_path_factory.mktemp("tiny") / "model")
    engine = Engine(4, 512, "float32")
    return make_image(tmp_path_factory.mktemp("image") / "root", model, engine=engine)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "admin").write_text("top secret\n")
    (folder / "keys").write_text("# team one\nsk-one\n\nsk-two\n")
    return {
        "RAL_THREADS": "1",
        "RAL_ADMIN_TOKEN_FILE": str(folder / "admin"),
        "RAL_API_KEYS_FILE": str(folder / "keys"),
        "RAL_METRICS_COMPAT": "vllm",
    }


@pytest.fixture(scope="module")
def runtime(image: Image, env: dict[str, str]) -> Iterator[Runtime]:
    with running(image, env) as started:
        yield started


def children(process: int) -> list[int]:
    return [int(item) for item in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def worker_of(runtime: Runtime) -> int:
    """The one child whose command line says so."""
    found = [
        child
        for child in children(runtime.process.pid)
        if b"ralbuild.runtime.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(found) == 1
    return found[0]


def resident(process: int) -> int:
    text = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def samples(runtime: Runtime) -> dict[str, float]:
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(runtime.get("/metrics")[1].decode()):
        for sample in family.samples:
            labels = "".join(f",{key}={value}" for key, value in sorted(sample.labels.items()))
            out[sample.name + labels] = sample.value
    return out


def wait_for(check: Callable[[], Any]) -> None:
    while not check():
        time.sleep(0.02)


def open_request(runtime: Runtime, fields: dict[str, Any]) -> http.client.HTTPConnection:
    where = urlsplit(runtime.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | fields), KEY)
    return connection


# Order matters within this file: the module's runtime is killed and unloaded, and must be whole after each test.


def test_a_killed_worker_ends_streams_with_an_error_and_the_next_request_is_served(runtime: Runtime) -> None:
    before = samples(runtime)
    stream = open_request(runtime, {"max_tokens": 480, "stream": True}).getresponse()
    whole = open_request(runtime, {"max_tokens": 480})
    stream.read(10)
    wait_for(lambda: samples(runtime)["ralbuild_requests_running"] == 2)
    os.kill(worker_of(runtime), signal.SIGKILL)
    last = stream.read().strip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    answer = whole.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "worker_lost")
    assert answer.headers["retry-after"] == "1"
    status, body = runtime.get("/ready")
    assert (status, json.loads(body)["stage"] in ("restarting", "check", "import")) == (503, True)
    assert runtime.get("/health")[0] == 200
    refused = runtime.post("/v1/chat/completions", CHAT, KEY)
    assert (refused[0], refused[1]["error"]["code"]) == (503, "model_loading")
    runtime.wait_ready()
    assert runtime.post("/v1/chat/completions", CHAT, KEY)[0] == 200
    after = samples(runtime)
    assert after["ralbuild_worker_restarts_total"] == before["ralbuild_worker_restarts_total"] + 1
    assert after["ralbuild_prompt_tokens_total"] > before["ralbuild_prompt_tokens_total"]


class DyingWorker:
    """A worker that is killed at once, ``served`` or while it still loads."""

    started = 0

    def __init__(self, *, served: bool = False) -> None:
        DyingWorker.started += 1
        self.pid = 0
        self.connection, theirs = socket.socketpair()
        with theirs:
            if served:
                theirs.sendall(pack({"say": "ready", "info": {"model": "m"}, "idle_unload": 0}))

    def resident(self) -> dict[str, int]:
        return {}

    def wait(self, _seconds: float) -> int:
        return -signal.SIGKILL

    def end(self) -> int:
        return self.wait(0)


@pytest.mark.parametrize("served", [True, False])
def test_a_worker_that_dies_again_and_again_ends_the_service_after_bounded_waits(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    pause = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await pause(0)

    def make() -> Any:
        return DyingWorker(served=served)

    monkeypatch.setattr(supervisor, "WorkerProcess", make)
    monkeypatch.setattr(DyingWorker, "started", 0)

    async def run() -> None:
        keeper = supervisor.Supervisor(make(), lifecycle, ServerMetrics(), None)
        monkeypatch.setattr(asyncio, "sleep", note)
        keeper.begin()
        while lifecycle.failure is None:
            await pause(0.01)
        keeper.close()

    lifecycle = Lifecycle()
    asyncio.run(run())
    assert lifecycle.failure is not None
    assert lifecycle.failure.exit_code == 86
    assert waits == [0, 1, 2, 5, 10]
    assert DyingWorker.started == 6


def test_unloaded_memory_is_back_at_the_baseline_and_a_request_wakes_the_model(runtime: Runtime) -> None:
    first = runtime.post("/v1/chat/completions", CHAT, KEY)[1]["choices"]
    loaded = resident(worker_of(runtime)) + resident(runtime.process.pid)
    status, found, _ = runtime.post("/ral/unload", {}, ADMIN)
    assert (status, found["stage"], found["wakeable"]) == (200, "unloaded", True)
    assert children(runtime.process.pid) == []
    baseline = samples(runtime)["ralbuild_memory_bytes,kind=supervisor_baseline"]
    now = resident(runtime.process.pid)
    assert abs(now - baseline) < 5_000_000
    released = samples(runtime)["container_cuda_mem_advise_zeroed_bytes"]
    assert released == found["released_bytes"]
    assert abs(released - (loaded - now)) < 5_000_000
    assert runtime.get("/ready")[0] == 200
    before = samples(runtime)
    assert before["ralbuild_requests_running"] == before["ralbuild_model_loaded"] == 0
    # The request waits; beside it the probes go on to answer.
    waiting = open_request(runtime, {})
    wait_for(lambda: json.loads(runtime.get("/ready")[1])["stage"] != "unloaded")
    assert runtime.get("/ready")[0] == 200
    assert json.loads(waiting.getresponse().read())["choices"] == first
    after = samples(runtime)
    assert after["container_cuda_mem_advise_zeroed_bytes"] == 0
    assert after["ralbuild_wake_seconds_count"] == before["ralbuild_wake_seconds_count"] + 1
    assert after["ralbuild_generated_tokens_total"] == before["ralbuild_generated_tokens_total"] + 5
    assert after["ralbuild_unloads_total"] == 1


def test_an_unload_lets_what_runs_end_and_what_comes_wait(runtime: Runtime) -> None:
    stream = open_request(runtime, {"max_tokens": 300, "stream": True}).getresponse()
    stream.read(10)
    where = urlsplit(runtime.url)
    unload = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)
    unload.request("POST", "/ral/unload", "", ADMIN)
    wait_for(lambda: "wakeable" in json.loads(runtime.get("/ready")[1]))
    late = open_request(runtime, {})
    assert stream.read().endswith(b"data: [DONE]\n\n")
    assert unload.getresponse().status == 200
    assert late.getresponse().status == 200
    assert runtime.post("/ral/load", {}, ADMIN)[1] == {"stage": "ready", "percent": 100}


def test_only_the_admin_token_may_unload(runtime: Runtime) -> None:
    for headers in ({}, KEY, {"authorization": "Bearer top"}, {"authorization": "Basic top secret"}):
        status, found, answered = runtime.post("/ral/unload", {}, headers)
        assert (status, found["error"]["code"]) == (401, "invalid_admin_token")
        assert answered["www-authenticate"] == "Bearer"
    assert json.loads(runtime.get("/ready")[1])["stage"] == "ready"


def test_without_a_key_only_probes_answer(runtime: Runtime) -> None:
    for path in ("/health", "/ready", "/metrics", "/version", "/v2/health/live", "/v2/health/ready"):
        assert runtime.get(path)[0] == 200
    assert runtime.get("/v2/models/tiny/ready") == (200, b'{"name":"tiny","ready":true}')
    assert runtime.get("/v2/models/other/ready")[0] == 404
    for path in ("/v1/models", "/ral/info", "/v1/nothing"):
        status, body = runtime.get(path)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
    assert runtime.post("/v1/chat/completions", CHAT, {"authorization": "bearer sk-two"})[0] == 200


def test_keys_are_read_again_when_the_file_changes_and_kept_when_it_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n")
    keys = KeyFile(str(path), "RAL_API_KEYS_FILE")
    assert keys.accepts("Bearer one")
    path.write_text("second\n")
    assert keys.accepts("Bearer second")
    assert not keys.accepts("Bearer one")
    path.write_text("# nobody\n")
    assert keys.accepts("Bearer second")
    path.unlink()
    assert keys.accepts("Bearer second")
    assert not keys.accepts(None)
    assert not keys.accepts("Bearer \u00fc")


def test_several_choices_are_what_each_seed_gives_alone(runtime: Runtime) -> None:
    fields = {"temperature": 1.0, "max_tokens": 20}

    def texts(seed: int, **more: Any) -> list[str]:
        _, body, _ = runtime.post("/v1/chat/completions", CHAT | fields | {"seed": seed} | more, KEY)
        assert body["usage"]["completion_tokens"] == 20 * len(body["choices"])
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
        return [choice["message"]["content"] for choice in body["choices"]]

    together = texts(7, n=3)
    assert together == [*texts(7), *texts(8), *texts(9)]
    assert len(set(together)) == 3
    stream = open_request(runtime, fields | {"seed": 7, "n": 3, "stream": True}).getresponse().read()
    found = ["", "", ""]
    events = stream.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            found[choice["index"]] += choice["delta"].get("content", "")
    assert found == together


def test_several_choices_have_the_log_probabilities_that_each_seed_has_alone(runtime: Runtime) -> None:
    fields = {"temperature": 1.0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}

    def choices(seed: int, **more: Any) -> list[dict[str, Any]]:
        asked = CHAT | fields | {"seed": seed} | more
        return list(runtime.post("/v1/chat/completions", asked, KEY)[1]["choices"])

    alone = [choices(seed)[0]["logprobs"]["content"] for seed in (7, 8)]
    together = [choice["logprobs"]["content"] for choice in choices(7, n=2)]
    assert [[token["bytes"] for token in tokens] for tokens in together] == [
        [token["bytes"] for token in tokens] for tokens in alone
    ]
    for one, other in zip(chain(*together), chain(*alone), strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert len(one["top_logprobs"]) == 3
    found: list[list[Any]] = [[], []]
    stream = open_request(runtime, fields | {"seed": 7, "n": 2, "stream": True}).getresponse().read()
    for event in stream.split(b"\n\n")[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            found[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert [[token["bytes"] for token in tokens] for tokens in found] == [
        [token["bytes"] for token in tokens] for tokens in alone
    ]


def test_what_is_kept_for_all_prompts_is_counted_and_gone_when_unloaded(runtime: Runtime) -> None:
    runtime.wait_ready()
    name = "ralbuild_kv_kept_bytes"
    # 2 layers of keys and values, 2 heads of 16 numbers, 4 bytes each, one row of 64 positions.
    assert samples(runtime)[name] == 64 * 2 * 2 * 2 * 16 * 4
    runtime.post("/ral/unload", {}, ADMIN)
    assert samples(runtime)[name] == 0
    runtime.post("/ral/load", {}, ADMIN)
    assert samples(runtime)[name] == 64 * 2 * 2 * 2 * 16 * 4


def test_counters_gauges_and_units_follow_prometheus_rules(runtime: Runtime) -> None:
    runtime.post("/v1/chat/completions", CHAT, KEY)
    text = runtime.get("/metrics")[1].decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        if family.name.startswith(("vllm:", "container_")):  # names of others
            continue
        assert re.fullmatch(r"ralbuild(_[a-z0-9]+)+", family.name)
        assert not re.search(r"_(ms|milliseconds|mb|kb|percent|count|sum|bucket)$", family.name)
        assert family.type != "histogram" or family.name.endswith("_seconds")
        assert family.type == "counter" or not family.name.endswith("_total")
        for sample in family.samples:
            assert family.type != "counter" or sample.name == f"{family.name}_total"
            assert all(re.fullmatch("[a-z_]+", label) for label in sample.labels if label != "le")


def test_every_name_on_the_dashboard_is_exposed(runtime: Runtime) -> None:
    board = json.loads((Path(__file__).parents[1] / "docs" / "grafana.json").read_text())
    text = runtime.get("/metrics")[1].decode()
    families = list(text_string_to_metric_families(text))
    # A counter that has not counted yet has no sample, only its family, and so have a GPU's gauges without one.
    exposed = {sample.name for family in families for sample in family.samples}
    exposed |= {family.name for family in families if family.type == "gauge"}
    exposed |= {f"{family.name}_total" for family in families if family.type == "counter"}
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            found = re.findall(r"\b(?:ralbuild|container)_\w+", target["expr"])
            assert found, target
            asked |= set(found)
    assert asked <= exposed
    own = {name for name in exposed if not name.startswith("vllm:")}
    parts = re.compile("_(sum|count|bucket)$")
    assert {parts.sub("", name) for name in own} == {parts.sub("", name) for name in asked}


def test_vllm_s_names_have_our_values(runtime: Runtime) -> None:
    found = samples(runtime)
    labels = ",engine=0,model_name=tiny"
    assert found[f"vllm:num_requests_running{labels}"] == 0
    assert found[f"vllm:kv_cache_usage_perc{labels}"] == 0
    assert found[f"vllm:generation_tokens_total{labels}"] == found["ralbuild_generated_tokens_total"] > 0
    name = "time_to_first_token_seconds_count"
    assert found[f"vllm:{name}{labels}"] == found[f"ralbuild_{name}"]


def test_a_model_file_changed_while_unloaded_is_refused_at_the_wake(
    image: Image, env: dict[str, str]
) -> None:
    template = image.path(places.MODEL_DIR) / "chat_template.jinja"
    built = template.read_bytes()
    with running(image, {**env, "RAL_IDLE_UNLOAD": "1", "RAL_LOG": "json"}) as runtime:
        wait_for(lambda: json.loads(runtime.get("/ready")[1])["stage"] == "unloaded")
        template.write_bytes(built + b" ")
        try:
            answer = open_request(runtime, {}).getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "worker_lost")
            assert runtime.process.wait(60) == 81
        finally:
            template.write_bytes(built)
        lines = [json.loads(line) for line in runtime.log.splitlines()]
        assert all("time" in line and "event" in line for line in lines)
        (refused,) = [line for line in lines if line["event"] == "refused"]
        assert (refused["exit"], "chat_template.jinja" in refused["reason"]) == (81, True)


def test_nothing_is_written_outside_the_temporary_folder(
    image: Image, env: dict[str, str], tmp_path: Path
) -> None:
    """Every call that opens for writing, makes, renames or removes, from start to end of all processes."""
    trace, scratch = tmp_path / "trace", tmp_path / "scratch"
    scratch.mkdir()
    calls = "openat,open,creat,mkdir,mkdirat,rename,renameat2,unlink,unlinkat,link,linkat,symlink,truncate"
    runtime = Runtime(
        image,
        env | {"TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"},
        prefix=("strace", "-f", "-qq", "--seccomp-bpf", "-z", "-e", f"trace={calls}", "-o", str(trace)),
    )
    try:
        runtime.wait_ready()
        assert runtime.post("/v1/chat/completions", CHAT, KEY)[0] == 200
        (tracee,) = children(runtime.process.pid)
        os.kill(tracee, signal.SIGTERM)
        assert runtime.process.wait(60) == 0
    finally:
        runtime.close()
    changed = [
        line
        for line in trace.read_text().splitlines()
        if re.search(r"O_WRONLY|O_RDWR|O_CREAT|mkdir|rename|unlink|link|truncate", line)
        and not re.search(r'"(/dev/|/proc/self/|' + re.escape(str(scratch)) + ")", line)
    ]
    assert changed == []


def test_what_comes_before_the_server_is_there_is_answered_by_it(image: Image, tmp_path: Path) -> None:
    path = tmp_path / "ral.sock"
    settings = {"RAL_ROOT": str(image.root), "RAL_HOST": f"unix:{path}", "RAL_BUNDLE_SHA256": image.digest}
    process = subprocess.Popen(
        [sys.executable, "-m", "ralbuild.runtime"], env=os.environ | settings, stderr=subprocess.DEVNULL
    )
    try:
        clients = []
        while len(clients) < 3:
            client = socket.socket(socket.AF_UNIX)
            try:
                client.connect(str(path))
                clients.append(client)
            except (FileNotFoundError, ConnectionRefusedError):
                client.close()
        probe, ready, post = clients
        end = b"host: a\r\nconnection: close\r\n"
        probe.sendall(b"GET /health HTTP/1.1\r\n" + end + b"\r\n")
        ready.sendall(b"GET /ready HTTP/1.1\r\n" + end + b"\r\n")
        post.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + end + b"content-length: 2\r\n\r\n{}")
        answers = [client.makefile("rb").read() for client in clients]
        assert [answer.split()[1] for answer in answers] == [b"200", b"503", b"503"]
        assert b"model_loading" in answers[2]
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_process_one_on_a_socket_file_without_a_network_serves_reaps_and_ends(
    image: Image, env: dict[str, str], tmp_path: Path
) -> None:
    """As in `docker run --network none`: namespaces of its own for processes and network."""
    path = tmp_path / "ral.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    settings = {"RAL_ROOT": str(image.root), "RAL_HOST": f"unix:{path}", "RAL_BUNDLE_SHA256": image.digest}
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*UNSHARE, sys.executable, "-m", "ralbuild.runtime"],
            env=os.environ | env | settings,
            stderr=errors,
        )

    def ask(method: str, target: str, body: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("ral")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request(method, target, body, KEY)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    try:
        wait_for(lambda: "listening socket=" in log.read_text())
        wait_for(lambda: ask("GET", "/ready")[0] == 200)
        assert ask("POST", "/v1/chat/completions", json.dumps(CHAT))[0] == 200
        (first,) = children(process.pid)
        (worker,) = children(first)
        assert children(worker) != []
        os.kill(worker, signal.SIGKILL)
        # Its template process becomes a child of process 1, ends, and is collected.
        wait_for(lambda: len(children(first)) == 1 and worker not in children(first))
        os.kill(first, signal.SIGTERM)
        assert process.wait(60) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
