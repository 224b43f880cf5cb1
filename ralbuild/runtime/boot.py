"""From nothing to ready, in stages. torch and transformers are imported only here, after the cheap checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ralbuild.contract.bundle import Bundle
from ralbuild.contract.codec import FormatError, parse_json
from ralbuild.runtime.errors import ModelMismatchError, OutOfMemoryError, SelfTestError
from ralbuild.runtime.host import available_memory, has_bfloat16, usable_cpus
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.log import log_event, log_line
from ralbuild.runtime.metrics import Metrics
from ralbuild.runtime.preflight import Checked, check_files, choose_hashed, hash_weights
from ralbuild.runtime.settings import PREPARE_THREADS, Settings

if TYPE_CHECKING:
    from ralbuild.runtime.cuda.decode import CudaGraph
    from ralbuild.runtime.model.graph import DecodeGraph
    from ralbuild.runtime.model.weights import LoadedModel
    from ralbuild.runtime.rendering import TemplateProcess
    from ralbuild.runtime.service import Service
    from ralbuild.runtime.steps import Patch
    from ralbuild.runtime.tokens import Tokenizer

_KV_SHARE = 0.8
"""Part of the memory left after loading that keys and values may take."""
_CANNED_STEPS = 2
_GPU_READS = (2048, 512)
"""Prompt tokens read in one go on a GPU, alone and beside others: a pass costs the host the same, whatever
its length. Chosen, not measured."""
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class _TextParts:
    """What works on text and tokens, and needs no torch."""

    patch: Patch
    tokenizer: Tokenizer
    template: TemplateProcess | None


def boot(
    settings: Settings, lifecycle: Lifecycle, metrics: Metrics, meet: Callable[[str], None] = lambda _: None
) -> Service:
    """Check, load, test and start; the decode loop runs when this returns.

    Args:
        meet: told the UUID of the GPU that is used, before anything is taken of it.

    Raises:
        StartError: of the class that says what is wrong.
    """
    lifecycle.enter("check")
    checked = check_files(settings)
    bundle = checked.bundle
    metrics.describe(bundle, checked.digest)
    how = settings.verification(sum(item.size for item in checked.manifest.weights))
    hashes = choose_hashed(checked.manifest.weights, how)
    log_event(
        "checked", bundle=f"sha256:{checked.digest}", model=bundle.model, weights=how, hashed=len(hashes)
    )
    if any(kernel.source is not None for kernel in bundle.kernels):
        # Triton reads it when its own functions are defined, and torch's import may bring it in.
        os.environ["TRITON_INTERPRET"] = "1"
    lifecycle.enter("import")
    with ThreadPoolExecutor(3) as pool:
        text = pool.submit(_load_text, checked)
        hashed = pool.submit(hash_weights, checked, hashes)
        graph: DecodeGraph | CudaGraph
        if bundle.target == "cuda":
            graph = _load_cuda(lifecycle, checked, text, meet)
        else:
            graph = _load_cpu(settings, lifecycle, checked, text)
        hashed.result()
    parts = text.result()
    from ralbuild.runtime.engine import ALONE, SHARED, Engine
    from ralbuild.runtime.prompts import Prompts
    from ralbuild.runtime.service import Service

    prompts = Prompts(bundle, parts.patch.tables, parts.tokenizer, parts.template, metrics)
    graph.keep(prompts.prefix())
    kv_bytes = _kv_budget(settings, graph, bundle)
    metrics.kv_limit.set(kv_bytes)
    metrics.kv_kept.set(graph.kept_bytes)
    engine = Engine(
        graph,
        frozenset(checked.manifest.eos_token_ids),
        metrics,
        slots=bundle.engine.max_batch_size,
        queue=settings.queue,
        kv_bytes=kv_bytes,
        reads=_GPU_READS if bundle.target == "cuda" else (ALONE, SHARED),
    )
    engine.start()
    log_line(f"RAL patch applied to graph_id=0x{id(graph):x} bundle=sha256:{checked.digest}")
    return Service(bundle, parts.patch.tables.routes, checked.digest, prompts, engine, metrics)


def _load_cpu(
    settings: Settings, lifecycle: Lifecycle, checked: Checked, text: Future[_TextParts]
) -> DecodeGraph:
    """Load the model into this process and test the graph."""
    model = _load_model(settings, lifecycle, checked, text)
    lifecycle.enter("self-test")
    from ralbuild.runtime.model.graph import DecodeGraph

    graph = DecodeGraph(model, text.result().patch, checked.bundle.engine.max_seq_len)
    self_test(graph, checked)
    return graph


def _load_cuda(
    lifecycle: Lifecycle, checked: Checked, text: Future[_TextParts], meet: Callable[[str], None]
) -> CudaGraph:
    """Load the model onto the GPU, capture the graphs and test them."""
    plain = _model_config(checked)
    from ralbuild.runtime.cuda.driver import Driver
    from ralbuild.runtime.cuda.patch import choose_objects

    # Before torch, which would initialise the driver as the environment says.
    driver = Driver(meet=meet)
    choose_objects(checked.bundle.kernels, checked.bundle.patch, driver.capability)
    from ralbuild.runtime.model.lean import import_torch

    import_torch()
    from ralbuild.runtime.cuda.device import Device
    from ralbuild.runtime.cuda.start import check_graph, load_model, make_graph

    parts = text.result()
    device = Device()
    lifecycle.enter("load")
    with device.active():  # what is copied and joined there is complete before a step on the same stream
        model = load_model(checked, plain, driver, device.place, lifecycle.progress)
    lifecycle.enter("capture")
    graph = make_graph(checked, parts.patch.tables, model, device, driver, lifecycle.progress)
    lifecycle.enter("self-test")
    check_graph(graph, checked, parts.patch)
    return graph


def self_test(graph: DecodeGraph, checked: Checked) -> None:
    """Push the bundle's token sequences through the folded step, and one through the whole graph.

    Raises:
        SelfTestError: when bytes differ from what the oracle gave at build time, or decoding does not work.
    """
    from ralbuild.runtime.interpreted import UserKernelError
    from ralbuild.runtime.lanes import Read
    from ralbuild.runtime.sampler import Draw

    for number, test in enumerate(checked.bundle.self_tests):
        found = graph.patch.replay(test.profile, test.tokens).hex()
        if found != test.output:
            message = f"needs {test.output[:80]}, found {found[:80]}"
            raise SelfTestError(message, place=f"bundle.json: self_tests[{number}]")
    canned = next((test.tokens for test in checked.bundle.self_tests if test.tokens), (0,))
    lane = graph.open(graph.patch.open(0, Draw()), canned)
    try:
        graph.advance([Read(lane, canned)], [])
        for _ in range(_CANNED_STEPS):
            graph.advance([], [lane])
    except UserKernelError as error:
        raise SelfTestError(str(error), place="canned prompt") from error
    graph.close(lane)
    if lane.slot.exhausted or lane.slot.step != 1 + _CANNED_STEPS:
        raise SelfTestError("the model gives no usable logits", place="canned prompt")


def _load_text(checked: Checked) -> _TextParts:
    from ralbuild.runtime.rendering import TemplateProcess, find_template
    from ralbuild.runtime.steps import link_patch, read_tables
    from ralbuild.runtime.tokens import Tokenizer

    tables = read_tables(checked.bundle, checked.objects)
    patch = link_patch(_without_foreign(checked.bundle), checked.manifest, tables, checked.objects)
    if "tokenizer.json" not in checked.files:
        raise ModelMismatchError("is missing", place="tokenizer.json")
    source = find_template(checked.files)
    template = TemplateProcess(source, PREPARE_THREADS) if source is not None else None
    return _TextParts(patch, Tokenizer(checked.files["tokenizer.json"]), template)


def _without_foreign(bundle: Bundle) -> Bundle:
    """Return the bundle without the user kernels of a GPU: the rest of the patch is the oracle."""
    users = {kernel.name for kernel in bundle.kernels if kernel.user and bundle.target == "cuda"}
    return replace(bundle, patch=tuple(step for step in bundle.patch if step.kernel not in users))


def _load_model(settings: Settings, lifecycle: Lifecycle, checked: Checked, text: Future[Any]) -> LoadedModel:
    """Import torch, then map the weights into our own decoder, or into transformers' model."""
    from ralbuild.contract.decoder_spec import read_spec
    from ralbuild.runtime.model.lean import import_torch

    plain = _model_config(checked)
    spec = read_spec(plain)
    if not isinstance(spec, str):
        import_torch()
    from ralbuild.runtime.model.linear import packs_halves
    from ralbuild.runtime.model.weights import (
        DTYPES,
        load_decoder,
        load_module,
        prepare_torch,
        read_weights,
    )

    _require_memory(checked, halves=not isinstance(spec, str) and packs_halves())
    text.result()  # a bundle that cannot run is refused before the weights are read
    threads = settings.threads or usable_cpus()
    prepare_torch(threads)
    name = checked.bundle.engine.dtype
    dtype, widen = DTYPES[name], name == "bfloat16" and not has_bfloat16()
    weights = read_weights(checked.weights)
    if isinstance(spec, str):
        from ralbuild.runtime.model.families import import_family

        classes = import_family(checked.manifest.model_type)
        lifecycle.enter("load")
        loaded = load_module(*classes, plain, weights, dtype, widen=widen)
    else:
        lifecycle.enter("load")
        loaded = load_decoder(spec, weights, dtype, widen=widen, progress=lifecycle.progress)
    log_event(
        "loaded",
        dtype=name,
        matrices=str(loaded.kept).removeprefix("torch."),
        parameters=checked.manifest.parameters,
        threads=threads,
        code=f"transformers ({spec})" if isinstance(spec, str) else "ralbuild",
    )
    return loaded


