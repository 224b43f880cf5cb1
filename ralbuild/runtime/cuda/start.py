"""From checked files to a decode graph on a GPU: driver, weights, buffers, kernels, captures, self-test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ralbuild.contract.decoder_spec import DecoderSpec, read_spec
from ralbuild.runtime.cuda.buffers import Buffers, Sizes
from ralbuild.runtime.cuda.decode import CudaGraph, DeviceLane
from ralbuild.runtime.cuda.device import Device
from ralbuild.runtime.cuda.driver import Driver
from ralbuild.runtime.cuda.patch import GpuPatch
from ralbuild.runtime.errors import ModelMismatchError, OutOfMemoryError, SelfTestError
from ralbuild.runtime.lanes import Read
from ralbuild.runtime.model.decoder import Decoder
from ralbuild.runtime.model.weights import DTYPES, make_decoder, prepare_torch, read_weights
from ralbuild.runtime.preflight import Checked
from ralbuild.runtime.sampler import Draw
from ralbuild.runtime.steps import Patch, Tables

_CHECKED_STEPS, _CANNED_TOKENS = 2, 8
_SMALLER = "lower max_batch_size or max_seq_len in the config"
Progress = Callable[[int, int], None]


def load_model(
    checked: Checked, plain: Mapping[str, Any], driver: Driver, place: torch.device, progress: Progress
) -> Decoder:
    """Copy the weights to the device, once it is certain that everything fits.

    Raises:
        ModelMismatchError: when our decoder does not run the model: there is no other one on a GPU.
        OutOfMemoryError: naming what is needed.
    """
    spec = read_spec(plain)
    if isinstance(spec, str):
        raise ModelMismatchError(f"cannot be served on a GPU: {spec}", place="config.json")
    require_memory(checked, spec, driver.memory()[0])
    prepare_torch(1)
    dtype = DTYPES[checked.bundle.engine.dtype]
    weights = read_weights(checked.weights)
    return make_decoder(spec, weights, dtype, widen=False, progress=progress, device=place)


def require_memory(checked: Checked, spec: DecoderSpec, free: int) -> None:
    """Raise OutOfMemoryError when weights, keys and values do not fit into ``free`` bytes of the device."""
    engine = checked.bundle.engine
    item = DTYPES[engine.dtype].itemsize
    weights = checked.manifest.parameters * item
    cache = spec.cache_bytes(engine.max_batch_size, engine.max_seq_len, item)
    if weights + cache > free:
        message = (
            f"the weights need {weights >> 20} MiB, {engine.max_batch_size} texts of {engine.max_seq_len} "
            f"tokens {cache >> 20} MiB; {free >> 20} MiB of the device are free"
        )
        raise OutOfMemoryError(message, hint=_SMALLER)


def make_graph(
    checked: Checked, tables: Tables, model: Decoder, device: Device, driver: Driver, progress: Progress
) -> CudaGraph:
    """Take the buffers, load the kernels, warm and capture every step.

    Raises:
        BindingError, DriverError, HostUnfitError: as `GpuPatch.load`.
        CaptureFailedError: as `CudaGraph.prepare`.
        OutOfMemoryError: when the device has too little for buffers and workspaces.
    """
    try:
        return _make_graph(checked, tables, model, device, driver, progress)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).partition("\n")[0], place="GPU", hint=_SMALLER) from None


def _make_graph(
    checked: Checked, tables: Tables, model: Decoder, device: Device, driver: Driver, progress: Progress
) -> CudaGraph:
    bundle, manifest = checked.bundle, checked.manifest
    sizes = Sizes(
        bundle.engine.max_batch_size, manifest.vocab_size, manifest.tokenizer_size, manifest.eos_token_ids
    )
    with device.active():
        buffers = Buffers(tables, sizes, bundle.kernels, checked.objects, device.place)
    patch = GpuPatch.load(
        driver,
        device.stream,
        bundle.kernels,
        bundle.patch,
        checked.objects,
        buffers.values,
        buffers.own,
        max_slots=sizes.slots,
    )
    graph = CudaGraph(
        device, driver, model.logits, model.shape, tables, patch, buffers, sizes, bundle.engine.max_seq_len
    )
    graph.prepare(progress)
    return graph


def check_graph(graph: CudaGraph, checked: Checked, oracle: Patch) -> None:
    """Compare the device with the plain executors: the bundle's texts, then each captured graph.

    Args:
        oracle: our steps of the bundle's patch, as the CPU target runs them.

    Raises:
        SelfTestError: naming what differs.
    """
    for number, test in enumerate(checked.bundle.self_tests):
        found = graph.rewrite(test.profile, test.tokens).hex()
        if found != test.output:
            message = f"needs {test.output[:80]}, found {found[:80]}"
            raise SelfTestError(message, place=f"bundle.json: self_tests[{number}]")
    canned = next((test.tokens for test in checked.bundle.self_tests if test.tokens), (0,))[:_CANNED_TOKENS]
    exact = not any(kernel.user for kernel in checked.bundle.kernels)
    for slots, span in graph.shapes:
        graph.least_span = span
        lanes = [
            graph.open(graph.patch.open(0, Draw(), canned, _CHECKED_STEPS), canned) for _ in range(slots)
        ]
        try:
            _check_steps(graph, lanes, oracle, exact=exact)
        finally:
            graph.least_span = 0
            for lane in lanes:
                graph.close(lane)


def _check_steps(graph: CudaGraph, lanes: list[DeviceLane], oracle: Patch, *, exact: bool) -> None:
    """Step ``lanes``, and let the oracle draw from the device's own logits of the first and the last."""
    place = f"graph for {len(lanes)} slots and {graph.least_span} positions"
    tested = lanes[:1] + lanes[1:][-1:]
    wanted = [oracle.open(0, Draw()) for _ in tested]
    graph.advance([Read(lane, lane.slot.prompt[lane.seat.length :]) for lane in lanes], [])
    for _ in range(_CHECKED_STEPS):
        rows = [graph.logits(lane.seat.row) for lane in tested]
        drawn = graph.advance([], lanes)
        for lane, slot, row in zip(tested, wanted, rows, strict=True):
            oracle.run(row[None], [slot])
            if slot.exhausted or lane not in drawn or lane.slot.exhausted:
                raise SelfTestError("the model gives no usable logits", place=place)
            if exact and (lane.slot.token, lane.slot.output) != (slot.token, slot.output):
                found, needed = (lane.slot.token, lane.slot.output), (slot.token, slot.output)
                raise SelfTestError(f"needs token and text {needed}, found {found}", place=place)
