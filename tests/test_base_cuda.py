"""What the base for CUDA says of itself and leaves out; its packages are stand-ins here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from base_sources import FACTS
from cli_support import write_fake_base
from wheel_factory import make_wheel

from ralbuild.contract.places import PACKAGES_DIR
from ralbuild.errors import ImageError
from ralbuild.image.base.layers import plan_base
from ralbuild.image.base.lockfile import load_lock
from ralbuild.image.base.prune import keeps
from ralbuild.image.base.tree import Facts, proof_program
from ralbuild.image.base.wheel import unpack_wheel
from ralbuild.image.planning import check_base
from ralbuild.image.reader import read_base
from ralbuild.pins import load_pins

LIBRARIES = {
    "nvidia_cublas_cu12": ("nvidia/cublas/lib/libcublas.so.12", "nvidia/cublas/include/cublas.hxx"),
    "nvidia_cuda_nvrtc_cu12": (
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.2",
    ),
}
"""Of each wheel, a file that is kept and one that is not."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two of NVIDIA's wheels, each with the same ``nvidia/__init__.py``, a torch and a server."""
    tree = tmp_path / "tree"
    packages = tree / PACKAGES_DIR.lstrip("/")
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/dash").write_bytes(b"")
    wheels = {
        name: {"nvidia/__init__.py": b"", **dict.fromkeys(files, b"x")} for name, files in LIBRARIES.items()
    }
    wheels |= {"torch": {"torch/__init__.py": b""}, "server": {"server.py": b""}}
    for name, files in wheels.items():
        path = make_wheel(tmp_path, name, files)
        unpack_wheel(path, packages, keeps(name.replace("_", "-")), lambda _: None)
    return tree


def test_nvidias_wheels_share_a_file_and_do_not_collide(tree: Path) -> None:
    packages = tree / PACKAGES_DIR.lstrip("/")
    for kept, left in LIBRARIES.values():
        assert (packages / kept).is_file()
        assert not (packages / left).exists()
    assert not (packages / "nvidia/__init__.py").exists()


def test_cuda_has_a_layer_of_its_own_and_the_labels_say_its_version(tree: Path) -> None:
    plan = plan_base(tree, "cuda", load_lock("cuda"), FACTS)
    names = [layer.name for layer in plan.layers]
    assert names[1:3] == ["CUDA 12.2.2", "torch none"]
    folders = {entry.path.split("/")[3].partition("_")[0] for entry in plan.layers[1].entries}
    assert folders == {"nvidia"}
    labels = plan.config.labels
    assert labels["io.ralbuild.base.cuda"] == load_pins().cuda.version
    assert (labels["io.ralbuild.base.target"], labels["io.ralbuild.base.contract"]) == ("cuda", "1")
    assert labels["io.ralbuild.base.lock"] == load_lock("cuda").sha256
    env = dict(plan.config.env)
    assert (env["NVIDIA_VISIBLE_DEVICES"], env["NVIDIA_REQUIRE_CUDA"]) == ("all", "cuda>=12.2")


def test_a_base_for_the_cpu_says_nothing_of_cuda(tree: Path) -> None:
    plan = plan_base(tree, "cpu", load_lock("cpu"), FACTS)
    assert not [name for name in plan.config.labels if "cuda" in name]
    assert not [name for name, _ in plan.config.env if "NVIDIA" in name]


GOOD = {
    "python": "3.11.2",
    "torch": "2.4.1+cu121",  # what PyPI's build of torch 2.4.1 calls itself
    "transformers": "4.57.6",
    "a sum of 64 ones": "64",
    "CUDA runtime": "12.2",
    "NVRTC's refusal to compile at run time": "7",  # nvrtc.h: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, ""),
        ({"CUDA runtime": "12.4"}, "CUDA runtime is 12.4, it should be 12.2"),
        ({"NVRTC's refusal to compile at run time": "0"}, "at run time is 0, it should be 7"),
        ({"torch": "2.4.0+cu121"}, "torch is 2.4.0+cu121, it should be 2.4.1"),
        ({"a sum of 64 ones": "63"}, "a sum of 64 ones is 63"),
    ],
)
def test_the_proof_compares_what_was_found_with_what_the_base_says(found: dict[str, str], said: str) -> None:
    facts = Facts("3.11.2", "2.4.1", "4.57.6", "12.5", "12.2.2")
    _, _, comparison = proof_program(facts).partition("needed = ")
    program = f"import sys\nfound = {GOOD | found!r}\nneeded = {comparison}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert bool(done.returncode) == bool(said)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({}, "does not say its cuda"),
        ({"io.ralbuild.base.cuda": "12.4.1"}, "has CUDA 12.4.1, kernels are compiled for 12.2.2"),
        ({"io.ralbuild.base.cuda": "12.20.0"}, "has CUDA 12.20.0"),
    ],
)
def test_a_base_of_another_cuda_is_refused(labels: dict[str, str], said: str, tmp_path: Path) -> None:
    target = {"io.ralbuild.base.target": "cuda"}
    write_fake_base(tmp_path / "other", **target, **labels)
    with pytest.raises(ImageError, match=said):
        check_base(read_base(tmp_path / "other"), "cuda")
    write_fake_base(tmp_path / "good", **target, **{"io.ralbuild.base.cuda": "12.2.2"})
    check_base(read_base(tmp_path / "good"), "cuda")
