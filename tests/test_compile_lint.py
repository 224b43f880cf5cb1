"""The lint names what is wrong with a kernel, where, and what to do; and says nothing of sound kernels."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from cli_support import ROOT, ralbuild
from compile_support import ARTICLE_KERNEL, article_spec
from model_factory import write_model
from tokenizers import Tokenizer

from ralbuild.compile.lint import LINT_RULES, lint_kernel
from ralbuild.compile.spec import KernelSpec, builtin_specs
from ralbuild.compile.user_source import user_spec
from ralbuild.contract.arrays import read_arrays
from ralbuild.errors import CompileError

CHECKED_KERNEL = ROOT / "samples/user_kernel_checked/transformers/bold_tokens.py"
HEAD = "import triton\nimport triton.language as tl\n"
AT = "at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)\n"


def found(body: str, parameters: str = "", head: str = "", decorator: str = "@triton.jit") -> list[str]:
    """Lint a kernel on `output` and `token`; return ``line:rule``, line 1 being the body's first."""
    given = f'output_ptr: "*u8", token_ptr: "*i32", {parameters} BLOCK_SIZE: tl.constexpr'
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"{HEAD}{head}{decorator}\ndef k_kernel({given}):\n{lines}"
    first = source[: source.index(lines)].count("\n")
    spec = user_spec(
        name="k",
        source=source.encode(),
        filename="k.py",
        settings={"names": ["a"]} if "names" in parameters else {},
        max_seq_len=512,
        encode=lambda text: list(text.encode()),
    )
    return [f"{int(item.problem.place.split(':')[1]) - first}:{item.rule}" for item in lint_kernel(spec)]


def foreign(source: bytes) -> list[str]:
    """Lint all kernels of a file that is not for us: parameters are not bound to buffers."""
    spec = KernelSpec("x", source, "x.py", "", {}, {}, {}, user=True)
    return [item.rule for item in lint_kernel(spec)]


def test_the_five_defects_of_the_articles_kernel_are_found_where_they_are() -> None:
    """notes: ids above the element type, the next token lost, out of bounds, a race, cost linear in terms."""
    defects = lint_kernel(article_spec())
    lines = ARTICLE_KERNEL.read_text("utf-8").splitlines()
    shown = {}
    for defect in defects:
        name, line, column = defect.problem.place.rsplit(":", 2)
        assert name == "transformers/html_enhancer.py"
        shown[defect.rule] = lines[int(line) - 1][int(column) - 1 :]
        assert defect.problem.message.startswith(f"{defect.rule}: ")
        assert defect.problem.hint
    store = "tl.store(output_ptr + offset + 1,"
    assert shown["K101"].startswith("tokens == term_id")
    assert shown["K102"].startswith(store)
    assert shown["K103"].startswith(store)
    assert shown["K104"].startswith(store)
    assert shown["K105"].startswith("for i in range(term_count):")
    assert shown["K106"].startswith("offset < 2048")
    assert len(defects) == 6


def test_the_checked_sample_has_no_defect() -> None:
    spec = user_spec(
        name="bold_tokens",
        source=CHECKED_KERNEL.read_bytes(),
        filename="bold_tokens.py",
        settings={"terms": [" risk"]},
        max_seq_len=2048,
        encode=lambda text: [1],
    )
    assert lint_kernel(spec) == ()


@pytest.mark.parametrize("spec", builtin_specs(), ids=lambda spec: spec.name)
def test_the_built_in_kernels_have_no_defect(spec: KernelSpec) -> None:
    assert lint_kernel(spec) == ()


def test_kernels_in_the_manner_of_the_tutorials_raise_no_alarm() -> None:
    assert foreign((ROOT / "tests/well_written_kernels.py").read_bytes()) == []


