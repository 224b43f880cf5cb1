"""The main job on real weights: build, run as a tree and in docker, ask with the real openai client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import docker
import openai
import pytest
from cli_support import ROOT, write_fake_base
from model_factory import write_model

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ralbuild"
MODEL = CACHE / "models" / "smollm2-135m-instruct"
CONFIG = ROOT / "tests" / "e2e" / "guardrails.yaml"
TAG = "ralbuild-e2e/guardrails:1"
RALBUILD = [sys.executable, "-m", "ralbuild.cli.main"]
QUESTION = [{"role": "user", "content": "What does a compliance audit check? Answer in one sentence."}]
READY_SECONDS = 300

pytestmark = [pytest.mark.real_model, pytest.mark.docker]


def build(folder: Path, *more: object, config: Path = CONFIG, **options: object) -> str:
    command = [*RALBUILD, "image", "--model", str(MODEL), "--config", str(config), "--quiet", *map(str, more)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder with ral-image/ and image.tar, and the digest."""
    assert MODEL.is_dir(), "run ci/fetch_model.py first"
    folder = tmp_path_factory.mktemp("built")
    digest = build(folder, "--output", "oci:ral-image", "--output", "archive:image.tar", "--tag", TAG)
    return folder, digest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(port: int, alive: object, log: object) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert alive(), log()
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5),
        ):
            return
        time.sleep(0.3)
    pytest.fail(f"not ready: {log()}")


@contextlib.contextmanager
def tree(layout: Path, mode: str, log: Path) -> Iterator[int]:
    """Run the image without docker and give its port."""
    port = free_port()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*RALBUILD, "run", f"oci:{layout}", "--mode", mode, "--port", str(port)], stdout=out, stderr=out
        )
    try:
        wait_until_ready(port, lambda: server.poll() is None, log.read_text)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, log.read_text()


@contextlib.contextmanager
def container(archive: Path) -> Iterator[tuple[int, docker.models.containers.Container]]:
    """Load the archive into docker, run it locked down, and give its port."""
    engine = docker.from_env()
    with archive.open("rb") as file:
        (image,) = engine.images.load(file)
    port = free_port()
    running = engine.containers.run(
        image.id,
        detach=True,
        read_only=True,
        tmpfs={"/tmp": ""},
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        network_mode="host",
        environment={"RAL_PORT": str(port), "RAL_HOST": "127.0.0.1"},
    )

    def alive() -> bool:
        running.reload()
        return running.status in ("created", "running")

    try:
        wait_until_ready(port, alive, lambda: running.logs().decode())
        yield port, running
    finally:
        running.stop(timeout=60)
        running.reload()
        status = running.attrs["State"]["ExitCode"]
        logs = running.logs().decode()
        running.remove(force=True)
        engine.images.remove(image.id, force=True)
    assert status == 0, logs


def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300, max_retries=0)


def unary(port: int, route: str = "") -> str:
    headers = {"x-ral-route": route} if route else {}
    answer = client(port).chat.completions.create(
        model="smollm2-135m-instruct", messages=QUESTION, temperature=0, max_tokens=48, extra_headers=headers
    )
    return answer.choices[0].message.content


def streamed(port: int, route: str = "") -> str:
    headers = {"x-ral-route": route} if route else {}
    stream = client(port).chat.completions.create(
        model="smollm2-135m-instruct",
        messages=QUESTION,
        temperature=0,
        max_tokens=48,
        stream=True,
        extra_headers=headers,
    )
    parts, reasons = [], []
    for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "stop"
    return "".join(parts)


