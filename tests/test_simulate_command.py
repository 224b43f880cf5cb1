"""`ralbuild simulate` and the gate: from the cache and from an image, digests checked, differences told."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from compile_support import article_spec, compiled, specs
from model_factory import write_model

from ralbuild.cli import simulate_cmd
from ralbuild.compile import aot
from ralbuild.contract.bundle import Bundle, ObjectRef, write_bundle
from ralbuild.contract.codec import sha256_hex
from ralbuild.contract.places import BUNDLE_FILE, OBJECTS_DIR
from ralbuild.digests import DigestCache
from ralbuild.errors import CacheError, CompileError, UsageError
from ralbuild.image.assemble import assemble_image
from ralbuild.image.layout import write_layout
from ralbuild.image.plan import FileEntry, ImageConfig, ImagePlan, LayerPlan
from ralbuild.pipeline.compiling import Compiled, compile_model
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import make_report
from ralbuild.simulate.gate import Work, simulate_bundle

CONFIG = """
version: "0.3"
model: tiny
max_seq_len: 512
actions: {guard: {redact: [{text: "secret"}], ban: ["risk-free"]}}
routing: {rules: [{match: "finance", action: "guard"}]}
postprocessing: {output_transformers: [{name: "html_enhancer", config: {bold_terms: ["risk", "audit"]}}]}
build: {targets: [sm_80]}
"""


@pytest.fixture(autouse=True)
def kernels_of_this_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each kernel is compiled once a session, whatever asks for it."""
    monkeypatch.setattr(aot, "run_worker", lambda spec, arch, *_, **__: compiled(spec.name, arch))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    (tmp_path / "ral-config.yaml").write_text(CONFIG)


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate_cmd.add_arguments(parser)
    return parser.parse_args([*arguments, "--quiet"])


def build() -> Compiled:
    request = BuildRequest(Path("model"), Path("ral-config.yaml"), target="cuda")
    return compile_model(request, make_report("plain", quiet=True))


def test_the_gate_runs_every_kernel_and_prints_one_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_cmd.run(command("--model", "model", "--cases", "12", "--race", "--json")) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [(item["kernel"], item["arch"], item["ok"]) for item in answers] == [
        (name, "sm_80", True) for name in ("penalize", "sample", "transduce", "feedback")
    ]
    assert answers[2]["cases"] == 12
    assert answers[2]["ptx"] == f"sha256:{sha256_hex(compiled('transduce').ptx)}"
    assert all(item["warp_instructions"] > 100 and item["races"] == [] for item in answers)


def test_a_text_of_ones_own_is_pushed_through_with_its_route(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.txt").write_text("the risk is a secret, the audit too")
    options = command(
        "--model", "model", "--kernel", "transduce", "--text", "t.txt", "--route", "finance", "--profile"
    )
    assert simulate_cmd.run(options) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:4] == ["transduce", "sm_80", "equal", "1"]
    assert any("ld.global.b8" in line and "sectors" in line for line in out[1:])


def image_of(bundle: Bundle, objects: dict[str, bytes], folder: Path) -> None:
    files = [FileEntry(BUNDLE_FILE.lstrip("/"), write_bundle(bundle))]
    files += [FileEntry(f"{OBJECTS_DIR.lstrip('/')}/{name}", data) for name, data in sorted(objects.items())]
    layer = LayerPlan("rules", "rules", tuple(files), owned=("opt/ral/bundle",))
    plan = ImagePlan(None, (layer,), ImageConfig())
    write_layout(folder, assemble_image(plan), "", DigestCache(None), None, print)


def test_the_objects_of_an_image_are_run_where_they_lie(capsys: pytest.CaptureFixture[str]) -> None:
    done = build()
    image_of(done.bundle, done.objects, Path("image"))
    assert simulate_cmd.run(command("--image", "oci:image", "--cases", "4", "--kernel", "transduce")) == 0
    assert "equal" in capsys.readouterr().out


def with_ptx(done: Compiled, name: str, text: bytes) -> tuple[Bundle, dict[str, bytes]]:
    """Another PTX under its own true digest, as a compiler that is wrong would give."""
    ref = ObjectRef(sha256_hex(text), len(text))
    kernels = tuple(
        replace(kernel, objects=tuple(replace(item, ptx=ref) for item in kernel.objects))
        if kernel.name == name
        else kernel
        for kernel in done.bundle.kernels
    )
    return replace(done.bundle, kernels=kernels), done.objects | {ref.sha256: text}


