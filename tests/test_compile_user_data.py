"""What a user kernel's config gives it, and where the kernel stands among the steps."""

from __future__ import annotations

import numpy as np
import pytest

from ralbuild.compile.order import UserStep, step_order
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.user_source import user_spec
from ralbuild.contract.arrays import read_arrays
from ralbuild.contract.buffers import BUFFERS
from ralbuild.errors import CompileError

IDS = {"risk": [7], " risk": [8], "due diligence": [300, 49000], "風險": [5, 6]}


def spec_of(parameters: str, settings: dict[str, object]) -> KernelSpec:
    source = f"import triton\n@triton.jit\ndef k_kernel({parameters}):\n    pass\n"
    return user_spec(
        name="k",
        source=source.encode(),
        filename="transformers/k.py",
        settings=settings,
        max_seq_len=64,
        encode=IDS.__getitem__,
        place="ral-config.yaml:5:7",
    )


def data_of(parameters: str, settings: dict[str, object]) -> dict[str, list[float]]:
    spec = spec_of(parameters, settings)
    assert spec.data is not None
    arrays = read_arrays(spec.data, "data").arrays
    assert set(spec.buffers.values()) == set(arrays)
    return {name: view.tolist() for name, view in arrays.items()}


def test_the_articles_config_gives_its_kernel_term_ids() -> None:
    given = {"bold_terms": ["risk", "due diligence"]}
    data = data_of('term_list_ptr: "*i32", term_count: "i32"', given)
    assert data == {"terms": [7, 300, 49000], "term_count": [3]}


def test_text_is_passed_as_ids_or_as_bytes_with_its_offsets() -> None:
    words: dict[str, object] = {"words": ["due diligence", "風險"]}
    data = data_of('words_ptr: "*i32", words_offsets: "*i32", words_count: "i32", words_size: "i32"', words)
    assert data == {
        "config.words": [300, 49000, 5, 6],
        "config.words_offsets": [0, 2, 4],
        "config.words_count": [2],
        "config.words_size": [4],
    }
    encoded = [text.encode() for text in IDS if text in ("due diligence", "風險")]
    data = data_of('words: "*u8", words_offsets: "*i32"', words)
    assert data["config.words"] == list(b"".join(encoded))
    assert data["config.words_offsets"] == [0, 13, 19]
    signed = data_of('words: "*i8"', words)["config.words"]
    assert signed == np.frombuffer(b"".join(encoded), np.int8).tolist()


def test_numbers_and_truth_values_are_passed_by_value_or_as_lists() -> None:
    given = {"limit": 3, "rate": 0.1, "on": True, "steps": [1, 2, 3], "weights": [0.5, 2]}
    parameters = 'limit: "i64", rate: "fp32", on: "i32", steps: "*i16", steps_count: "i32", weights: "*fp64"'
    assert data_of(parameters, given) == {
        "config.limit": [3],
        "config.rate": [float(np.float32(0.1))],
        "config.on": [1],
        "config.steps": [1, 2, 3],
        "config.steps_count": [3],
        "config.weights": [0.5, 2.0],
    }


def test_a_changed_value_compiles_nothing() -> None:
    first, second = (spec_of('limit: "i32"', {"limit": value}) for value in (1, 2))
    assert first.data != second.data
    assert first.identity() == second.identity()


@pytest.mark.parametrize(
    ("parameters", "settings", "message"),
    [
        ('x: "i8"', {"x": 128}, "config key 'x' holds a number that i8 cannot"),
        ('x: "u32"', {"x": -1}, "config key 'x' holds a number that u32 cannot"),
        ('x: "i32"', {"x": 1.5}, "config key 'x' holds 1.5, no whole number (i32)"),
        ('x: "fp32"', {"x": float("inf")}, "config key 'x' holds inf, which fp32 cannot"),
        ('x: "fp32"', {"x": 1e39}, "config key 'x' holds 1e+39, which fp32 cannot"),
        ('x: "i32"', {"x": [1, 2]}, "config key 'x' is a list; the parameter takes one value (i32)"),
        ('x: "i32"', {"x": "risk"}, "config key 'x' is text; the parameter must be *uint8 or *int32"),
        ('x: "*fp32"', {"x": "risk"}, "config key 'x' is text: pass it as *uint8"),
        ('x: "*bf16"', {"x": [1.0]}, "config key 'x' cannot be passed as bf16"),
        ('x: "*i32"', {"x": {"a": 1}}, "config key 'x' must be a number"),
        ('x_offsets: "*i32"', {"x": ["risk"]}, "no parameter 'x' says which"),
        ('terms: "*i32"', {}, "the config has no list of text"),
        ('terms: "*i32"', {"a": ["risk"], "b": ["risk"]}, "the config has no list of text"),
        ('terms: "*i32"', {"terms": 3}, "config key 'terms' must be a list of text"),
        ('terms: "*i64"', {"terms": ["risk"]}, "declared *i64, its buffer 'terms' holds *i32"),
        ('limt: "i32"', {"limit": 3}, "no buffer is named 'limt' (did you mean 'limit'?)"),
        ('token: "*i32"', {"limit": 3}, "config key 'limit' is taken by no parameter of 'k_kernel'"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(
    parameters: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(CompileError) as caught:
        spec_of(parameters, settings)
    assert message in str(caught.value)
    assert all(problem.place for problem in caught.value.problems)


def test_an_unknown_name_lists_buffers_and_keys() -> None:
    with pytest.raises(CompileError) as caught:
        spec_of('elsewhere: "*i32"', {"limit": 3, "rate": 1.0})
    unknown, *unused = caught.value.problems
    assert "config keys: limit, rate" in unknown.hint
    assert all(name in unknown.hint for name in BUFFERS)
    assert [problem.place for problem in unused] == ["ral-config.yaml:5:7"] * 2
    assert all("parameters: elsewhere" in problem.hint for problem in unused)


def step(name: str, priority: int, *buffers: str) -> UserStep:
    bound = {buffer: buffer for buffer in buffers}
    return UserStep(KernelSpec(name, b"", "", "", {}, {}, bound, user=True), priority, f"c.yaml:{priority}:1")


def test_kernels_run_by_ascending_priority_around_the_declarative_step() -> None:
    kernels = [
        step("late", 200, "output"),
        step("same", 100, "output"),
        step("logits", 900, "logits"),
        step("early", 50, "token"),
        step("first", 10, "token"),
        step("second", 100, "output_len"),
    ]
    names = (
        "logits",
        "penalize",
        "sample",
        "first",
        "early",
        "transduce",
        "same",
        "second",
        "late",
        "feedback",
    )
    assert step_order(kernels, [100]) == names
    assert step_order(kernels, []) == names
    assert step_order([], []) == ("penalize", "sample", "transduce", "feedback")


@pytest.mark.parametrize(
    ("kernel", "declarative", "message"),
    [
        (step("k", 5, "output"), [100], "takes 'output', which the declarative transformers make after it"),
        (step("k", 60, "token"), [50, 100], "between declarative transformers (50 to 100)"),
    ],
)
def test_an_impossible_place_is_an_error(kernel: UserStep, declarative: list[int], message: str) -> None:
    with pytest.raises(CompileError, match=r"c\.yaml") as caught:
        step_order([kernel], declarative)
    assert message in str(caught.value)