def _model_config(checked: Checked) -> dict[str, Any]:
    try:
        plain = parse_json(checked.files.get("config.json", b"null"), "config.json")
    except FormatError as error:
        raise ModelMismatchError(error.message, place=error.where) from None
    if not isinstance(plain, dict) or plain.get("model_type") != checked.manifest.model_type:
        message = f"is not the configuration of a {checked.manifest.model_type!r} model"
        raise ModelMismatchError(message, place="config.json")
    return plain


def _require_memory(checked: Checked, *, halves: bool) -> None:
    """Refuse weights that do not fit; with ``halves`` those of two bytes in the file keep them."""
    needed = checked.manifest.parameters * _ITEM_BYTES[checked.bundle.engine.dtype]
    if halves:
        needed = min(needed, sum(path.stat().st_size for path in checked.weights))
    free = available_memory()
    if needed > free:
        message = f"the weights need {needed >> 20} MiB, {free >> 20} MiB are free"
        raise OutOfMemoryError(message, hint="raise the memory limit, or build with runtime.dtype: bfloat16")


def _kv_budget(settings: Settings, graph: DecodeGraph | CudaGraph, bundle: Bundle) -> int:
    """Return what texts may take beside what is kept for all of them; a GPU has taken it already."""
    max_seq_len = bundle.engine.max_seq_len
    if bundle.target == "cuda":
        return bundle.engine.max_batch_size * graph.cache.cost(max_seq_len)
    budget = (
        settings.kv_bytes - graph.kept_bytes if settings.kv_bytes else int(available_memory() * _KV_SHARE)
    )
    needed = graph.cache.cost(max_seq_len)
    if needed > budget:
        message = (
            f"one text of {max_seq_len} tokens needs {needed >> 20} MiB of cache, {budget >> 20} MiB are free"
        )
        raise OutOfMemoryError(message, hint="raise the memory limit or lower max_seq_len")
    return budget