def test_an_image_with_another_object_under_a_digest_is_refused() -> None:
    done = build()
    digest = next(item.ptx.sha256 for kernel in done.bundle.kernels for item in kernel.objects)
    objects = done.objects | {digest: done.objects[digest] + b"\n"}
    with pytest.raises(CacheError, match=digest):
        simulate_bundle(done.bundle, objects, Work(cases=1))
    del objects[digest]
    with pytest.raises(CacheError, match="found none"):
        simulate_bundle(done.bundle, objects, Work(cases=1))


def test_a_kernel_that_is_wrong_fails_the_command_and_names_the_rule() -> None:
    done = build()
    text = compiled("transduce").ptx.replace(
        b"atom.global.gpu.acq_rel.add.u32", b"atom.global.gpu.acq_rel.max.u32"
    )
    bundle, objects = with_ptx(done, "transduce", text)
    image_of(bundle, objects, Path("image"))
    Path("t.txt").write_text("risk risk ")
    options = command("--image", "oci:image", "--kernel", "transduce", "--text", "t.txt")
    with pytest.raises(CompileError, match="rule_events needs 2, found 1") as caught:
        simulate_cmd.run(options)
    assert caught.value.exit_code == 4
    assert "bold 'risk'" in caught.value.problems[0].hint
    assert caught.value.problems[0].place == "transduce for sm_80"


def test_ptx_that_differs_in_its_target_alone_is_run_once_and_any_other_difference_by_itself() -> None:
    done = build()
    right = compiled("feedback").ptx
    texts = {
        "sm_80": right,
        "sm_86": right.replace(b".target sm_80", b".target sm_86"),
        "sm_89": right.replace(b".target sm_80", b".target sm_89").replace(b", 32767;", b", 32766;", 1),
    }
    assert len(set(texts.values())) == 3
    kernel = next(kernel for kernel in done.bundle.kernels if kernel.name == "feedback")
    item = kernel.objects[0]
    refs = {arch: ObjectRef(sha256_hex(text), len(text)) for arch, text in texts.items()}
    several = replace(kernel, objects=tuple(replace(item, arch=arch, ptx=ref) for arch, ref in refs.items()))
    bundle = replace(done.bundle, kernels=(several,))
    objects = done.objects | {refs[arch].sha256: text for arch, text in texts.items()}
    runs = simulate_bundle(bundle, objects, Work(cases=64))
    assert [(run.arch, run.same_as, run.ptx_sha256) for run in runs] == [
        (arch, "sm_80" if arch == "sm_86" else "", refs[arch].sha256) for arch in texts
    ]
    assert [run.comparison.cases for run in runs] == [1000, 1000, 1000]


def test_ptx_that_is_not_understood_is_refused_with_its_line() -> None:
    done = build()
    text = compiled("transduce").ptx.replace(b"bar.sync", b"bar.red.sync", 1)
    line = text[: text.index(b"bar.red")].count(b"\n") + 1
    bundle, objects = with_ptx(done, "transduce", text)
    with pytest.raises(CompileError, match=r"bar\.red\.sync") as caught:
        simulate_bundle(bundle, objects, Work(kernels=("transduce",), cases=1))
    assert caught.value.problems[0].place == f"line {line}"


def test_a_users_kernel_is_run_for_faults_and_races_alone() -> None:
    """The article's kernel over the decode loop's own buffers: nothing lies outside, blocks race."""
    assert article_spec().entry == specs()["html_enhancer"].entry
    Path("transformers").mkdir()
    Path("transformers/html_enhancer.py").write_bytes(article_spec().source)
    done = build()
    (run,) = simulate_bundle(done.bundle, done.objects, Work(kernels=("html_enhancer",), races=True))
    assert run.comparison.fault is None
    assert "between blocks" in {race.scope for race in run.comparison.races}
    assert not run.comparison.ok


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --model or --image"),
        (["--model", "model", "--image", "oci:x"], "either --model or --image"),
        (["--model", "model", "--cases", "0"], "at least 1 case"),
        (["--model", "model", "--kernel", "nope"], "no kernel 'nope'"),
        (["--model", "model", "--text", "missing.txt"], "cannot be read"),
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate_cmd.run(command(*arguments))
