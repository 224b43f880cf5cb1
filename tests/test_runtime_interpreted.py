"""User kernels on the CPU target: served, and equal to their PTX in the simulator.

Expected texts come from transformers' logits, NumPy and `bytes.upper`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from compile_support import toolchain
from interpreted_kernels import HEAD, LEAN, UPPER
from interpreted_run import Case, Result, run_apart
from runtime_fixtures import Image, Runtime, make_image, make_model, running, token_bytes
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ralbuild.compile.launch import run_worker
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.user_source import user_spec
from ralbuild.contract import places
from ralbuild.contract.bundle import Kernel, ObjectRef, Param, PatchStep
from ralbuild.contract.codec import sha256_hex
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Options, Session

ASKED = "Tell me about the capital of France."
BOOSTED = [300, 11, 250]
BOOST = 7.5


def spec_of(name: str, source: str, **settings: object) -> KernelSpec:
    return user_spec(
        name=name,
        source=source.encode(),
        filename=f"{name}.py",
        settings=settings,
        max_seq_len=512,
        encode=lambda text: list(text.encode()),
    )


def bundled(spec: KernelSpec) -> tuple[Kernel, dict[str, bytes]]:
    """The kernel as a CPU bundle has it, and its objects."""
    objects = {sha256_hex(data): data for data in (spec.source, spec.data) if data is not None}
    refs = {digest: ObjectRef(digest, len(data)) for digest, data in objects.items()}
    params = tuple(
        Param(name, kind, spec.buffers[name], 0, 0, 1, hidden=False) for name, kind in spec.signature.items()
    )
    kernel = Kernel(
        spec.name, spec.entry, spec.source_sha256, True, 4, dict(spec.constants), params, (),
        data=None if spec.data is None else refs[sha256_hex(spec.data)],
        source=refs[spec.source_sha256],
    )  # fmt: skip
    return kernel, objects


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def image(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """One kernel before `penalize` that changes what is drawn, and one after `transduce` that changes text."""
    image = make_image(tmp_path_factory.mktemp("image") / "root", model)
    kernels = []
    for spec in (spec_of("lean", LEAN, ids=BOOSTED, boost=BOOST), spec_of("upper", UPPER)):
        kernel, objects = bundled(spec)
        kernels.append(kernel)
        for digest, data in objects.items():
            (image.path(places.OBJECTS_DIR) / digest).write_bytes(data)
    names = ("lean", "penalize", "sample", "transduce", "upper", "feedback")
    image.rewrite(kernels=tuple(kernels), patch=tuple(PatchStep(name, "slots") for name in names))
    return image


@pytest.fixture(scope="module")
def runtime(image: Image) -> Iterator[Runtime]:
    with running(image, {"RAL_THREADS": "1"}) as runtime:
        yield runtime


def reference(folder: Path, count: int) -> bytes:
    """Greedy decoding with transformers' logits, to which NumPy adds the boost, then upper case."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    known = token_bytes(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED}], add_generation_prompt=True, return_dict=False
    )
    text = b""
    for _ in range(count):
        with torch.inference_mode():
            logits = network(torch.tensor([ids])).logits[0, -1, : len(known)].numpy().copy()
        logits[BOOSTED] += np.float32(BOOST)
        ids = [*ids, int(np.argmax(logits))]
        if ids[-1] == 2:
            break
        text += known[ids[-1]]
    return text.upper()


