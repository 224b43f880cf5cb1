"""The real base, as users get it: it imports what a server and its models import, and says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from base_sources import Quiet

from ralbuild.contract.places import PACKAGES_DIR
from ralbuild.image.base import ensure_base
from ralbuild.image.base.lockfile import load_lock
from ralbuild.image.base.targets import TARGETS
from ralbuild.image.local_run import prepare_tree, read_run_config
from ralbuild.image.treepython import python_command, python_home

EVERY_FAMILY = """
import importlib, json, pathlib, sys, transformers
models = pathlib.Path(transformers.__file__).parent / "models"
failed, count = {}, 0
for path in sorted(models.glob("*/modeling_*.py")):
    count += 1
    try:
        importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    except ImportError as error:
        failed[path.parent.name] = str(error)
json.dump([count, failed], sys.stdout)
"""


@pytest.fixture(scope="module")
def layout() -> Path:
    return ensure_base("cpu", Quiet())


@pytest.fixture(scope="module")
def tree(layout: Path) -> Path:
    return prepare_tree(layout, Quiet())


def python(tree: Path, code: str) -> Any:
    environment = {
        "PYTHONHOME": python_home(tree),
        "PYTHONPATH": f"{tree}{PACKAGES_DIR}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "HOME": "/nonexistent",
    }
    command = [*python_command(tree), "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_model_family_of_transformers_imports(tree: Path) -> None:
    """The proof for what is pruned and for the dependencies that the lock leaves out."""
    count, failed = python(tree, EVERY_FAMILY)
    assert count > 500
    assert failed == {
        "higgs_audio_v2_tokenizer": "No module named 'torchaudio'"
    }  # nor does transformers ask for it


def test_what_was_left_out_is_not_there(tree: Path) -> None:
    packages = tree / PACKAGES_DIR.lstrip("/")
    present = {path.name.split("-")[0].replace("_", "-").lower() for path in packages.glob("*.dist-info")}
    assert present == {wheel.name for wheel in load_lock("cpu").wheels}
    assert not present & TARGETS["cpu"].unused
    for name in ("torch/include", "torch/test", "torch/share", "torch/bin/protoc", "triton", "pip"):
        assert not (packages / name).exists()
    assert not list(packages.rglob("*.a"))


def test_a_small_model_computes_the_same_as_outside(tree: Path) -> None:
    code = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    out = model.generate(torch.arange(5)[None], max_new_tokens=12, do_sample=False, pad_token_id=0)
json.dump(out.tolist(), sys.stdout)
"""

    outside = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert python(tree, code) == json.loads(outside.stdout)


def test_the_torch_library_has_no_symbol_table_and_all_its_operators(tree: Path) -> None:
    library = tree / PACKAGES_DIR.lstrip("/") / "torch/lib/libtorch_cpu.so"
    assert library.stat().st_size < 360_000_000  # 434 MB in the wheel
    code = "import json, sys, torch; json.dump(len(torch._C._dispatch_get_all_op_names()), sys.stdout)"
    assert python(tree, code) > 2000


def test_the_image_runs_as_an_ordinary_user_without_network_by_default(layout: Path) -> None:
    config = read_run_config(layout)
    assert config["User"] == "65532:65532"
    assert config["WorkingDir"] == "/tmp"
    env = dict(item.partition("=")[::2] for item in config["Env"])
    assert env["PYTHONPATH"] == "/opt/ral/app:/opt/ral/packages"
    assert {name for name, value in env.items() if value == "1"} == {
        "HF_HUB_OFFLINE",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONUNBUFFERED",
        "TRANSFORMERS_OFFLINE",
    }


def test_other_tools_read_its_labels(layout: Path) -> None:
    done = subprocess.run(["skopeo", "inspect", f"oci:{layout}"], capture_output=True, text=True, check=True)
    labels = json.loads(done.stdout)["Labels"]
    lock = load_lock("cpu")
    prefix = "io.ralbuild.base."
    assert labels[f"{prefix}contract"] == "1"
    assert labels[f"{prefix}target"] == "cpu"
    assert labels[f"{prefix}lock"] == lock.sha256
    assert labels[f"{prefix}torch"] == lock.version("torch")
    assert labels[f"{prefix}transformers"] == lock.version("transformers")
