"""CPU images with user kernels: refused, or with Triton in a layer of its own, and said so everywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, write_fake_base
from interpreted_kernels import HEAD, UPPER
from model_factory import write_model
from wheel_factory import make_wheel

from ralbuild.cli.main import main
from ralbuild.contract.bundle import read_bundle
from ralbuild.image.base import interpreter
from ralbuild.image.base.lockfile import Lock, LockedWheel, load_lock
from ralbuild.image.facts import stored_facts
from ralbuild.image.plan import FileEntry, LayerPlan
from ralbuild.image.reader import open_image
from ralbuild.pins import load_pins

KERNEL = "postprocessing: {output_transformers: [{name: upper}]}\n"
INTERPRET = "runtime: {cpu_user_kernels: interpret}\n"
LIST = {"name": "triton", "version": "3.7.1", "file": "triton-3.7.1.whl", "sha256": ["a" * 64]}
LAYER = LayerPlan(
    "triton-3.7.1",
    "small",
    (
        FileEntry("opt/ral/packages/triton/x.py", b"x"),
        FileEntry("opt/ral/packages/interpreter.json", json.dumps({"debian": [], "wheels": [LIST]}).encode()),
    ),
    ("opt",),
)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, a user kernel, a base; the layer is a stand-in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ralbuild.image.base.interpreter_layer", lambda _: LAYER)
    write_model(tmp_path / "model")
    write_fake_base(tmp_path / "base")
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/upper.py").write_text(UPPER)
    return tmp_path


def build(work: Path, config: str, verb: str = "image", *more: str) -> int:
    (work / "ral-config.yaml").write_text(config)
    base = ["--base", "oci:base"] if verb != "compile" else []
    return main([verb, "--model", "model", "--config", "ral-config.yaml", "--quiet", *base, *more])


def test_without_the_setting_a_user_kernel_is_refused_with_place_and_hint(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(work, MINIMAL + NO_KERNELS + KERNEL) == 2
    said = capsys.readouterr().err
    assert "ral-config.yaml:5:" in said
    assert "'upper' is a user kernel" in said
    assert "cpu_user_kernels: interpret" in said
    assert not (work / "ral-image").exists()


@pytest.mark.parametrize("value", ["true", "compile", "[interpret]"])
def test_another_value_of_the_setting_is_refused(
    work: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(work, MINIMAL + NO_KERNELS + KERNEL + f"runtime: {{cpu_user_kernels: {value}}}\n") == 2
    assert "ral-config.yaml:6:" in capsys.readouterr().err


def test_with_it_the_source_ships_and_labels_and_inspect_say_so(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(work, MINIMAL + NO_KERNELS + KERNEL + INTERPRET) == 0
    assert build(work, MINIMAL + NO_KERNELS + KERNEL + INTERPRET, "compile") == 0
    capsys.readouterr()
    bundle = read_bundle((work / ".ral_cache/bundle.json").read_bytes())
    (kernel,) = bundle.kernels
    assert kernel.source is not None
    assert kernel.source.sha256 == hashlib.sha256(UPPER.encode()).hexdigest()
    assert [step.kernel for step in bundle.patch][-2:] == ["upper", "feedback"]
    assert "interpreted on the CPU" in (work / ".ral_cache/report.txt").read_text()
    assert main(["inspect", "oci:ral-image", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["labels"]["io.ralbuild.cpu_user_kernels"] == "interpreted by triton-3.7.1"
    with open_image(work / "ral-image") as stored:
        assert [package.name for package in stored_facts(stored).packages] == ["triton"]
    assert main(["inspect", "oci:ral-image"]) == 0
    assert "upper interpreted on the CPU from source, by Triton in the image" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_setting_alone_adds_nothing(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(work, MINIMAL + NO_KERNELS + INTERPRET) == 0
    capsys.readouterr()
    assert main(["inspect", "oci:ral-image", "--json"]) == 0
    assert "io.ralbuild.cpu_user_kernels" not in json.loads(capsys.readouterr().out)["labels"]


def test_a_buffer_that_the_cpu_does_not_keep_is_refused_with_the_parameter(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = HEAD + '@triton.jit\ndef upper_kernel(ring: "*u8"):\n    tl.store(ring, 1)\n'
    (work / "transformers/upper.py").write_text(source)
    assert build(work, MINIMAL + NO_KERNELS + KERNEL + INTERPRET) == 4
    said = capsys.readouterr().err
    assert "'upper' takes 'ring', the buffer 'ring', which the CPU target does not keep" in said
    assert "output_len" in said


def test_render_copies_the_packages(work: Path) -> None:
    assert build(work, MINIMAL + NO_KERNELS + KERNEL + INTERPRET, "render", "--out", "context") == 0
    assert (work / "context/packages/triton/x.py").read_bytes() == b"x"
    lines = (work / "context/Dockerfile").read_text().splitlines()
    assert 'COPY --chown=0:0 ["packages/", "/opt/ral/packages/"]' in lines


def test_the_locked_triton_is_the_one_that_compiles() -> None:
    pins = load_pins().toolchain
    (wheel,) = load_lock("interpreter").wheels
    assert wheel.name == "triton"
    assert pins.triton_least <= wheel.version < pins.triton_below


def test_the_layer_holds_the_interpreter_and_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ["triton/__init__.py", "triton/_C/libtriton.so", "triton/backends/nvidia/compiler.py"]
    left = [
        "triton/FileCheck",
        "triton/backends/nvidia/bin/ptxas",
        "triton/profiler/x.py",
        "triton/_C/libproton.so",
    ]
    path = make_wheel(tmp_path, "triton", dict.fromkeys([*kept, *left], b"x"), "3.7.1")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    lock = Lock((LockedWheel("triton", "3.7.1", (digest,)),), "2" * 64)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(interpreter, "load_lock", lambda _: lock)
    asked: list[str] = []

    def fetch(wheels: tuple[LockedWheel, ...], *_: object) -> dict[str, Path]:
        asked.extend(wheel.version for wheel in wheels)
        return {"triton": path}

    monkeypatch.setattr(interpreter, "fetch_wheels", fetch)

    class Quiet:
        def step(self, _: str) -> None: ...

    layers = [interpreter.interpreter_layer(Quiet()) for _ in range(2)]  # type: ignore[arg-type]
    for layer in layers:
        paths = {entry.path.removeprefix("opt/ral/packages/") for entry in layer.entries}
        assert {*kept, "interpreter.json"} <= paths
        assert not set(left) & paths
    assert layers[0].name == "triton-3.7.1"
    assert asked == ["3.7.1"]  # the second time it was there