def test_an_answer_is_what_the_kernels_make_of_it(runtime: Runtime, model: Path) -> None:
    expected = reference(model, 24)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": ASKED}],
        "temperature": 0,
        "max_tokens": 24,
    }
    status, answer, _ = runtime.post("/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == expected.decode(errors="replace")
    known = token_bytes(model)
    assert any(known[token].upper() in expected for token in BOOSTED if known[token])


def test_requests_beside_each_other_do_not_mix(runtime: Runtime, model: Path) -> None:
    """The interpreter runs one program a slot: rows of a batch stay apart."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": ASKED}],
        "temperature": 0,
        "max_tokens": 12,
    }
    expected = reference(model, 12).decode(errors="replace")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: runtime.post("/v1/chat/completions", body), range(3)))
    assert [answer["choices"][0]["message"]["content"] for _, answer, _ in answers] == [expected] * 3


TEXTS = [b"a Risk \xc3\xa9 z", b"", b"{profit}", b"x" * 400]
TOKENS = [105, 7, 106, 105]
SWAP = (
    HEAD
    + """@triton.jit
def swap_kernel(token: "*i32", by: "i32"):
    at = token + tl.program_id(0)
    tl.store(at, tl.load(at) + by)
"""
)
HOT = (
    HEAD
    + """@triton.jit
def hot_kernel(temperature: "*fp32"):
    tl.store(temperature + tl.program_id(0), 2.0)
"""
)
BAD = (
    HEAD
    + """@triton.jit
def bad_kernel(token: "*i32"):
    tl.store(token, tl.load(token) + missing)
"""
)
BOLD = (Path(__file__).parents[1] / "samples/user_kernel_checked/transformers/bold_tokens.py").read_text()
SPECS = {
    "lean": spec_of("lean", LEAN, ids=BOOSTED, boost=BOOST),
    "upper": spec_of("upper", UPPER),
    "bold_tokens": spec_of("bold_tokens", BOLD, terms=["i", "j"]),
    "swap": spec_of("swap", SWAP, by=3),
    "far": spec_of("swap", SWAP, by=300),
    "hot": spec_of("hot", HOT),
    "bad": spec_of("bad", BAD),
}


def logits_before() -> np.ndarray:
    return np.random.default_rng(4).normal(size=(4, 448)).astype(np.float32)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Every kernel of `SPECS`, one step each, in one process; and three that cannot be loaded."""
    slots = [{"token": token, "output": text} for token, text in zip(TOKENS, TEXTS, strict=True)]
    made = {name: bundled(spec) for name, spec in SPECS.items()}
    kernel, objects = made["upper"]
    broken = b"raise ValueError('no')\n"
    ref = ObjectRef(sha256_hex(broken), len(broken))
    ring = replace(kernel, params=(Param("ring", "*u8", "ring", 0, 0, 1, hidden=False),))
    made |= {
        "no source": (replace(kernel, source=None), objects),
        "broken": (replace(kernel, source=ref), {ref.sha256: broken}),
        "ring": (ring, objects),
    }
    cases: list[Case] = [(*item, logits_before(), slots) for item in made.values()]
    return dict(zip(made, run_apart(cases), strict=True))


@pytest.mark.parametrize("name", ["lean", "upper", "bold_tokens"])
def test_the_interpreter_and_the_ptx_store_the_same(name: str, results: dict[str, Result]) -> None:
    """The PTX that an image for GPUs ships, run by the simulator on the same buffers."""
    spec = SPECS[name]
    buffers: dict[str, Any] = {
        "logits": logits_before(),
        "vocab_size": 448,
        "token": np.array(TOKENS, np.int32),
        "output": np.zeros((4, 4096), np.uint8),
        "output_len": np.array([len(text) for text in TEXTS], np.int32),
        "config.ids": np.array(BOOSTED, np.int32),
        "config.ids_count": len(BOOSTED),
        "config.boost": BOOST,
        "terms": np.frombuffer(b"ij", np.uint8).astype(np.int32),
        "term_count": 2,
    }
    for row, text in enumerate(TEXTS):
        buffers["output"][row, : len(text)] = np.frombuffer(text, np.uint8)
    done = run_worker(spec, "sm_80", toolchain(), stop=Event())
    options = Options(shared=done.launch["shared"])
    arguments = {name: buffers[spec.buffers[name]] for name in spec.signature}
    Session(parse_module(done.ptx.decode()), spec.entry, (4, 1, 1), arguments, options).launch()
    logits, slots, said = results[name]
    assert said == ""
    assert np.array_equal(logits, buffers["logits"])
    assert np.array_equal(logits, logits_before()) == (name != "lean")
    assert [item["token"] for item in slots] == buffers["token"].tolist()
    ends = buffers["output_len"].tolist()
    found = [buffers["output"][row, :end].tobytes() for row, end in enumerate(ends)]
    assert [item["output"] for item in slots] == found
    assert (found != TEXTS) == (name != "lean")


def test_a_token_is_taken_over_and_must_exist(results: dict[str, Result]) -> None:
    assert [slot["token"] for slot in results["swap"][1]] == [token + 3 for token in TOKENS]
    assert results["far"][2] == "user kernel 'swap' stored the token 405, of 400"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hot", "user kernel 'hot' stored into 'temperature'"),
        ("bad", "user kernel 'bad' failed: "),
        ("no source", "cpu_user_kernels: interpret"),
        ("broken", "user kernel 'upper': its file does not load: ValueError: no"),
        ("ring", "user kernel 'upper': takes ring"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(name: str, said: str, results: dict[str, Result]) -> None:
    assert said in results[name][2]


def test_a_name_that_a_kernel_does_not_know_is_in_the_reason(results: dict[str, Result]) -> None:
    assert "missing" in results["bad"][2]
