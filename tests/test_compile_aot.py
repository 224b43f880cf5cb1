"""Compiling as a whole: what is asked for comes out, once, the same everywhere, or one clear error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from compile_support import (
    ARTICLE_KERNEL,
    HARMLESS,
    PINS,
    Lines,
    Shelf,
    article_spec,
    compiled,
    kernel_file,
    toolchain,
)

from ralbuild.compile import aot
from ralbuild.compile.aot import compile_kernels, kernel_key
from ralbuild.compile.spec import KernelSpec
from ralbuild.contract.bundle import Kernel
from ralbuild.contract.codec import sha256_hex
from ralbuild.errors import CompileError


def build(
    *wanted: KernelSpec, archs: tuple[str, ...] = ("sm_80",), shelf: Shelf | None = None, **options: bool
) -> tuple[tuple[Kernel, ...], Lines]:
    lines = Lines()
    kernels = compile_kernels(wanted, archs, toolchain(), shelf or Shelf(), jobs=2, report=lines, **options)
    return kernels, lines


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer from this session's earlier compilation of the article's kernel."""
    monkeypatch.setattr(aot, "run_worker", lambda spec, arch, *_, **__: compiled(spec.name, arch))


def test_the_articles_kernel_as_printed_compiles_for_every_architecture() -> None:
    """`samples/user_kernel` holds it with nothing changed but line breaks."""
    (kernel,), lines = build(article_spec(), archs=PINS.archs)
    assert kernel.entry == "html_enhancer_kernel"
    assert kernel.user
    assert kernel.constants == {"BLOCK_SIZE": 256}
    assert kernel.source_sha256 == sha256_hex(ARTICLE_KERNEL.read_bytes())
    assert [item.arch for item in kernel.objects] == list(PINS.archs)
    assert sum(param.size for param in kernel.params if param.hidden) == 16
    assert kernel.params[-1].offset + kernel.params[-1].size == 40
    assert len(lines.steps) == 4
    assert lines.notes == []


