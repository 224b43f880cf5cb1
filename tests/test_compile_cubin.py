"""The cubin reader against ptxas's own report, and against everything that is no cubin."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from compile_support import PINS, compiled, specs, toolchain
from hypothesis import given, settings
from hypothesis import strategies as st

from ralbuild.compile.cubin import read_cubin
from ralbuild.compile.gate import inspect
from ralbuild.errors import CompileError

TARGETS = {"sm_80": "sm_80", "sm_90": "sm_90a"}


def assemble(ptx: bytes, target: str, folder: Path, ptxas: Path) -> tuple[bytes, str]:
    """Run an assembler by hand; return the object and what it said of it."""
    source, output = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_bytes(ptx)
    command = [str(ptxas), "-v", f"-arch={target}", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return output.read_bytes(), done.stderr


@pytest.mark.parametrize(("arch", "most"), [("sm_80", None), ("sm_80", 24), ("sm_90", None)])
def test_registers_and_frame_are_those_that_ptxas_reports(
    arch: str, most: int | None, tmp_path: Path
) -> None:
    """With 24 registers the kernel spills, so the frame is not zero."""
    limit = b"" if most is None else b".maxnreg %d\n" % most
    ptx = compiled("transduce", arch).ptx.replace(b".reqntid 32\n", b".reqntid 32\n" + limit)
    cubin, said = assemble(ptx, TARGETS[arch], tmp_path, toolchain().ptxas)
    (kernel,) = read_cubin(cubin, "test").kernels
    assert kernel.registers == int(re.search(r"Used (\d+) registers", said)[1])
    assert kernel.frame_bytes == int(re.search(r"(\d+) bytes stack frame", said)[1])
    assert (kernel.frame_bytes > 0) == (most is not None)


@pytest.mark.parametrize("name", ["penalize", "sample", "transduce", "feedback", "html_enhancer"])
def test_parameters_are_those_that_the_ptx_declares(name: str) -> None:
    built = compiled(name)
    (kernel,) = read_cubin(built.cubin, "test").kernels
    declared = re.findall(r"^\s*\.param \.([a-z]+)(\d+)", built.ptx.decode(), re.MULTILINE)
    assert [size for _, size in kernel.params] == [int(bits) // 8 for _, bits in declared]
    warps = specs()[name].num_warps
    assert f".reqntid {32 * warps}" in built.ptx.decode()
    assert kernel.threads == (32 * warps, 1, 1)


def test_every_prefix_of_a_cubin_is_refused_and_never_crashes() -> None:
    whole = compiled("html_enhancer").cubin
    for size in range(0, len(whole), 7):
        with pytest.raises(CompileError, match=r"^test: is not a readable cubin"):
            read_cubin(whole[:size], "test")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CompileError, match="is not a readable cubin"):
        read_cubin(b"\x7fELF\x02\x01\x01\x33\x07" + data if data[:1] < b"\x80" else data, "test")


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4583), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_cubin_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(compiled("html_enhancer").cubin)
    for at, value in changes:
        data[at % len(data)] = value
    try:
        read_cubin(bytes(data), "test")
    except CompileError as error:
        assert "is not a readable cubin" in str(error)


@pytest.mark.parametrize("arch", PINS.archs)
@pytest.mark.parametrize("name", ["penalize", "sample", "transduce", "feedback"])
def test_built_in_kernels_pass_the_gate_without_spills(name: str, arch: str) -> None:
    built = compiled(name, arch)
    inspected = inspect(specs()[name], arch, built.cubin, built.ptx, PINS)
    assert inspected.spill_bytes == 0
    assert inspected.symbols == (name,)


def test_the_articles_kernel_has_the_layout_that_was_measured() -> None:
    """Three parameters of its own and two hidden pointers, 40 bytes; see the notes' table of releases."""
    built = compiled("html_enhancer")
    params = inspect(specs()["html_enhancer"], "sm_80", built.cubin, built.ptx, PINS).params
    assert [(param.name, param.offset, param.size, param.hidden) for param in params] == [
        ("output_ptr", 0, 8, False),
        ("term_list_ptr", 8, 8, False),
        ("term_count", 16, 4, False),
        ("global_scratch", 24, 8, True),
        ("profile_scratch", 32, 8, True),
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_cubin_of_another_toolkit_is_refused(arch: str, tmp_path: Path) -> None:
    """Triton's own bundled assembler is of CUDA 12.8."""
    bundled = toolchain().triton_root / "backends/nvidia/bin/ptxas"
    ptx = compiled("transduce", arch).ptx
    cubin, _ = assemble(ptx, TARGETS[arch], tmp_path, bundled)
    with pytest.raises(CompileError, match="needs CUDA toolkit 122, found 128"):
        inspect(specs()["transduce"], arch, cubin, ptx, PINS)


def test_a_cubin_of_cuda_13_is_refused(tmp_path: Path) -> None:
    bundled = toolchain().triton_root / "backends/nvidia/bin/ptxas-blackwell"
    ptx = compiled("transduce").ptx
    cubin, _ = assemble(ptx, "sm_80", tmp_path, bundled)
    with pytest.raises(CompileError, match="needs ELF ABI 7, found 8"):
        inspect(specs()["transduce"], "sm_80", cubin, ptx, PINS)


def test_an_object_for_sm_90_that_is_not_sm_90a_is_refused(tmp_path: Path) -> None:
    ptx = compiled("transduce", "sm_90").ptx.replace(b".target sm_90a", b".target sm_90")
    cubin, _ = assemble(ptx, "sm_90", tmp_path, toolchain().ptxas)
    with pytest.raises(CompileError) as caught:
        inspect(specs()["transduce"], "sm_90", cubin, ptx, PINS)
    assert [problem.message for problem in caught.value.problems] == [
        "needs an object for sm_90a, found sm_90",
        "needs PTX for sm_90a, found sm_90",
    ]


def test_newer_ptx_is_refused() -> None:
    built = compiled("html_enhancer")
    ptx = built.ptx.replace(b".version 8.2", b".version 8.4")
    with pytest.raises(CompileError, match=r"needs PTX 8.2 or older, found 8.4"):
        inspect(specs()["html_enhancer"], "sm_80", built.cubin, ptx, PINS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {"output_ptr": "*i8", "term_list_ptr": "*i32"}}, "needs 2 parameters and 2 hidden"),
        (
            {"signature": {"output_ptr": "*i8", "term_list_ptr": "*i32", "term_count": "i64"}},
            r"\(16, 8\), \(24, 8\), \(32, 8\)\), found .*\(16, 4\)",
        ),
        ({"num_warps": 8}, r"needs blocks of 256 threads, found \(128, 1, 1\)"),
        ({"entry": "other"}, "needs the one kernel 'other', found html_enhancer_kernel"),
    ],
)
def test_an_object_that_is_not_what_the_spec_asks_for_is_refused(
    change: dict[str, object], message: str
) -> None:
    built = compiled("html_enhancer")
    with pytest.raises(CompileError, match=message):
        inspect(replace(specs()["html_enhancer"], **change), "sm_80", built.cubin, built.ptx, PINS)


def test_an_object_for_another_architecture_is_refused() -> None:
    built = compiled("html_enhancer")
    with pytest.raises(CompileError, match="needs an object for sm_86, found sm_80"):
        inspect(specs()["html_enhancer"], "sm_86", built.cubin, built.ptx, PINS)