@pytest.mark.parametrize(
    ("module", "true_alarms"),
    [
        ("torch._native.ops.bmm_outer_product.triton_kernels", set()),
        ("torch.sparse._triton_ops", set()),
        ("torch.testing._internal.triton_utils", {"K110", "K115"}),
    ],
)
def test_kernels_that_others_ship_raise_no_false_alarm(module: str, true_alarms: set[str]) -> None:
    root = importlib.util.find_spec("torch")
    assert root is not None
    assert root.submodule_search_locations
    path = Path(root.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
    assert set(foreign(path.read_bytes())) == true_alarms


@pytest.mark.parametrize(
    ("body", "rules"),
    [
        (AT + "tl.store(output_ptr + at, 1)", ["2:K113"]),
        (AT + "tl.load(token_ptr + at)", ["2:K113"]),
        (AT + "x = at + 2\ntl.store(output_ptr + x, 1, mask=at < tl.load(token_ptr))", ["3:K103"]),
        (AT + "tl.store(output_ptr + at, 1, mask=at < 1000)", ["2:K106"]),
        (AT + "tl.store(output_ptr + at, 1, mask=1000 > at)", []),
        ("print('x')", ["1:K114"]),
        ("tl.device_print('x', 1)", ["1:K114"]),
        ("tl.make_tensor_descriptor(output_ptr, [1], [1], [1])", ["1:K110"]),
        ("x = tl.atomic_add(token_ptr, 1)\ntl.store(token_ptr, x)", ["1:K112"]),
        ("tl.atomic_add(token_ptr, 1)", []),
        ("tl.atomic_max(token_ptr, 1)", []),
        ("tl.store(output_ptr, 1)", []),
        ("tl.store(output_ptr + tl.arange(0, BLOCK_SIZE), 1)", []),
    ],
)
def test_each_defect_is_found_on_its_line(body: str, rules: list[str]) -> None:
    assert found(body) == rules


def test_a_float_sum_by_atomics_depends_on_the_order() -> None:
    assert found("tl.atomic_add(logits, 1.0)", parameters='logits: "*fp32",') == ["1:K112"]


def test_a_helper_that_is_not_inlined_is_named() -> None:
    helper = "@triton.jit(noinline=True)\ndef helper(x):\n    return x\n"
    assert found("helper(1)", head=helper) == ["-4:K111"]


def test_autotune_is_named() -> None:
    tuned = "@triton.autotune(configs=[], key=[])\n@triton.jit"
    assert found("tl.store(output_ptr, 1)", decorator=tuned) == ["-2:K115"]


def test_a_loop_over_terms_costs_one_round_each() -> None:
    loop = "for i in range(names_count):\n    tl.store(token_ptr, tl.load(names_ptr + i))"
    assert found(loop, parameters='names_ptr: "*i32", names_count: "i32",') == []
    loop = "for i in range(names_count):\n    x = tl.load(names_ptr + i)\n    y = x == tl.load(token_ptr)"
    assert found(loop, parameters='names_ptr: "*i32", names_count: "i32",') == ["1:K105"]


def test_a_comment_accepts_a_defect_on_its_line() -> None:
    assert found(AT + "tl.store(output_ptr + at, 1)  # ral: allow K113, the row is ours") == []
    assert found(AT + "tl.store(output_ptr + at, 1)  # ral: allow K101") == ["2:K113"]


def sample_on_a_tiny_model(tmp_path: Path, sample: str) -> tuple[object, ...]:
    write_model(tmp_path / "model")
    config = (ROOT / "samples" / sample / "ral-config.yaml").read_text("utf-8")
    (tmp_path / "ral-config.yaml").write_text(config + "max_seq_len: 512\n", "utf-8")
    (tmp_path / "transformers").symlink_to(ROOT / "samples" / sample / "transformers")
    return "compile", "--model", "model", "--target", "cuda", "--arch", "sm_80"


def test_the_articles_kernel_compiles_with_warnings_and_fails_under_strict(tmp_path: Path) -> None:
    command = sample_on_a_tiny_model(tmp_path, "user_kernel")
    done = ralbuild(*command, "--strict", cwd=tmp_path)
    assert done.code == 4
    assert done.out == ""
    assert re.findall(r"^error: transformers/html_enhancer\.py:\d+:\d+: (K\d+)", done.err, re.MULTILINE) == [
        "K106", "K105", "K101", "K102", "K103", "K104",
    ]  # fmt: skip
    done = ralbuild(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(re.findall(r"warning: transformers/html_enhancer\.py:\d+:\d+: K\d+", done.err)) == 6


def test_the_checked_sample_compiles_under_strict_with_its_values_in_the_bundle(tmp_path: Path) -> None:
    command = sample_on_a_tiny_model(tmp_path, "user_kernel_checked")
    done = ralbuild(*command, "--strict", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    bundle = json.loads(done.out)
    steps = [step["kernel"] for step in bundle["patch"]]
    assert steps == ["penalize", "sample", "transduce", "bold_tokens", "feedback"]
    (kernel,) = (item for item in bundle["kernels"] if item["user"])
    data = (tmp_path / ".ral_cache/objects" / kernel["data"]["sha256"]).read_bytes()
    arrays = {name: view.tolist() for name, view in read_arrays(data, "data").arrays.items()}
    ids = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    wanted = [number for text in (" risk", " audit") for number in ids.encode(text).ids]
    assert arrays == {"terms": wanted, "term_count": [len(wanted)]}


@pytest.mark.parametrize(
    "body",
    [
        "a = b & a\nb = a & b\ntl.store(output_ptr + at, 1, mask=a)",
        "x = x[0]\ny = x == tl.load(token_ptr)",
        "\n".join(f"v{n + 1} = v{n} + v{n}" for n in range(60)) + "\ntl.store(output_ptr + v60, 1)",
        "\n".join(f"v{n + 1} = v{n} & v{n}" for n in range(60)) + "\ntl.store(output_ptr + at, 1, mask=v60)",
        "tl.store(output_ptr + at, 1, mask=" + " & ".join(["at < 5"] * 300) + ")",
    ],
)
def test_no_expression_makes_the_lint_endless(body: str) -> None:
    found(AT + body)


def test_an_expression_beyond_reading_is_one_error() -> None:
    spec = builtin_specs()[0]
    deep = "@triton.jit\ndef k(a_ptr):\n    tl.load(a_ptr + " + "-" * 500 + "a[" * 80 + "0" + "]" * 80 + ")\n"
    huge = KernelSpec("x", deep.encode(), "x.py", "k", {"a_ptr": "*i32"}, {}, {}, user=True)
    assert lint_kernel(spec) == ()
    try:
        lint_kernel(huge)
    except CompileError as error:
        assert "nested too deeply" in str(error)


def test_the_page_lists_every_rule() -> None:
    text = (ROOT / "docs/kernels.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(K\d{3})` \| ([^|]+) \|", text, re.MULTILINE))
    assert {rule: title.strip() for rule, title in rows.items()} == dict(LINT_RULES)
