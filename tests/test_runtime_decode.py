"""Our decode loop against transformers' own `generate`: same tokens in float32, alone and together."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime_fixtures import Image, Rules, make_image, make_model, store_as, token_bytes
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ralbuild.contract.bundle import Engine
from ralbuild.contract.decoder_spec import DecoderSpec, read_spec
from ralbuild.runtime.errors import ModelMismatchError
from ralbuild.runtime.lanes import Read
from ralbuild.runtime.model.cache import BUCKET, KvShape, SlotCache, capacity_for
from ralbuild.runtime.model.decoder import frequencies
from ralbuild.runtime.model.families import import_family
from ralbuild.runtime.model.graph import DecodeGraph, Lane
from ralbuild.runtime.model.linear import MANY_ROWS, Product, padded_rows, widen_linears
from ralbuild.runtime.model.weights import LoadedModel, load_decoder, load_module, read_weights
from ralbuild.runtime.preflight import check_files
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.settings import Settings
from ralbuild.runtime.steps import link_patch, read_tables

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 24},
    "phi3": {"pad_token_id": 2, "sliding_window": None},
    "gemma": {},
    "gpt2": {},
}
PROMPTS = [[1, 50, 60, 70], list(range(10, 100)), [5], list(range(300, 340)), [7, 8] * 30, [9, 30, 31]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are faster on one thread, and far faster when other tests run beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(plain: dict[str, Any], state: dict[str, torch.Tensor], code: str, dtype: torch.dtype) -> LoadedModel:
    """Load as `boot` does; ``code`` says whose forward pass: ours, or transformers'."""
    spec = read_spec(plain)
    if code == "ours":
        assert isinstance(spec, DecoderSpec), spec
        return load_decoder(spec, state, dtype, widen=True, progress=lambda _done, _total: None)
    return load_module(*import_family(plain["model_type"]), plain, state, dtype, widen=True)


def open_graph(image: Image, code: str = "ours") -> DecodeGraph:
    """Load an image's model and patch, as `boot` does."""
    checked = check_files(Settings(root=str(image.root)))
    plain = json.loads(checked.files["config.json"])
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[checked.bundle.engine.dtype]
    loaded = load(plain, read_weights(checked.weights), code, dtype)
    tables = read_tables(checked.bundle, checked.objects)
    patch = link_patch(checked.bundle, checked.manifest, tables, checked.objects)
    return DecodeGraph(loaded, patch, checked.bundle.engine.max_seq_len)


def decode_together(
    graph: DecodeGraph, prompts: list[list[int]], count: int, chunk: int = 512
) -> list[list[int]]:
    """Start a new prompt every second step, so that lengths, pools and batch sizes keep changing."""
    waiting = list(enumerate(prompts))
    lanes: dict[int, Lane] = {}
    out: dict[int, list[int]] = {}
    turn = 0
    while waiting or lanes:
        if waiting and turn % 2 == 0:
            number, prompt = waiting.pop(0)
            lane = graph.open(graph.patch.open(0, Draw()), prompt)
            for begin in range(lane.seat.length, len(prompt), chunk):
                part = Read(lane, prompt[begin : begin + chunk], last=begin + chunk >= len(prompt))
                graph.advance([part], [])
            lanes[number], out[number] = lane, [lane.slot.token]
        for number in [number for number in lanes if len(out[number]) == count]:
            graph.close(lanes.pop(number))
        if lanes:
            graph.advance([], list(reversed(lanes.values())))
            for number, lane in lanes.items():
                out[number].append(lane.slot.token)
        turn += 1
    return [out[number] for number in range(len(prompts))]


def by_transformers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    # Ids that the tokenizer does not have are never drawn.
    beyond = list(range(len(token_bytes(folder)), model.config.vocab_size))
    model.generation_config.suppress_tokens = beyond or None
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        out.append(found[0, len(prompt) :].tolist())
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param.partition("-")[0]
    return make_model(tmp_path_factory.mktemp(request.param) / "model", name, **FAMILIES[request.param])


def code_of(family: Path) -> str:
    """Which code a family is served by: docs/runtime.md has the same table."""
    return (
        "transformers" if json.loads((family / "config.json").read_text())["model_type"] == "gpt2" else "ours"
    )


