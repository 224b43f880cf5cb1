"""`image --target cuda` on a small stand-in for the base: labels, refusals, and the image started on a device made
of memory. The base itself, 4.5 GB, has tests of its own (test_base_cuda.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import cuda_stub
import pytest
import torch
from cli_support import NO_KERNELS, ralbuild, write_fake_base
from cuda_device import know, on_device
from cuda_stub import Stub
from runtime_fixtures import make_model, store_as

from ralbuild.contract import places
from ralbuild.contract.bundle import read_bundle
from ralbuild.errors import HostError
from ralbuild.image.local_run import prepare_tree
from ralbuild.release import preflight
from ralbuild.runtime.boot import boot
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.orders import Order, Piece
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.settings import Settings

CONFIG = """\
version: "0.3"
model: tiny
max_batch_size: 2
max_seq_len: 200
runtime: {dtype: float32}
build: {targets: [sm_80]}
actions:
  careful: {redact: [{pattern: "[aeiou]{2}", with: "[vowels]"}], append: " That is all.", ban: ["th"]}
routing: {rules: [{match: "safe", action: careful, priority: 1}]}
postprocessing:
  output_transformers:
    - {name: html_enhancer, config: {bold_terms: ["the"]}}
    - {name: shout, config: {shift: 32}}
"""
SHOUT = """\
import triton
import triton.language as tl


@triton.jit
def shout_kernel(output_ptr: "*u8", output_len: "*i32", shift: "i32", ROW: tl.constexpr = 4096):
    slot = tl.program_id(0)
    at = tl.arange(0, ROW)
    here = at < tl.load(output_len + slot)
    row = output_ptr + slot * ROW
    text = tl.load(row + at, mask=here, other=0)
    small = (text >= 97) & (text <= 122)
    tl.store(row + at, tl.where(small, text - shift, text).to(tl.uint8), mask=here)