def reference_text() -> str:
    """Return transformers' own greedy answer, with nothing of ours in between."""
    code = (
        "import json,sys,torch; from transformers import AutoModelForCausalLM,AutoTokenizer\n"
        f"t=AutoTokenizer.from_pretrained({str(MODEL)!r}); "
        f"m=AutoModelForCausalLM.from_pretrained({str(MODEL)!r},dtype=torch.float32)\n"
        f"x=t.apply_chat_template({QUESTION!r},add_generation_prompt=True,return_tensors='pt',return_dict=True)\n"
        "y=m.generate(**x,do_sample=False,max_new_tokens=48)[0,x['input_ids'].shape[1]:]\n"
        "print(json.dumps(t.decode(y,skip_special_tokens=True)))"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def bolded(text: str) -> str:
    return re.sub(r"\b(risk|compliance|audit)\b", r"<b>\1</b>", text, flags=re.IGNORECASE)


def test_the_answer_is_the_models_own_with_the_rules_applied_in_every_way_to_run_it(
    built, tmp_path: Path
) -> None:
    folder, digest = built
    text = reference_text()
    assert "policies and procedures" in text
    assert "ethics" in text
    plain, guarded = set(), set()
    for mode in ("namespace", "direct"):
        with tree(folder / "ral-image", mode, tmp_path / f"{mode}.log") as port:
            plain |= {unary(port), streamed(port)}
            guarded |= {unary(port, "finance.retail"), streamed(port, "finance.retail")}
        log = (tmp_path / f"{mode}.log").read_text()
        assert re.search(r"RAL patch applied to graph_id=0x[0-9a-f]+ bundle=sha256:[0-9a-f]{64}\n", log)
    with container(folder / "image.tar") as (port, running):
        plain |= {unary(port), streamed(port)}
        guarded |= {unary(port, "finance.retail"), streamed(port, "finance.retail")}
        assert unary(port, "other") in plain
        assert "RAL patch applied to graph_id=0x" in running.logs().decode()
        users = {row[0] for row in running.top()["Processes"]}
        assert "root" not in users
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert "container_cuda_mem_advise_zeroed_bytes" in metrics
    assert plain == {bolded(text)}
    (answer,) = guarded
    assert "policies and procedures" not in answer
    assert "ethics" not in answer
    assert answer.endswith(" [checked]")
    assert "<b>compliance</b>" in answer
    assert digest.startswith("sha256:")


@pytest.fixture
def locked_down(built, tmp_path: Path) -> Iterator[docker.models.containers.Container]:
    """The image in a container whose only door is `tmp_path / "ral" / "ral.sock"`."""
    (tmp_path / "ral").mkdir()
    (tmp_path / "ral").chmod(0o777)
    (tmp_path / "admin").write_text("secret\n")
    engine = docker.from_env()
    with (built[0] / "image.tar").open("rb") as file:
        (image,) = engine.images.load(file)
    container = engine.containers.run(
        image.id,
        detach=True,
        read_only=True,
        network_mode="none",
        user="12345",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        volumes={
            str(tmp_path / "ral"): {"bind": "/run/ral", "mode": "rw"},
            str(tmp_path / "admin"): {"bind": "/run/admin", "mode": "ro"},
        },
        environment={"RAL_HOST": "unix:/run/ral/ral.sock", "RAL_ADMIN_TOKEN_FILE": "/run/admin"},
    )
    try:
        yield container
    finally:
        container.remove(force=True)
        engine.images.remove(image.id, force=True)
        engine.close()


def ask_socket(path: Path, method: str, target: str, body: object = None) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection("ral", timeout=READY_SECONDS)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(READY_SECONDS)
    connection.sock.connect(str(path))
    connection.request(method, target, json.dumps(body), {"authorization": "Bearer secret"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_a_container_with_nothing_but_a_socket_file_serves_unloads_wakes_and_ends(
    locked_down: docker.models.containers.Container, tmp_path: Path
) -> None:
    path = tmp_path / "ral" / "ral.sock"
    deadline = time.monotonic() + READY_SECONDS
    while not path.exists() or ask_socket(path, "GET", "/ready")[0] != 200:
        locked_down.reload()
        assert locked_down.status in ("created", "running"), locked_down.logs().decode()
        assert time.monotonic() < deadline, locked_down.logs().decode()
        time.sleep(0.1)
    question = {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": "What does an audit check?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    status, first = ask_socket(path, "POST", "/v1/chat/completions", question)
    assert status == 200
    status, unloaded = ask_socket(path, "POST", "/ral/unload")
    assert (status, unloaded["stage"]) == (200, "unloaded")
    assert int(str(unloaded["released_bytes"])) > os.stat(MODEL / "model.safetensors").st_size
    assert ask_socket(path, "POST", "/v1/chat/completions", question)[1]["choices"] == first["choices"]
    locked_down.kill(signal.SIGTERM)
    assert locked_down.wait(timeout=60)["StatusCode"] == 0, locked_down.logs().decode()
    assert not path.exists()


def test_docker_skopeo_and_umoci_agree_about_the_image(built, tmp_path: Path) -> None:
    folder, digest = built
    seen = subprocess.run(
        ["skopeo", "inspect", "--raw", f"oci:{folder / 'ral-image'}"], capture_output=True, check=True
    ).stdout
    config = json.loads(seen)["config"]["digest"]
    engine = docker.from_env()
    with (folder / "image.tar").open("rb") as file:
        (image,) = engine.images.load(file)
    try:
        assert image.id == config
        assert TAG in image.tags
        assert image.labels["io.ralbuild.model"] == "smollm2-135m-instruct"
    finally:
        engine.images.remove(image.id, force=True)
    name = f"{folder / 'ral-image'}:{TAG}"
    listed = subprocess.run(
        ["umoci", "stat", "--json", "--image", name], capture_output=True, text=True, check=True
    )
    assert len(json.loads(listed.stdout)["history"]) == len(json.loads(seen)["layers"])
    assert digest


def test_two_builds_under_different_conditions_have_one_digest(built, tmp_path: Path) -> None:
    _, digest = built
    env = {**os.environ, "TZ": "Pacific/Auckland", "PYTHONHASHSEED": "99", "LC_ALL": "C"}
    for path in MODEL.iterdir():
        os.utime(path)  # other file times; the weights are read again for it
    assert build(tmp_path, "--output", "oci:again", "--tag", TAG, env=env, umask=0o077) == digest


def test_a_changed_rule_reads_no_weight_byte_and_moves_only_the_rules(built, tmp_path: Path) -> None:
    folder, _ = built
    before = json.loads(
        subprocess.run(
            ["skopeo", "inspect", "--raw", f"oci:{folder / 'ral-image'}"], capture_output=True, check=True
        ).stdout
    )
    build(
        folder, "--output", "oci:ral-image", "--tag", TAG
    )  # warm: digests of the touched files are known again
    time.sleep(2.1)
    build(folder, "--output", "oci:ral-image", "--tag", TAG)
    config = tmp_path / "ral-config.yaml"
    config.write_text(CONFIG.read_text().replace('"audit"]', '"audit", "law"]'))
    trace = tmp_path / "trace"
    command = [
        "strace",
        "-f",
        "-y",
        "-e",
        "trace=read,readv,pread64,preadv,copy_file_range,mmap,sendfile",
        "-o",
        str(trace),
    ]
    command += [
        *RALBUILD,
        "image",
        "--model",
        str(MODEL),
        "--config",
        str(config),
        "--output",
        "oci:ral-image",
        "--tag",
        TAG,
        "--json",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    header = 8 + int.from_bytes((MODEL / "model.safetensors").open("rb").read(8), "little")
    # Only the header of the weight file is read; the largest read-ahead of a buffered file is 128 KiB.
    weights = re.findall(r"<[^>]*model\.safetensors>.* = (\d+)$", trace.read_text(), re.MULTILINE)
    assert weights
    assert sum(map(int, weights)) < header + (1 << 18)
    assert [layer["name"] for layer in answer["layers"] if not layer["reused"]] == ["rules"]
    assert answer["written"] < 1_000_000
    old = {layer["digest"] for layer in before["layers"]}
    changed = [layer["name"] for layer in answer["layers"] if layer["digest"] not in old]
    assert changed == ["rules"]


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", shards=2)
    size = 8 << 30
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # nothing loads it, so verify lets it be zero
    header = json.dumps({name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    path = model / "big.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = path.name
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "c.yaml").write_text('version: "0.3"\nmodel: m\nmax_seq_len: 256\nbuild: {targets: []}\n')
    base = write_fake_base(tmp_path / "base")
    command = [
        *RALBUILD,
        "image",
        "--model",
        "model",
        "--config",
        "c.yaml",
        "--base",
        base,
        "--output",
        "oci:out",
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    # Linux counts the memory of the process that forked into the child's peak: fork from a small one.
    small = (
        "import os, sys\n"
        "_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)\n"
        "print(usage.ru_maxrss, file=sys.stderr)\n"
        "sys.exit(os.waitstatus_to_exitcode(status))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", small, *command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stderr.splitlines()[-1])
    print(f"peak memory {peak // 1024} MiB for a shard of {size >> 30} GiB")
    assert peak < 300 * 1024