def test_a_full_cache_hit_starts_no_worker_and_imports_no_triton(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    first, _ = build(article_spec(), shelf=shelf)
    monkeypatch.setattr(aot, "run_worker", None)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import fails, whatever earlier tests have loaded
    second, lines = build(article_spec(), shelf=shelf)
    assert second == first
    assert lines.steps == ["1 of 1 kernel objects were in the cache"]


def test_objects_are_named_by_their_digests(quick: None) -> None:
    shelf = Shelf()
    (kernel,), _ = build(article_spec(), shelf=shelf)
    (outputs,) = shelf.kept.values()
    assert kernel.objects[0].cubin.sha256 == sha256_hex(outputs["kernel.cubin"])
    assert kernel.objects[0].ptx.size == len(outputs["kernel.ptx"])
    assert b"/" not in outputs["about.json"]


def test_the_same_kernel_in_another_folder_and_process_gives_the_same_bytes(tmp_path: Path) -> None:
    """Another interpreter, working folder, temporary folder, umask, time zone and hash seed."""
    code = (
        "import os, sys; os.umask(0o077); sys.path.insert(0, sys.argv[1])\n"
        "from compile_support import compiled; import hashlib\n"
        "print(hashlib.sha256(compiled('transduce').cubin + compiled('transduce').ptx).hexdigest())"
    )
    (tmp_path / "temporary").mkdir(mode=0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path / "temporary"), "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "9", "LANG": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = compiled("transduce")
    assert done.stdout.strip() == sha256_hex(here.cubin + here.ptx)
    assert str(tmp_path).encode() not in here.cubin + here.ptx
    assert b"/tmp" not in here.cubin + here.ptx


def test_the_key_depends_on_everything_that_decides_the_bytes_and_on_nothing_else() -> None:
    spec, tools = article_spec(), toolchain()
    key = kernel_key(spec, "sm_80", tools)
    changes = [
        replace(spec, source=spec.source + b"#"),
        replace(spec, entry="other"),
        replace(spec, constants={"BLOCK_SIZE": 128}),
        replace(spec, signature=dict(reversed(spec.signature.items()))),
        replace(spec, align={"output_ptr": 16}),
        replace(spec, num_warps=8),
    ]
    keys = {kernel_key(item, "sm_80", tools) for item in changes}
    keys |= {
        kernel_key(spec, "sm_86", tools),
        kernel_key(spec, "sm_80", replace(tools, ptxas_sha256="0" * 64)),
        kernel_key(spec, "sm_80", replace(tools, triton_version="3.7.9")),
        kernel_key(spec, "sm_80", replace(tools, triton_record="x")),
        kernel_key(spec, "sm_80", replace(tools, python_version="3.12")),
    }
    assert len(keys - {key}) == 11
    same = replace(spec, filename="elsewhere.py", name="other", buffers={}, user=False)
    assert kernel_key(same, "sm_80", replace(tools, ptxas=Path("/elsewhere"))) == key


@pytest.mark.parametrize(
    ("body", "head", "place", "reason"),
    [
        ("x = nothing", "", ":7:9", "nothing is not defined"),
        ("tl.static_assert(1 == 2, 'my words')", "", ":7:5", "my words"),
        (
            "y = helper(output_ptr)",
            "@triton.jit\ndef helper(x):\n    # words\n    return x + missing",
            ":6:16",
            "missing is not defined",
        ),
        (HARMLESS, "import no_such_module", ":3", "No module named 'no_such_module'"),
        (HARMLESS, "def f():\n    return 1 // 0\nf()", ":4", "ZeroDivisionError"),
    ],
)
def test_a_kernel_that_does_not_compile_is_one_error_with_its_line_and_reason(
    body: str, head: str, place: str, reason: str
) -> None:
    """Line 1 and 2 are imports, ``head`` follows; without one the body is line 7."""
    with pytest.raises(CompileError) as caught:
        build(kernel_file(body, head), archs=("sm_80", "sm_90"))
    (problem,) = caught.value.problems
    assert problem.place == f"transformers/k.py{place}"
    assert reason in problem.message
    assert "\n" not in problem.message
    assert caught.value.exit_code == 4


def test_what_the_assembler_refuses_is_said_in_its_words_without_temporary_names() -> None:
    body = (
        "x = tl.inline_asm_elementwise('bogus $0, $1;', '=r,r', [tl.arange(0, 16)], tl.int32, True, 1)\n"
        "tl.store(output_ptr + tl.arange(0, 16), x)"
    )
    with pytest.raises(CompileError) as caught:
        build(kernel_file(body))
    message = caught.value.problems[0].message
    assert "kernel.ptx, line" in message
    assert "'bogus'" in message
    assert "/tmp" not in message


def test_every_broken_kernel_is_reported_once() -> None:
    broken = [replace(kernel_file(HARMLESS, "raise ValueError"), name=name) for name in ("a", "b")]
    with pytest.raises(CompileError) as caught:
        build(*broken, archs=("sm_80", "sm_86", "sm_90"))
    assert len(caught.value.problems) == 2


def test_an_architecture_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(CompileError, match=r"needs architectures out of sm_80, .*, found sm_100, sm_75"):
        build(article_spec(), archs=("sm_75", "sm_80", "sm_100"))


def test_no_architecture_gives_no_kernel() -> None:
    kernels, _ = build(article_spec(), archs=())
    assert kernels == ()


def test_a_second_compilation_gives_the_same_objects() -> None:
    (kernel,), _ = build(kernel_file(HARMLESS), check_repro=True)
    assert len(kernel.objects) == 1


def test_a_second_compilation_that_differs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled("html_enhancer")
    answers = [made, replace(made, ptx=made.ptx + b"\n")]
    monkeypatch.setattr(aot, "run_worker", lambda *_, **__: answers.pop(0))
    with pytest.raises(CompileError, match=r"compiling again gave another kernel\.ptx"):
        build(article_spec(), check_repro=True)


@pytest.mark.parametrize(
    ("fact", "value"),
    [("num_ctas", 2), ("num_warps", 8), ("global_scratch_size", 256), ("shared", 1 << 20), ("shared", -1)],
)
def test_what_the_launcher_cannot_launch_is_refused(
    fact: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled("html_enhancer")
    altered = replace(made, launch={**made.launch, fact: value})
    monkeypatch.setattr(aot, "run_worker", lambda *_, **__: altered)
    with pytest.raises(CompileError, match=str(value)):
        build(article_spec())


def test_missing_protections_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = replace(compiled("html_enhancer"), missing=("network namespace",))
    monkeypatch.setattr(aot, "run_worker", lambda *_, **__: made)
    other = replace(article_spec(), name="again")
    _, lines = build(article_spec(), other)
    assert lines.notes == [
        "kernel files were compiled without these protections of this host: network namespace"
    ]


class Tampered(Shelf):
    """A cache whose entries someone with the right to write to it has swapped for another kernel's."""

    def fetch(self, key, miss, label, accept) -> Mapping[str, bytes]:  # type: ignore[no-untyped-def]
        other = compiled("transduce")
        self.kept.setdefault(
            key, {"kernel.cubin": other.cubin, "kernel.ptx": other.ptx, "about.json": b'{"shared":0}'}
        )
        return super().fetch(key, miss, label, accept)


def test_a_cached_object_of_another_kernel_does_not_pass_the_gate(quick: None) -> None:
    (kernel,), lines = build(article_spec(), shelf=Tampered())
    assert kernel.objects[0].cubin.sha256 == sha256_hex(compiled("html_enhancer").cubin)
    assert lines.steps[0].startswith("compiled html_enhancer for sm_80 in ")


def test_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def interrupted(*_: object, stop, **__: object):  # type: ignore[no-untyped-def]
        seen.append(stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(aot, "run_worker", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(article_spec())
    assert seen[0].is_set()