"""
CUDA_BASE = {"io.ralbuild.base.target": "cuda", "io.ralbuild.base.cuda": "12.2.2"}


@dataclass(frozen=True)
class Built:
    work: Path
    said: str

    @property
    def layout(self) -> str:
        return f"oci:{self.work / 'ral-image'}"

    def config(self) -> dict:
        done = subprocess.run(
            ["skopeo", "inspect", "--config", self.layout], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)["config"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    work = tmp_path_factory.mktemp("build")
    make_model(work / "model")
    write_fake_base(work / "base", **CUDA_BASE)
    (work / "ral-config.yaml").write_text(CONFIG)
    (work / "transformers").mkdir()
    (work / "transformers/shout.py").write_text(SHOUT)
    done = ralbuild("image", "--target", "cuda", "--model", "model", "--base", "oci:base", cwd=work)
    assert done.code == 0, done.err
    return Built(work, done.err)


@pytest.fixture(scope="module")
def tree(built: Built) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(built.work / "run"))
        return prepare_tree(built.work / "ral-image", Silent())


class Silent:
    def step(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, done: int, total: int, unit: str) -> None: ...


def test_labels_say_before_a_pull_what_a_host_needs(built: Built) -> None:
    labels = built.config()["Labels"]
    wanted = {
        "io.ralbuild.target": "cuda",
        "io.ralbuild.cuda.archs": "sm_80",
        "io.ralbuild.cuda.version": "12.2.2",
        "io.ralbuild.cuda.driver": "535.129",
        "io.ralbuild.dtype": "float32",
    }
    assert {name: labels[name] for name in wanted} == wanted
    # 2 layers, 2 key heads of 16 and as many values, 256 positions a row, 2 rows, 4 bytes; and the weights.
    parameters = int(labels["io.ralbuild.model.parameters"])
    assert int(labels["io.ralbuild.cuda.memory"]) == 4 * parameters + 2 * 256 * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("stored", "bytes_each"), [(torch.bfloat16, 2), (torch.float16, 2), (torch.float32, 4)]
)
def test_an_image_for_processors_says_that_two_bytes_stay_two(
    tmp_path: Path, stored: torch.dtype, bytes_each: int
) -> None:
    """Computed in float32 all three; `ralbuild.runtime.model.linear` has why."""
    store_as(make_model(tmp_path / "model"), stored)
    write_fake_base(tmp_path / "base")
    (tmp_path / "ral-config.yaml").write_text(f'version: "0.3"\nmodel: tiny\nmax_seq_len: 200\n{NO_KERNELS}')
    done = ralbuild("image", "--model", "model", "--base", "oci:base", cwd=tmp_path)
    assert done.code == 0, done.err
    labels = Built(tmp_path, done.err).config()["Labels"]
    assert labels["io.ralbuild.dtype"] == "float32"
    elements = bytes_each * int(labels["io.ralbuild.model.parameters"])
    assert elements <= int(labels["io.ralbuild.weights.memory"]) <= elements + 4096  # a file has a header


def test_the_driver_is_told_to_compile_nothing(built: Built) -> None:
    env = dict(item.split("=", 1) for item in built.config()["Env"])
    assert env["CUDA_DISABLE_PTX_JIT"] == env["CUDA_CACHE_DISABLE"] == "1"


def test_inspect_shows_the_driver_and_the_architectures(built: Built) -> None:
    done = ralbuild("inspect", built.layout, cwd=built.work)
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    assert "GPU driver 535.129 or newer" in shown
    assert "MiB of the GPU's memory" in shown
    assert "for sm_80" in done.out


def test_the_launcher_of_the_image_refuses_a_host_without_a_driver(tree: Path) -> None:
    env = {"RAL_ROOT": str(tree), "RAL_HOST": "127.0.0.1", "RAL_PORT": "0", "PATH": ""}
    code = f"{tree}{places.APP_DIR}"
    done = subprocess.run(
        [sys.executable, "-m", "ralbuild.runtime"], cwd="/", env={**env, "PYTHONPATH": code},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 84, done.stderr
    assert "libcuda.so.1: cannot be loaded" in done.stderr
    assert "docker run --gpus all" in done.stderr


def test_the_image_serves_on_a_device_made_of_memory(tree: Path, tmp_path: Path) -> None:
    """Its own kernels, tables and self-tests: 0 wrong bytes, or it would not start."""
    stub = Stub(cuda_stub.build_stub(tmp_path))
    with on_device(stub):
        _know_kernels(tree)
        service = boot(Settings(root=str(tree), threads=1), Lifecycle(), Metrics("0"))
        assert len(service.bundle.self_tests) > 0
        pieces: Queue[Piece] = Queue()
        safe = next(n for n, profile in enumerate(service.bundle.profiles) if profile.name == "careful")
        service.submit(Order(tuple(range(20, 60)), 16, Draw(), safe), pieces.put)
        text = ""
        while not (piece := pieces.get(timeout=60)).finish:
            assert not piece.error
            text += piece.text
        text += piece.text
        service.engine.stop()
    body, end, rest = text.partition(" That is all.")  # what the host appends at a limit, no kernel sees
    assert (end, rest) == (" That is all.", "")
    assert any(char.isupper() for char in body)
    assert not any(char.isascii() and char.islower() for char in body)
    assert "TH" not in body


def _know_kernels(tree: Path) -> None:
    bundle = read_bundle(Path(f"{tree}{places.BUNDLE_FILE}").read_bytes())
    for kernel in bundle.kernels:
        know(kernel, Path(f"{tree}{places.OBJECTS_DIR}/{kernel.objects[0].ptx.sha256}").read_bytes())


def test_a_local_run_says_why_it_cannot(built: Built) -> None:
    done = ralbuild("run", built.layout, "--port", "18080", cwd=built.work)
    assert done.code == 7
    assert "docker run --gpus all" in done.err


def test_a_base_for_processors_is_refused(built: Built) -> None:
    write_fake_base(built.work / "cpu-base")
    done = ralbuild("image", "--target", "cuda", "--model", "model", "--base", "oci:cpu-base", "--output", "oci:x", cwd=built.work)  # fmt: skip
    assert done.code == 6
    assert "is a base for 'cpu'; the image is for 'cuda'" in done.err
    assert not (built.work / "x").exists()


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("gpt2", {}, "no decoder for 'gpt2'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "'linear'"),
    ],
)
def test_a_model_that_only_transformers_runs_is_refused_before_anything_is_written(
    built: Built, tmp_path: Path, family: str, change: dict, reason: str
) -> None:
    make_model(tmp_path / "model", family, **change)
    done = ralbuild(
        "image", "--target", "cuda", "--model", tmp_path / "model", "--base", "oci:base",
        "--config", "ral-config.yaml", "--output", f"oci:{tmp_path / 'out'}", cwd=built.work,
    )  # fmt: skip
    assert done.code == 3
    assert reason in done.err
    assert "--target cpu" in done.err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def say(**rows: str) -> None:
        monkeypatch.setattr(preflight, "_ask_gpus", lambda field: [[row] for row in rows[field].split()])

    return say


def test_a_release_asks_the_first_gpu_by_the_image_s_labels(built: Built, smi: Callable[..., None]) -> None:
    labels = built.config()["Labels"]
    smi(driver_version="550.54.15", compute_cap="8.6 7.5", **{"memory.free": "40000 80000"})
    preflight.check_device(labels)
    assert preflight.free_room("cuda") == preflight.Room(40000 << 20, "VRAM")
    assert preflight.needs_of(labels) == int(labels["io.ralbuild.cuda.memory"]) + preflight.CONTEXT_BYTES
    assert preflight.host_needs_of(labels) < preflight.needs_of(labels)


@pytest.mark.parametrize(
    ("driver", "capability", "reason"),
    [
        ("535.104.05", "8.0", "driver is 535.104.05, the image needs 535.129"),
        ("550.54.15", "7.5", "the GPU is sm_75, the image has kernels for sm_80"),
        ("550.54.15", "10.0", "the GPU is sm_100"),
    ],
)
def test_a_release_to_a_host_that_cannot_run_it_is_refused(
    built: Built, smi: Callable[..., None], driver: str, capability: str, reason: str
) -> None:
    smi(driver_version=driver, compute_cap=capability)
    with pytest.raises(HostError, match=reason):
        preflight.check_device(built.config()["Labels"])


def test_the_same_inputs_give_the_same_digest(built: Built) -> None:
    """Everything comes from the cache; nothing of this machine's is in the image."""
    once = ralbuild("image", "--target", "cuda", "--model", "model", "--base", "oci:base", "--output", "oci:again", cwd=built.work, env={"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"})  # fmt: skip
    assert once.code == 0, once.err
    digests = [
        subprocess.run(
            ["skopeo", "inspect", "--format", "{{.Digest}}", f"oci:{built.work / name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in ("ral-image", "again")
    ]
    assert digests[0] == digests[1] == once.out
