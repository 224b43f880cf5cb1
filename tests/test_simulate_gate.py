"""Before an image is written its kernels are run; what is wrong names the line of the kernel's source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_support import write_fake_base
from compile_support import ARTICLE_KERNEL, compiled, specs, toolchain
from model_factory import write_model

from ralbuild import proof
from ralbuild.cli import main
from ralbuild.compile import aot
from ralbuild.compile.launch import Compiled
from ralbuild.compile.pairing import assemble, check_pair
from ralbuild.compile.source_lines import read_lines, source_lines
from ralbuild.errors import CompileError

CONFIG = """
version: "0.3"
model: tiny
max_seq_len: 512
postprocessing: {output_transformers: [{name: "html_enhancer", config: {bold_terms: ["risk", "audit"]}}]}
build: {targets: [sm_80]}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(aot, "run_worker", lambda spec, arch, *_, **__: compiled(spec.name, arch))
    monkeypatch.setattr(proof, "GATE_CASES", 6)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model")
    write_fake_base(tmp_path / "base")
    (tmp_path / "ral-config.yaml").write_text(CONFIG)
    return tmp_path


def ralbuild(*arguments: str) -> int:
    return main.main([*arguments])


IMAGE = ("image", "--model", "model", "--base", "oci:base", "--quiet", "--simulate")


def test_an_image_says_what_was_run_and_stays_the_same(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ralbuild(*IMAGE) == 0
    first = capsys.readouterr().out
    assert ralbuild("inspect", "oci:ral-image") == 0
    assert re.search(r"io\.ralbuild\.simulated +6 cases, sm_80, ralbuild \d", capsys.readouterr().out)
    assert ralbuild(*IMAGE, "--output", "oci:again") == 0
    assert capsys.readouterr().out == first
    assert ralbuild(*IMAGE[:-1], "--output", "oci:other") == 0
    assert capsys.readouterr().out != first, "an image that was not simulated does not say so"


def damaged(monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes, *, paired: bool) -> None:
    """Let the compiler give another PTX for `transduce`; ``paired``: and the cubin that belongs to it."""
    right = compiled("transduce")
    ptx = right.ptx.replace(old, new)
    assert ptx != right.ptx
    cubin = assemble(ptx, "sm_80", toolchain(), "test") if paired else right.cubin
    wrong = Compiled(cubin, ptx, right.launch, right.missing)
    monkeypatch.setattr(
        aot,
        "run_worker",
        lambda spec, arch, *_, **__: wrong if spec.name == "transduce" else compiled(spec.name, arch),
    )


@pytest.mark.parametrize("paired", [True, False])
def test_a_wrong_kernel_writes_no_image(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paired: bool
) -> None:
    damaged(
        monkeypatch, b"atom.global.gpu.acq_rel.add.u32", b"atom.global.gpu.acq_rel.max.u32", paired=paired
    )
    assert ralbuild(*IMAGE) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("rule_events needs" if paired else "was not made of the PTX beside it") in captured.err
    assert not (work / "ral-image").exists()
    assert not [path for path in work.iterdir() if path.name.startswith(".ral-image")]


def test_a_race_of_a_users_kernel_names_its_lines(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of the file itself, from a compile with line information that is not what ships."""
    (work / "transformers").mkdir()
    (work / "transformers/html_enhancer.py").write_bytes(ARTICLE_KERNEL.read_bytes())
    options = ["simulate", "--model", "model", "--kernel", "html_enhancer", "--race", "--quiet"]
    assert ralbuild(*options) == 4
    message = capsys.readouterr().err
    source = ARTICLE_KERNEL.read_text().splitlines()
    found = re.findall(r"html_enhancer\.py:(\d+): (.+?)(?:;|$)", message, re.MULTILINE)
    assert found
    for number, text in found:
        assert source[int(number) - 1].strip().startswith(text.strip()[:20])
    assert any("tl.store" in text or "tl.load" in text for _, text in found)


def test_the_map_covers_every_access_and_points_at_loads_and_stores() -> None:
    from compile_support import Shelf

    found = compiled("html_enhancer")
    shelf = Shelf()
    lines = source_lines(specs()["html_enhancer"], "sm_80", found.ptx, toolchain(), shelf)
    for number, text in enumerate(found.ptx.decode().splitlines(), 1):
        if re.search(r"\b(ld|st)\.global", text):
            word = "load" if "ld.global" in text else "store"
            assert f"tl.{word}" in lines.text(number), text
    assert len(shelf.kept) == 1
    (outputs,) = shelf.kept.values()
    assert b".py" not in b"".join(outputs.values()).replace(b"kernel.py", b"").replace(b"standard.py", b"")


def test_another_ptx_has_no_map() -> None:
    plain = "mov.u32 %r1, 1;\nret;\n"
    noted = (
        '.loc 1 7 0\nmov.u32 %r1, 1;\n$L__tmp0:\n.loc 1 9 2 // kernel.py:9:2\nret;\n.file 1 "/x/kernel.py"\n'
    )
    assert read_lines(plain, noted) == {1: ("kernel.py", 7), 2: ("kernel.py", 9)}
    assert read_lines(plain, noted.replace("%r1, 1", "%r1, 2")) is None
    assert read_lines(plain + "ret;\n", noted) is None
    assert read_lines(plain, noted.replace("ret;", "ret;\nret;")) is None


def test_a_cubin_of_other_options_is_not_of_this_ptx() -> None:
    found = compiled("transduce")
    check_pair(found.ptx, found.cubin, "transduce", "sm_80", toolchain())
    with pytest.raises(CompileError, match="was not made of the PTX beside it"):
        check_pair(found.ptx, compiled("transduce", "sm_86").cubin, "transduce", "sm_80", toolchain())
    with pytest.raises(CompileError, match="ptxas does not take the PTX"):
        check_pair(
            found.ptx.replace(b"bar.sync", b"bar.sink"), found.cubin, "transduce", "sm_80", toolchain()
        )
