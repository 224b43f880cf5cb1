"""A changed rule costs what the rule is: few bytes, no weight, no process, no library that it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ROOT, ralbuild, write_fake_base
from model_factory import edit_json, write_model
from registry_server import FakeRegistry, serve

from benchmarks import made_model
from ralbuild.cache import Cache
from ralbuild.contract.bundle import Kernel, KernelObject
from ralbuild.digests import DigestCache
from ralbuild.image.bases import LayoutBase
from ralbuild.pipeline.building import plan_only
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import make_report
from ralbuild.weights.scan import Order, Verdict, verify_folder

TERM = "postprocessing: {{output_transformers: [{{name: html_enhancer, config: {{bold_terms: [{}]}}}}]}}\n"


@pytest.fixture(scope="module")
def registry() -> Iterator[FakeRegistry]:
    with serve() as registry:
        yield registry


def write_rules(work: Path, term: str, more: str = NO_KERNELS) -> None:
    (work / "ral-config.yaml").write_text(MINIMAL + more + TERM.format(term))


@pytest.mark.parametrize("gigabytes", [1, 64])
def test_a_changed_rule_moves_the_same_few_bytes_from_1_to_64_gb(
    registry: FakeRegistry, tmp_path: Path, gigabytes: int
) -> None:
    weights = made_model.write_model(tmp_path / "model", 8, gigabytes * 1000 // 8, sparse=True)
    assert weights > gigabytes * 0.8e9
    cache = DigestCache(tmp_path / "xdg/ralbuild/digests")
    registry.promised |= made_model.remember_digests(tmp_path / "model", cache)
    write_fake_base(tmp_path / "base")
    answers = []
    for term in ("risk", "audit"):
        write_rules(tmp_path, term)
        done = ralbuild(
            "image", "--model", "model", "--base", "oci:base", "--json",
            "--output", f"registry:{registry.host}/m{gigabytes}", cwd=tmp_path,
        )  # fmt: skip
        assert done.code == 0, done.err
        answers.append(json.loads(done.out))
    layers = answers[1]["layers"]
    assert [layer["name"] for layer in layers if not layer["reused"]] == ["rules"]
    assert {layer["digest"] for layer in layers if layer["kind"] == "weights"} <= set(registry.promised)
    assert answers[1]["written"] < 100_000


def made_up_kernels(request: object, specs: object, archs: object, cache: Cache, report: object):
    parts = [cache.add(bytes([number]) * 50_000) for number in range(2)]
    built = KernelObject("sm_80", parts[0], parts[1], 32, 0, 0, ("transduce",))
    return (Kernel("transduce", "transduce", "0" * 64, False, 4, {}, (), (built,)),)


def test_a_changed_rule_leaves_compiled_kernels_and_the_vocabulary_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model")
    write_fake_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr("ralbuild.pipeline.compiling.compile_specs", made_up_kernels)
    request = BuildRequest(Path("model"), Path("ral-config.yaml"), base=LayoutBase(Path("base")))
    images = []
    for term in ("risk", "audit"):
        write_rules(tmp_path, term, "")
        images.append(plan_only(request, (), make_report("plain", quiet=True)).image)
    first, second = ({layer.descriptor.name: layer.digest for layer in image.layers} for image in images)
    assert {name for name in second if first[name] != second[name]} == {"rules"}
    assert first["kernels and vocabulary"].size > 100_000
    assert second["rules"].size < 50_000


LAZY = {
    "cryptography", "docker", "http.client", "jinja2", "ralbuild.image.base.build", "ssl", "tokenizers",
    "triton", "urllib.request",
}  # fmt: skip
"""What other builds need: HTTP and TLS, signatures, templates, makers of bases, compilers, the tokenizer's library."""


def test_a_changed_rule_imports_nothing_it_does_not_need_and_starts_no_process(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_fake_base(tmp_path / "base")
    write_rules(tmp_path, "risk")
    words = ["image", "--model", "model", "--base", "oci:base", "--quiet"]
    assert ralbuild(*words, cwd=tmp_path).code == 0
    write_rules(tmp_path, "audit")
    program = (
        "import subprocess, sys\n"
        "def refuse(*_, **__): raise SystemExit('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "from ralbuild.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        f"heavy = sorted({LAZY!r} & set(sys.modules))\n"
        "sys.exit(code or (f'imported: {heavy}' if heavy else 0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "xdg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Notes:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def verify(work: Path, notes: Notes, *ignored: str) -> Verdict:
    order = Order(memo=Cache(work / "cache", notes), ignored=frozenset(ignored))
    return verify_folder(work / "model", DigestCache(None), 0, lambda *_: None, order)


def no_worker(*_: object) -> Mapping[str, object]:
    raise AssertionError("a worker was started")


def truncating(work: Path) -> None:
    """Give the tokenizer a setting that is worth a warning."""
    write_model(work / "model")
    cut = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    edit_json(work / "model/tokenizer.json", lambda value: value.update(truncation=cut))


def test_a_remembered_tokenizer_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncating(tmp_path)
    without = verify_folder(tmp_path / "model", DigestCache(None), 0, lambda *_: None)
    notes = Notes()
    first = verify(tmp_path, notes)
    monkeypatch.setattr("ralbuild.weights.child.run_limited", no_worker)
    second = verify(tmp_path, notes)
    assert "W509" in {finding.rule.id for finding in without.findings}
    assert first.findings == second.findings == without.findings
    for verdict in (first, second):
        assert verdict.model is not None
        assert without.model is not None
        assert verdict.model.vocabulary == without.model.vocabulary
        assert verdict.model.manifest == without.model.manifest
    assert notes.texts == []


def test_what_one_run_ignores_is_not_forgotten_for_the_next(tmp_path: Path) -> None:
    truncating(tmp_path)
    ignoring = verify(tmp_path, Notes(), "W509")
    assert "W509" not in {finding.rule.id for finding in ignoring.findings}
    assert "W509" in {finding.rule.id for finding in verify(tmp_path, Notes()).findings}


def test_a_changed_tokenizer_is_proved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model")
    verify(tmp_path, Notes())
    path = tmp_path / "model/tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setattr("ralbuild.weights.child.run_limited", no_worker)
    with pytest.raises(AssertionError, match="a worker was started"):
        verify(tmp_path, Notes())


def test_a_tampered_memory_is_worked_out_again(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    first = verify(tmp_path, Notes())
    for path in (tmp_path / "cache/objects").iterdir():
        path.write_bytes(path.read_bytes().replace(b"risk", b"task"))
        path.write_bytes(path.read_bytes() + b" ")
    notes = Notes()
    again = verify(tmp_path, notes)
    assert again.model is not None
    assert first.model is not None
    assert again.model.vocabulary == first.model.vocabulary
    assert [text.split(" is ")[0] for text in notes.texts] == [
        "cache entry of tokenizer.json",
        "cache entry of rendered chat template",
    ]


def test_an_error_of_the_tokenizer_is_found_every_time(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    edit_json(tmp_path / "model/tokenizer.json", lambda value: value["model"].update(merges=[["a", "zz"]]))
    found = [[finding.rule.id for finding in verify(tmp_path, Notes()).findings] for _ in range(2)]
    assert found[0] == found[1]
    assert "W506" in found[0]
