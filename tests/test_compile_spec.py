"""Specs say of a kernel what its source says: names, order, types, constants."""

from __future__ import annotations

import ast

import pytest
from compile_support import ARTICLE_KERNEL, article_spec, specs

from ralbuild.compile.user_source import read_type, user_spec
from ralbuild.contract import transducer
from ralbuild.contract.buffers import BUFFERS
from ralbuild.errors import CompileError


@pytest.mark.parametrize("name", ["penalize", "sample", "transduce", "feedback"])
def test_a_built_in_kernel_takes_its_spec_parameters_in_order(name: str) -> None:
    spec = specs()[name]
    function = next(
        item
        for item in ast.parse(spec.source).body
        if isinstance(item, ast.FunctionDef) and item.name == spec.entry
    )
    constants = [item.arg for item in function.args.args if item.annotation is not None]
    assert [item.arg for item in function.args.args] == [*spec.signature, *constants]
    assert set(constants) == set(spec.constants)
    assert all(BUFFERS[buffer].type == spec.signature[param] for param, buffer in spec.buffers.items())


def test_the_transducer_kernel_reads_operations_as_the_contract_numbers_them() -> None:
    """The kernel's source holds the numbers 0, 1, 2 and else; Triton has no enumerations."""
    kinds = (transducer.COPY, transducer.EMIT, transducer.DROP, transducer.EVENT)
    assert kinds == (0, 1, 2, 3)
    assert transducer.PASS_PROGRAM == 0


def test_the_articles_kernel_is_read_from_its_comments() -> None:
    spec = article_spec()
    assert spec.entry == "html_enhancer_kernel"
    assert list(spec.signature.items()) == [
        ("output_ptr", "*i8"),
        ("term_list_ptr", "*i32"),
        ("term_count", "i32"),
    ]
    assert spec.constants == {"BLOCK_SIZE": 256}
    assert spec.buffers == {"output_ptr": "output", "term_list_ptr": "terms", "term_count": "term_count"}
    assert spec.source == ARTICLE_KERNEL.read_bytes()
    assert spec.user


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("*int8\uff0c\u6307\u5411\u8f93\u51fabuffer", "*i8"),
        ("int32, count", "i32"),
        ("* uint8: bytes", "*u8"),
        ("*fp16", "*fp16"),
        ("*tl.bfloat16", "*bf16"),
        ("Float32", "fp32"),
        ("int", "i32"),
        ("fp16", None),
        ("the count", None),
        ("", None),
        ("**int8", None),
        ("*tensordesc", None),
    ],
)
def test_types_are_read_from_the_start_of_a_comment(text: str, found: str | None) -> None:
    assert read_type(text) == found


def spec_of(parameters: str, settings: dict[str, object] | None = None, max_seq_len: int = 2048):
    source = f"import triton\n@triton.jit\ndef k_kernel({parameters}):\n    pass\n"
    return user_spec(
        name="k",
        source=source.encode(),
        filename="transformers/k.py",
        settings=settings or {},
        max_seq_len=max_seq_len,
    )


def test_annotations_give_types_as_comments_do() -> None:
    spec = spec_of(
        'token: "*int32", eos_id: tl.int32, ring_ptr: tl.pointer_type(tl.uint8), seed: "*i64", N: tl.constexpr = 3'
    )
    assert spec.signature == {"token": "*i32", "eos_id": "i32", "ring_ptr": "*u8", "seed": "*i64"}
    assert spec.constants == {"N": 3}


@pytest.mark.parametrize(
    ("max_seq_len", "block"), [(16, 16), (100, 64), (255, 128), (256, 256), (1 << 20, 256)]
)
def test_block_size_is_the_largest_power_of_two_that_fits(max_seq_len: int, block: int) -> None:
    spec = spec_of("BLOCK_SIZE: tl.constexpr, MAX_SEQ_LEN: tl.constexpr", max_seq_len=max_seq_len)
    assert spec.constants == {"BLOCK_SIZE": block, "MAX_SEQ_LEN": max_seq_len}


def test_the_config_may_set_a_constant() -> None:
    spec = spec_of(
        "BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr = 1", settings={"width": 7, "BLOCK_SIZE": 32}
    )
    assert spec.constants == {"BLOCK_SIZE": 32, "WIDTH": 7}


@pytest.mark.parametrize(
    ("parameters", "place", "message"),
    [
        ("output_ptr", ":3", "parameter 'output_ptr' needs a type that a kernel can take, found none"),
        ('output_ptr: "*str"', ":3", "found '*str'"),
        ('outptu_ptr: "*i8"', ":3", "no buffer is named 'outptu_ptr' (did you mean 'output'?)"),
        ('output_ptr: "*i32"', ":3", "declared *i32, its buffer 'output' holds *u8"),
        ("output_ptr: tl.int64", ":3", "declared i64, its buffer 'output' holds *u8"),
        ("\n    a_ptr, b_ptr, # *int8\n", ":4", "parameter 'a_ptr' needs a type"),
        ("WIDTH: tl.constexpr", ":3", "constant 'WIDTH' has no value"),
        ("*pointers", ":3", "parameter 'pointers' must be an ordinary one"),
        ('*, output_ptr: "*i8"', ":3", "parameter 'output_ptr' must be an ordinary one"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_line(parameters: str, place: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        spec_of(parameters)
    problem = caught.value.problems[0]
    assert problem.place == f"transformers/k.py{place}"
    assert message in problem.message


def test_an_unknown_name_lists_the_names_there_are() -> None:
    with pytest.raises(CompileError) as caught:
        spec_of('somewhere: "*i8"')
    assert all(name in caught.value.problems[0].hint for name in BUFFERS)


def test_every_wrong_parameter_is_reported_at_once() -> None:
    with pytest.raises(CompileError) as caught:
        spec_of('nothing: "*i8", output_ptr: "*i64", WIDTH: tl.constexpr')
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"def k_kernel(:\n", "transformers/k.py:1:14: not valid Python"),
        (b"x = 1\n", "needs one top-level function 'k_kernel', found none"),
        (
            b"def k_kernel(): pass\n",
            "transformers/k.py:1: 'k_kernel' lacks the decorator @triton.jit",
        ),
        (b"@triton.jit\ndef k_kernel(): pass\n" * 2, "needs one top-level function 'k_kernel', found 2"),
        (b"\x00", "transformers/k.py: not valid Python"),
        (b"# coding: nothing\n", "not valid Python"),
        (b"x = '\xff'\n", "not valid Python"),
        (b"(" * 100_000, "not valid Python"),
        (b"#" * (1 << 20) + b"#", "needs at most 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_kernel_is_one_clear_error(source: bytes, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        user_spec(name="k", source=source, filename="transformers/k.py", settings={}, max_seq_len=64)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_is_never_imported_by_the_builder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = b"open('proof', 'w')\nimport triton\n@triton.jit\ndef k_kernel(): pass\n"
    user_spec(name="k", source=source, filename="k.py", settings={}, max_seq_len=64)
    assert not (tmp_path / "proof").exists()


def test_the_documented_buffers_are_those_of_the_contract() -> None:
    text = (ARTICLE_KERNEL.parents[3] / "docs/kernels.md").read_text("utf-8")
    rows = [
        f"| `{name}` | `{item.type}` | {item.shape or '—'} | {item.meaning} |"
        for name, item in BUFFERS.items()
    ]
    assert "\n".join(rows) in text