def test_float32_tokens_equal_transformers_alone_and_in_mixed_batches(family: Path, tmp_path: Path) -> None:
    graph = open_graph(make_image(tmp_path / "root", family), code_of(family))
    expected = by_transformers(family, PROMPTS, 40)  # texts outgrow their pools of 64 and 128
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert [decode_together(graph, [prompt], 40)[0] for prompt in PROMPTS] == expected
    assert decode_together(graph, PROMPTS, 40) == expected
    assert decode_together(graph, PROMPTS, 40, chunk=7) == expected
    assert graph.cache.held_bytes() == 0


def test_prompts_are_read_beside_each_other_and_beside_running_texts_as_alone(
    family: Path, tmp_path: Path
) -> None:
    """Random parts of random prompts share forward passes with steps; some begin with what is kept."""
    graph = open_graph(make_image(tmp_path / "root", family), code_of(family))
    chance = random.Random(5)
    prefix = [30, 31, 32, 33, 34]
    prompts = [prefix + PROMPTS[1], PROMPTS[3], prefix, [*prefix, 9], PROMPTS[0], [*prefix[:4], 8, 9]]
    expected = by_transformers(family, prompts, 12)
    graph.keep(prefix)
    waiting, lanes = dict(enumerate(prompts)), dict[int, Lane]()
    found: dict[int, list[int]] = {number: [] for number in waiting}
    opened = {number: graph.open(graph.patch.open(0, Draw()), prompt) for number, prompt in waiting.items()}
    assert [lane.seat.length for lane in opened.values()] == [5, 0, 0, 5, 0, 0]
    while waiting or lanes:
        reads = []
        for number in chance.sample(list(waiting), min(len(waiting), 3)):
            lane, prompt = opened[number], prompts[number]
            size = chance.choice([1, 7, 40])
            part = prompt[lane.seat.length : lane.seat.length + size]
            reads.append(Read(lane, part, last=lane.seat.length + len(part) == len(prompt)))
            if reads[-1].last:
                del waiting[number]
        graph.advance(reads, list(lanes.values()))
        lanes |= {number: lane for number, lane in opened.items() if lane.slot.step and not found[number]}
        for number in list(lanes):
            found[number].append(lanes[number].slot.token)
            if len(found[number]) == 12:
                graph.close(lanes.pop(number))
    assert list(found.values()) == expected
    assert graph.cache.held_bytes() == 0


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_llama_3_positions_turn_as_transformers_turns_them(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", head_dim=64, rope_parameters=LLAMA3)
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    assert isinstance(spec, DecoderSpec)
    rotary = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    assert torch.equal(frequencies(spec.rope, spec.dim), rotary.inv_freq)
    assert len(set((rotary.inv_freq * 500000 ** (torch.arange(0, 64, 2) / 64)).tolist())) > 3


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("gpt2", {}, "no decoder for 'gpt2'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("llama", {"rope_scaling": LLAMA3 | {"factor": "8"}}, "rope parameters"),
        ("phi3", {"partial_rotary_factor": 0.5}, "rotary positions"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding windows by layer"),
        ("gemma", {"use_bidirectional_attention": True}, "unusual attention"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'"),
        ("llama", {"logit_scale": 2.0}, "unknown key 'logit_scale'"),
        ("llama", {"hidden_size": "64"}, "a size is missing"),
    ],
)
def test_what_our_decoder_does_not_know_it_leaves_to_transformers(
    family: str, change: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(family).to_diff_dict()
    found = read_spec(config | change)
    assert isinstance(found, str)
    assert reason in found


def test_a_configuration_left_to_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    folder = make_model(tmp_path / "model", rope_parameters=yarn)
    graph = open_graph(make_image(tmp_path / "root", folder), "transformers")
    assert decode_together(graph, PROMPTS[:3], 20) == by_transformers(folder, PROMPTS[:3], 20)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama") / "model")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_alone_gives_the_same_text_every_time(llama: Path, tmp_path: Path, dtype: str) -> None:
    graph = open_graph(make_image(tmp_path / "root", llama, engine=Engine(8, 512, dtype)))
    texts = [decode_together(graph, [PROMPTS[1]], 40) for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]


def test_a_seed_gives_the_same_sample_whatever_else_comes_and_goes(llama: Path, tmp_path: Path) -> None:
    graph = open_graph(make_image(tmp_path / "root", llama))
    chance = random.Random(3)
    draws = [Draw(1.5, chance.choice([1.0, 0.8]), chance.getrandbits(64)) for _ in range(12)]
    prompts = [[chance.randrange(3, 400) for _ in range(chance.randrange(1, 90))] for _ in draws]
    counts = [chance.randrange(1, 60) for _ in draws]

    def start(number: int) -> Lane:
        lane = graph.open(graph.patch.open(0, draws[number]), prompts[number])
        graph.advance([Read(lane, prompts[number])], [])
        return lane

    def alone(number: int) -> list[int]:
        lane, out = start(number), list[int]()
        while len(out) < counts[number]:
            out.append(lane.slot.token)
            graph.advance([], [lane])
        graph.close(lane)
        return out

    expected = [alone(number) for number in range(len(draws))]
    waiting, lanes = list(range(len(draws))), dict[int, Lane]()
    found: list[list[int]] = [[] for _ in draws]
    while waiting or lanes:
        while waiting and chance.random() < 0.4:
            number = waiting.pop(chance.randrange(len(waiting)))
            lanes[number] = start(number)
        for number in list(lanes):
            found[number].append(lanes[number].slot.token)
            if len(found[number]) == counts[number]:
                graph.close(lanes.pop(number))
        if lanes:
            graph.advance([], chance.sample(list(lanes.values()), len(lanes)))
    assert found == expected
    assert graph.cache.held_bytes() == 0


def test_the_cache_takes_memory_for_texts_not_for_slots(llama: Path, tmp_path: Path) -> None:
    graph = open_graph(make_image(tmp_path / "root", llama, engine=Engine(128, 1 << 20, "float32")))
    assert graph.cache.held_bytes() == 0
    lane = graph.open(graph.patch.open(0, Draw()), [1, 2, 3])
    graph.advance([Read(lane, [1, 2, 3])], [])
    assert graph.cache.held_bytes() == BUCKET * graph.shape.position_bytes


def test_a_prompt_s_own_memory_is_free_once_it_has_joined_without_a_collector() -> None:
    cache = SlotCache(KvShape(1, 1, 4, torch.float32), 64)
    seat = cache.stage(10)
    memory = weakref.ref(seat.pool.layers[0])
    gc.disable()
    try:
        joined = cache.join(seat)
        assert memory() is None
    finally:
        gc.enable()
    cache.leave(joined)
    assert cache.held_bytes() == 0


def test_capacities_are_buckets_and_never_less_than_needed() -> None:
    for positions in range(1, 1100):
        capacity = capacity_for(positions, 1000)
        assert capacity >= positions
        assert (
            capacity == 1000
            or (capacity % BUCKET == 0 and (capacity // BUCKET).bit_count() == 1)
            or positions > 1000
        )


def test_bfloat16_logits_stay_near_float32(llama: Path, tmp_path: Path) -> None:
    prompt = list(range(10, 90))
    logits = []
    for dtype in ("float32", "bfloat16"):
        graph = open_graph(make_image(tmp_path / dtype, llama, engine=Engine(8, 512, dtype)))
        rows: list[Any] = []
        graph.patch.run = lambda found, _slots, rows=rows: rows.append(found.copy())  # type: ignore[method-assign,misc]
        graph.advance([Read(graph.open(graph.patch.open(0, Draw()), prompt), prompt)], [])
        logits.append(rows[0][0])
    assert abs(logits[0] - logits[1]).max() < 0.05 * abs(logits[0]).max()


def test_products_in_float32_are_nearer_to_the_exact_ones_and_keep_the_dtype() -> None:
    model = nn.Sequential(nn.Linear(256, 64)).bfloat16()
    rows = torch.randn(MANY_ROWS, 256).bfloat16()
    narrow = model(rows)
    widen_linears(model)
    assert torch.equal(model(rows[:1]), narrow[:1])
    exact = rows.double() @ model[0].weight.double().T + model[0].bias.double()
    assert model(rows).dtype == torch.bfloat16
    assert (model(rows) - exact).abs().max() <= (narrow - exact).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_stacked_products_equal_separate_ones(dtype: torch.dtype, count: int) -> None:
    layers = [nn.Linear(48, size).to(dtype) for size in (32, 16, 16)]
    product = Product([x.weight for x in layers], [x.bias for x in layers], dtype=dtype)
    rows = torch.randn(count, 48, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(product(rows), torch.cat([layer(rows) for layer in layers], -1))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_files_of_two_bytes_give_transformers_tokens_in_float32(
    family: Path, tmp_path: Path, stored: torch.dtype
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(family, folder)
    store_as(folder, stored)
    graph = open_graph(make_image(tmp_path / "root", folder), code_of(family))
    assert decode_together(graph, PROMPTS, 20) == by_transformers(folder, PROMPTS, 20)


BIG, SMALL, MIXED = 3e30, 3e-20, torch.tensor([1.0, 1e-9, 1e4, 1e-30])
MATRICES = {
    "plain": lambda draw: draw * 0.03,
    "one digit below half": lambda draw: draw * 0.01,
    "beyond float16": lambda draw: draw * 1e6,
    "huge": lambda draw: draw * BIG,
    "tiny": lambda draw: draw * SMALL,
    "subnormal": lambda draw: draw * 1e-39,
    "rows of every size": lambda draw: draw * MIXED.repeat(6)[:, None],
    "zeros": lambda draw: draw * 0,
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", MATRICES)
def test_float32_products_are_as_near_to_the_exact_ones_as_torchs(
    kind: str, stored: torch.dtype, biased: bool
) -> None:
    """Whatever the file's type and the matrix's size; the values are float64's."""
    torch.manual_seed(5)
    matrix = MATRICES[kind](torch.randn(24, 700)).to(stored)
    bias = torch.randn(24) * matrix.double().abs().max().nan_to_num(0, 0).float() if biased else None
    product = Product([matrix], [bias] if bias is not None else [], dtype=torch.float32)
    with torch.inference_mode():
        for count in (1, 2, 5, 16, 33):
            rows = torch.randn(count, 700)
            exact = rows.double() @ matrix.double().T
            terms = rows.double().abs() @ matrix.double().abs().T
            largest = rows.double().abs().sum(1, keepdim=True) * matrix.double().abs().max()
            if bias is not None:
                exact, terms = exact + bias.double(), terms + bias.double().abs()
            if stored == torch.float16 and kind in ("beyond float16", "huge"):
                assert torch.equal(product(rows).isfinite(), exact.isfinite())  # infinite in the file already
                continue
            # A sum of 700 terms in float32, and what an element may lose for its size.
            allowed = terms * 2**-20 + largest * 2**-24
            error = (product(rows).double() - exact).abs()
            assert (error <= allowed + 1e-38).all(), float((error - allowed).max())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_texts_numbers_do_not_depend_on_the_texts_beside_it(stored: torch.dtype) -> None:
    matrix = (torch.randn(70, 300) * 0.03).to(stored)
    product = Product([matrix], dtype=torch.float32)
    rows = torch.randn(200, 300)
    with torch.inference_mode():
        together = product(rows)
        for begin, end in ((0, 1), (0, 7), (13, 16), (50, 199), (199, 200)):
            assert torch.equal(product(rows[begin:end]), together[begin:end])
        assert product(rows[:0]).shape == (0, 70)


def test_matrices_of_two_byte_files_stay_at_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches oneDNN, which keeps four bytes an element, comes from a float32 file."""
    given: list[torch.Tensor] = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(
        torch.ops.mkldnn,
        "_reorder_linear_weight",
        lambda matrix, rows: given.append(matrix) or reorder(matrix, rows),
    )
    draws = {dtype: torch.randn(8, 16).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    products = [Product([draw], dtype=torch.float32) for draw in draws.values()]
    mixed = Product([draws[torch.bfloat16], draws[torch.float32]], dtype=torch.float32)
    assert [product.kept for product in products] == [torch.float16, torch.float16, torch.float32]
    assert mixed.kept == torch.float32
    assert [len(matrix) for matrix in given] == [8, 16]
    assert torch.equal(given[0], draws[torch.float32])


def test_bfloat16_has_few_numbers_of_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN compiles those as well, on processors with instructions for them."""
    sizes: set[int] = set()

    def count_rows(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.add(rows.shape[0])
        return nn.functional.linear(rows, *others)

    monkeypatch.setattr("ralbuild.runtime.model.linear.linear", count_rows)
    matrix = torch.randn(24, 32).bfloat16()
    product = Product([matrix], dtype=torch.bfloat16)
    with torch.inference_mode():
        for count in range(1, 513):
            rows = torch.randn(count, 32).bfloat16()
            expected = rows.double() @ matrix.double().T
            torch.testing.assert_close(product(rows).double(), expected, rtol=0.02, atol=0.05)
    assert len(sizes) <= 56


def test_a_missing_tensor_is_an_error_that_names_it(llama: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        _load_with(llama, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))


def test_an_unexpected_tensor_is_an_error_that_names_it(llama: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"unexpected: model\.layers\.9\.x"):
        _load_with(llama, lambda state: state.update({"model.layers.9.x": torch.zeros(3)}))


def test_a_tensor_of_another_shape_is_an_error_that_names_it(llama: Path) -> None:
    with pytest.raises(ModelMismatchError, match=r"model\.norm\.weight.*needs shape \[64\], found \[3\]"):
        _load_with(llama, lambda state: state.update({"model.norm.weight": torch.zeros(3)}))


def test_computed_tensors_of_old_files_are_ignored_whatever_their_type(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "gpt2")
    path = folder / "model.safetensors"
    state = {name.removeprefix("transformer."): item for name, item in load_file(path).items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    state["h.1.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    state["h.0.attn.masked_bias"] = torch.tensor(-1e9)
    save_file(state, path)
    read = read_weights((path,))
    assert set(read) == set(state) - {"h.0.attn.bias", "h.1.attn.bias", "h.0.attn.masked_bias"}
    load(json.loads((folder / "config.json").read_text()), read, "transformers", torch.float32)


def _load_with(folder: Path, change: Any, code: str = "ours") -> None:
    state = read_weights((folder / "model.safetensors",))
    change(state)
    load(json.loads((folder / "config.json").read_text()), state, code, torch.float32)


def test_a_tied_head_that_differs_is_refused_and_an_equal_one_is_dropped(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    _load_with(folder, lambda state: state.update({"lm_head.weight": state[embedding].clone()}))
    with pytest.raises(ModelMismatchError, match=r"lm_head\.weight.*differs"):
        _load_with(folder, lambda state: state.update({"lm_head.weight": state[embedding] + 1}))


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelMismatchError, match="'mamba' is not supported; known: gemma, gpt2, llama"):
        import_family("mamba")


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelMismatchError, match="not a safetensors file"):
        read_weights((tmp_path / "model.safetensors",))


def real_model() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ralbuild" / "models" / "smollm2-135m-instruct"


@pytest.mark.real_model
def test_smollm2_float32_tokens_equal_transformers_in_a_mixed_batch(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = real_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [
        "What is the capital of France?",
        "List three risks of compliance audits.",
        "Say hi.",
        "Why is 7 prime?",
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in asked
    ]
    graph = open_graph(make_image(tmp_path / "root", folder, (Rules(),)))
    graph.keep(prompts[0][:20])  # the template's system message
    assert decode_together(graph, prompts, 12) == by_transformers(folder, prompts, 12)


def test_few_numbers_of_rows_are_compiled_and_every_product_is_right(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """oneDNN keeps code for each number of rows for good; its own log says which ones it was given."""
    matrix = torch.randn(24, 32)
    product = Product([matrix], dtype=torch.float32)
    with torch.inference_mode(), torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for count in range(1, 513):
            rows = torch.randn(count, 32)
            expected = rows.double().numpy() @ matrix.double().numpy().T
            np.testing.assert_allclose(product(rows).numpy(), expected, rtol=1e-4, atol=1e-4)
    sizes = {int(found) for found in re.findall(r",inner_product,.*?mb(\d+)ic32oc24", capfd.readouterr().out)}
    assert sizes
    assert len(sizes) <= 56
    assert all(count <= padded_rows(count) <= count * 9 / 8 for count in range(1, 5000))
