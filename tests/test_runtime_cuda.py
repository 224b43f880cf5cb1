"""The GPU's patch against a driver that checks every call. Nothing here ran on a device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_device
import cuda_stub
import pytest
import torch
from compile_support import compiled
from cuda_device import Rig
from cuda_stub import STEPS, Stub, kernel, kernels, steps

from ralbuild.contract.bundle import Kernel, KernelObject, ObjectRef
from ralbuild.runtime.cuda import abi
from ralbuild.runtime.cuda.arguments import parameter_block
from ralbuild.runtime.cuda.driver import Driver, Function
from ralbuild.runtime.cuda.graphs import spans
from ralbuild.runtime.cuda.patch import GpuPatch, buckets, choose_object
from ralbuild.runtime.cuda.pool import Pool
from ralbuild.runtime.errors import (
    BindingError,
    BundleCorruptError,
    CaptureFailedError,
    DriverError,
    HostUnfitError,
    StartError,
)

BUCKETS = (6, 4, 2, 1)
OUT_OF_MEMORY = 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(cuda_stub.build_stub(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def stub(library: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    for name in ("CUDA_DISABLE_PTX_JIT", "CUDA_CACHE_DISABLE", "CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT"):
        monkeypatch.setenv(name, "unset")
    library.reset()
    yield library
    library.reset()


@pytest.fixture
def rig(stub: Stub) -> Rig:
    return cuda_device.rig(stub)


def warm(rig: Rig, patch: GpuPatch) -> None:
    patch.launch(6)
    rig.driver.synchronize(rig.stream)


# The door


HANDLES = {
    "CUcontext", "CUmodule", "CUfunction", "CUstream", "CUgraph", "CUgraphExec", "CUgraphNode", "void *"
}  # fmt: skip
INTEGERS = {
    "CUresult", "CUdevice", "CUdevice_attribute", "CUfunction_attribute", "CUstreamCaptureStatus", "CUjit_option", "int"
}  # fmt: skip


def header_types(text: str, name: str) -> list[str]:
    """The parameter types of a function, as NVIDIA's header declares it."""
    declared = re.search(rf"^CUresult CUDAAPI {name}\(([^)]*)\);", text, re.MULTILINE)[1]
    return [re.sub(r"\w+$", "", item.strip()).strip() for item in declared.replace("\n", " ").split(",")]


def c_type(declared: str) -> Any:
    plain = " ".join(declared.replace("const ", "").replace("*", " *").split())
    known = {
        **dict.fromkeys(HANDLES, ctypes.c_void_p),
        **dict.fromkeys(INTEGERS, ctypes.c_int),
        "unsigned int": ctypes.c_uint,
        "unsigned long long": ctypes.c_uint64,
        "CUdeviceptr": ctypes.c_uint64,
        "size_t": ctypes.c_size_t,
        "char *": ctypes.c_char_p,
        "CUuuid": abi.Uuid,
    }
    if plain in known:
        return known[plain]
    return ctypes.POINTER(c_type(plain.removesuffix("*").strip()))


def test_every_function_has_the_name_and_the_types_of_nvidia_s_header() -> None:
    text = cuda_stub.header().read_text()
    for exported, types in abi.SIGNATURES.items():
        plain = re.sub(r"_v\d$|WithFlags$", "", exported)
        renamed = re.search(
            rf"^\s*#define {plain} +(?:__CUDA_API_\w+\()?(\w+)\)?$", text, re.MULTILINE
        )  # the last one wins: the first block of the header is for per-thread streams
        assert (renamed[1] if renamed else plain) == exported
        assert list(types) == [c_type(item) for item in header_types(text, plain)], exported


def test_every_number_is_the_one_of_nvidia_s_header(tmp_path: Path) -> None:
    names = {
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": abi.COMPUTE_CAPABILITY_MAJOR,
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": abi.COMPUTE_CAPABILITY_MINOR,
        "CU_FUNC_ATTRIBUTE_BINARY_VERSION": abi.BINARY_VERSION,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": abi.MAX_DYNAMIC_SHARED_SIZE_BYTES,
        "CU_STREAM_CAPTURE_STATUS_ACTIVE": abi.CAPTURE_ACTIVE,
        "CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT": abi.PARAM_BUFFER_POINTER,
        "CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT": abi.PARAM_BUFFER_SIZE,
        "CUDA_SUCCESS": abi.SUCCESS,
    }
    cuda_stub.require_facts(tmp_path, cuda_stub.header().parent, "cuda.h", names)


def test_compiling_is_off_before_the_driver_starts_whatever_the_environment_says(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    Driver(library=stub.path)
    assert stub.faults == []
    assert os.environ["CUDA_DISABLE_PTX_JIT"] == "1"


def test_a_host_without_a_driver_or_with_an_old_one_is_refused(stub: Stub, tmp_path: Path) -> None:
    with pytest.raises(HostUnfitError, match=r"libcuda\.so\.9: cannot be loaded.*--gpus"):
        Driver(library="libcuda.so.9")
    lacking = tmp_path / "liblacking.so"
    subprocess.run(["cc", "-shared", "-o", str(lacking), "-x", "c", "/dev/null"], check=True)
    with pytest.raises(HostUnfitError, match="needs a CUDA driver with cuGetErrorName"):
        Driver(library=str(lacking))
    stub.reset(version=12010)
    with pytest.raises(HostUnfitError, match=r"for CUDA 12\.2 or newer, found 12\.1"):
        Driver(library=stub.path)
    stub.reset()
    with pytest.raises(DriverError, match=r"cuDeviceGet failed with an unknown error \(101\).*device 3"):
        Driver(3, library=stub.path)


def test_memory_of_the_device_is_counted(rig: Rig) -> None:
    free, total = rig.driver.memory()
    assert total - free == rig.pool.size
    rig.driver.release()
    assert rig.stub.faults == []


def test_buffers_of_the_pool_are_apart_aligned_and_zero() -> None:
    kinds = {
        "a": (torch.int64, (3,)),
        "b": (torch.uint8, (0,)),
        "c": (torch.int16, (5, 40)),
        "d": (torch.uint8, (256,)),
    }
    pool = Pool(kinds, torch.device("cpu"))
    sizes = {"a": 24, "b": 1, "c": 400, "d": 256}
    places = sorted((pool.addresses[name], sizes[name]) for name in kinds)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))
    assert all(start % 256 == 0 for start, _ in places)
    for name, (dtype, shape) in kinds.items():
        found = pool.tensors[name]
        assert (found.dtype, tuple(found.shape), int(found.sum())) == (dtype, shape, 0)
        assert found.data_ptr() in (pool.addresses[name], 0)
        found.fill_(1)
    assert {name: int(item.sum()) for name, item in pool.tensors.items()} == {
        "a": 3,
        "b": 0,
        "c": 200,
        "d": 256,
    }


# Parameters


def packed(item: Kernel, values: dict[str, Any]) -> bytes:
    """The same block as C lays it out, by ctypes."""
    kinds = {
        "i32": ctypes.c_int32, "i64": ctypes.c_int64, "u8": ctypes.c_uint8, "i8": ctypes.c_int8,
        "i16": ctypes.c_int16, "fp32": ctypes.c_float, "fp64": ctypes.c_double, "u64": ctypes.c_uint64,
    }  # fmt: skip
    fields = [
        (param.name, ctypes.c_uint64 if param.type.startswith("*") else kinds[param.type])
        for param in item.params
    ]
    struct = type("Block", (ctypes.Structure,), {"_fields_": fields})()
    for param in item.params:
        setattr(struct, param.name, 0 if param.hidden else values[param.buffer])
    last = item.params[-1]
    return bytes(struct)[: last.offset + last.size]


@pytest.mark.parametrize("name", STEPS)
def test_a_block_is_what_c_would_lay_out(name: str) -> None:
    values = {
        param.buffer: 0x7F00_1234_5600 + 16 * place if param.type.startswith("*") else -5 - place
        for place, param in enumerate(kernel(name).params)
    }
    assert parameter_block(kernel(name), values) == packed(kernel(name), values)


def with_param(item: Kernel, place: int, **changed: Any) -> Kernel:
    params = list(item.params)
    params[place] = replace(params[place], **changed)
    return replace(item, params=tuple(params))


@pytest.mark.parametrize(
    ("changed", "value", "message"),
    [
        ({}, 0, "sample: logits: needs an address, found 0"),
        ({}, 1 << 64, "needs an address"),
        ({}, -16, "needs an address"),
        ({}, 1.5, r"needs a whole number, found 1\.5"),
        ({}, 0x1002, "needs a multiple of 4, as it was compiled; found the address 0x1002"),
        ({"align": 16}, 0x1008, "needs a multiple of 16, as it was compiled; found the address 0x1008"),
        ({"type": "i32", "size": 4, "align": 16}, 24, "needs a multiple of 16, as it was compiled; found 24"),
        ({"type": "i32", "size": 4, "align": 1}, 1 << 31, "needs i32, found 2147483648"),
        ({"type": "u32", "size": 4, "align": 1}, -1, "needs u32, found -1"),
        ({"type": "fp32", "size": 4, "align": 1}, 1e300, "needs a number that fp32 holds"),
    ],
)
def test_a_value_that_the_kernel_was_not_compiled_for_is_refused(
    rig: Rig, changed: dict[str, Any], value: float, message: str
) -> None:
    broken = with_param(kernel("sample"), 0, buffer="tried", **changed)
    with pytest.raises(BindingError, match=message):
        rig.load(kernels={"sample": broken}, values={**rig.values, "tried": value})
    assert rig.stub.calls("cuModuleLoadDataEx") == []


def test_a_parameter_without_a_value_is_refused_before_anything_is_loaded(rig: Rig) -> None:
    del rig.values["ban_next"]
    with pytest.raises(BindingError, match="sample: ban_next: needs a value for 'ban_next', found none"):
        rig.load()
    assert rig.stub.calls("cuModuleLoadDataEx") == []


def test_a_hint_that_only_a_smaller_graph_breaks_is_found_before_anything_is_loaded(rig: Rig) -> None:
    place = [param.buffer for param in kernel("feedback").params].index("slots")
    broken = with_param(kernel("feedback"), place, align=2)
    with pytest.raises(BindingError, match="feedback: slots: needs a multiple of 2"):
        rig.load(kernels={"feedback": broken})
    assert rig.stub.calls("cuModuleLoadDataEx") == []


def test_a_kernel_s_own_config_beats_the_buffers_of_all(rig: Rig) -> None:
    rig.values["terms"] = 0
    own = {"html_enhancer": {"terms": rig.pool.addresses["logits"]}}
    warm(rig, rig.load(own=own))
    assert rig.stub.faults == []


# Architectures


def built_for(*archs: str) -> Kernel:
    nothing = ObjectRef("0" * 64, 0)
    return replace(
        kernel("sample"), objects=tuple(KernelObject(arch, nothing, nothing, 1, 0, 0, ()) for arch in archs)
    )


@pytest.mark.parametrize(
    ("archs", "device", "chosen"),
    [  # NVIDIA's rule: same major, equal or newer minor; sm_90a code on 9.0 alone
        (("sm_80", "sm_86", "sm_89", "sm_90"), (8, 0), "sm_80"),
        (("sm_80", "sm_86", "sm_89", "sm_90"), (8, 6), "sm_86"),
        (("sm_80", "sm_86", "sm_89", "sm_90"), (8, 7), "sm_86"),
        (("sm_80",), (8, 9), "sm_80"),
        (("sm_80", "sm_90"), (9, 0), "sm_90"),
        (("sm_86",), (8, 0), None),
        (("sm_80", "sm_86", "sm_89"), (9, 0), None),
        (("sm_90",), (9, 1), None),
        (("sm_80", "sm_90"), (7, 5), None),
        (("sm_80", "sm_90"), (10, 0), None),
        (("sm_100",), (10, 3), None),
        ((), (8, 0), None),
    ],
)
def test_the_object_is_the_newest_that_the_device_runs_or_a_refusal(
    archs: tuple[str, ...], device: tuple[int, int], chosen: str | None
) -> None:
    if chosen:
        assert choose_object(built_for(*archs), device).arch == chosen
        return
    found = ", ".join(archs) or "none"
    with pytest.raises(HostUnfitError, match=f"runs on sm_{device[0]}{device[1]}, found {found}"):
        choose_object(built_for(*archs), device)


def test_a_device_without_a_cubin_is_refused_by_name_and_nothing_is_compiled(stub: Stub) -> None:
    stub.reset(sm=90)
    rig = cuda_device.rig(stub)
    with pytest.raises(
        HostUnfitError, match="kernel penalize: needs a cubin that runs on sm_90, found sm_80"
    ):
        rig.load()
    assert stub.calls("cuModuleLoadDataEx") == []


# The life of a patch


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (100, (1, 2, 4, 8, 16, 32, 64, 100))],
)
def test_buckets_are_the_powers_of_two_and_the_most(most: int, expected: tuple[int, ...]) -> None:
    assert buckets(most) == expected


def test_spans_grow_by_four_up_to_a_row() -> None:
    assert [spans(size) for size in (64, 256, 257, 4160)] == [
        (64,), (256,), (256, 257), (256, 1024, 4096, 4160)
    ]  # fmt: skip


def test_everything_is_loaded_and_warm_before_the_largest_graph_is_captured_first(rig: Rig) -> None:
    graphs = rig.ready()
    for slots in (6, 5, 1, 3):
        assert graphs.replay(slots, 200) == min(size for size in BUCKETS if size >= slots)
    assert rig.stub.faults == []
    names = [line.split()[0] for line in rig.stub.log]
    first = names.index("cuStreamBeginCapture")
    assert names[:first] == [*["cuModuleLoadDataEx"] * 5, *["cuLaunchKernel"] * 20, "cuStreamSynchronize"]
    one = ["cuStreamBeginCapture", *["cuLaunchKernel"] * 5, "cuStreamEndCapture", "cuGraphInstantiate"]
    assert names[first:] == [*[*one, "cuGraphDestroy"] * 4, *["cuGraphLaunch"] * 4]


def test_every_launch_is_the_step_that_the_bundle_says(rig: Rig) -> None:
    rig.ready()
    expected = []
    for when, slots in [(when, size) for when in ("eager", "captured") for size in BUCKETS]:
        for step in steps():
            item = kernel(step.kernel)
            grid = slots if step.grid == "slots" else int(step.grid)
            shared, last = item.objects[0].shared_bytes, item.params[-1]
            named = [param.buffer for param in item.params if not param.type.startswith("*")]
            numbers = "".join(f"{slots if name == 'slots' else rig.values[name]}," for name in named)
            expected.append(
                f"cuLaunchKernel {item.entry} grid={grid} threads={32 * item.num_warps} shared={shared} "
                f"params={len(item.params)} bytes={last.offset + last.size} numbers={numbers} {when}"
            )
    assert rig.stub.calls("cuLaunchKernel") == expected


def test_handles_live_when_every_python_object_is_gone(rig: Rig) -> None:
    replay, stub = rig.ready()._replays[6, 200], rig.stub
    del rig
    gc.collect()
    replay()
    assert stub.calls("cuModuleUnload") == stub.calls("cuGraphExecDestroy") == []
    assert stub.faults == []


def test_steps_are_launched_ahead_without_a_wait(rig: Rig) -> None:
    graphs = rig.ready()
    before = len(rig.stub.log)
    for _ in range(3):
        graphs.replay(4, 9)
    assert rig.stub.log[before:] == ["cuGraphLaunch nodes=5"] * 3


def test_the_model_is_recorded_before_the_patch_in_the_same_graph(rig: Rig) -> None:
    def model(patch: GpuPatch, slots: int) -> None:
        step = patch._steps[0]
        rig.driver.launch(step.function, 9, 256, 0, rig.stream, step.block(slots))

    rig.ready(model)
    assert [line.split()[1] for line in rig.stub.calls("cuGraphInstantiate")] == ["nodes=6"] * 4
    captured = [line for line in rig.stub.calls("cuLaunchKernel") if line.endswith("captured")]
    assert [" grid=9 " in line for line in captured[:6]] == [True, *[False] * 5]


def test_no_graph_is_replayed_that_was_not_captured(rig: Rig) -> None:
    patch, graphs = rig.load(), rig.graphs
    step = lambda slots, _: patch.launch(slots)  # noqa: E731
    with pytest.raises(BindingError, match="needs a graph for 1 slots and 9 positions, found 0"):
        graphs.replay(1, 9)
    with pytest.raises(BindingError, match="needs a step that is warm"):
        graphs.capture(step, told)
    graphs.warm(step)
    graphs.capture(step, told)
    for slots, positions in ((0, 9), (-1, 9), (7, 9), (6, 201)):
        with pytest.raises(BindingError, match=f"needs a graph for {slots} slots and {positions} positions"):
            graphs.replay(slots, positions)
    with pytest.raises(BindingError, match="captures it once"):
        graphs.capture(step, told)
    assert rig.stub.calls("cuGraphLaunch") == []


def told(_done: int, _total: int) -> None:
    """How far a capture is."""


def test_more_shared_memory_than_usual_is_asked_for(rig: Rig) -> None:
    item = kernel("sample")
    hungry = replace(item, objects=(replace(item.objects[0], shared_bytes=64 << 10),))
    warm(rig, rig.load(kernels={"sample": hungry}))
    assert rig.stub.faults == []


def test_a_step_that_names_no_kernel_is_a_corrupt_bundle(rig: Rig) -> None:
    with pytest.raises(BundleCorruptError, match="names no kernel: 'nobody'"):
        rig.load(patch=[replace(steps()[0], kernel="nobody")])


# Failures


@pytest.mark.parametrize(
    "call",
    [
        "cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute", "cuLaunchKernel",
        "cuStreamSynchronize", "cuStreamIsCapturing",
    ],
)  # fmt: skip
def test_a_failed_call_is_an_error_that_names_it(rig: Rig, call: str) -> None:
    rig.stub.fail(call, OUT_OF_MEMORY)
    with pytest.raises(
        StartError, match=rf"{call} failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory"
    ):
        rig.ready()
    assert rig.stub.faults == []


@pytest.mark.parametrize("call", ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetAttribute"])
def test_a_load_that_fails_half_way_leaves_no_module(rig: Rig, call: str) -> None:
    rig.stub.fail(call, OUT_OF_MEMORY, after=3)
    with pytest.raises(DriverError, match=call):
        rig.load()
    loaded = [line for line in rig.stub.calls("cuModuleLoadDataEx") if "sm=" in line]
    assert len(loaded) == len(rig.stub.calls("cuModuleUnload")) >= 3


def test_a_capture_of_another_stream_than_the_kernels_is_refused(rig: Rig) -> None:
    """Torch would record its own operations, and the launches would run once, now."""
    patch, graphs, other = rig.load(), rig.graphs, rig.stub.stream()
    graphs.warm(lambda slots, _: patch.launch(slots))

    def capture(body: Callable[[], None]) -> None:
        with rig.stub.captured(other):
            body()

    rig.device.capture = capture  # type: ignore[method-assign]
    before = len(rig.stub.calls("cuLaunchKernel"))
    with pytest.raises(
        CaptureFailedError, match=r"for 6 slots and 200 positions.*needs a capture of the stream"
    ):
        graphs.capture(lambda slots, _: patch.launch(slots), told)
    assert len(rig.stub.calls("cuLaunchKernel")) == before


def test_a_step_that_ends_the_capture_is_refused(rig: Rig) -> None:
    def model(_patch: GpuPatch, _slots: int) -> None:
        with contextlib.suppress(DriverError):
            rig.driver.synchronize(rig.stream)

    with pytest.raises(CaptureFailedError, match="cannot be captured"):
        rig.ready(model)


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("cuStreamBeginCapture_v2", 0),
        ("cuStreamBeginCapture_v2", 2),
        ("cuStreamIsCapturing", 3),
        ("cuLaunchKernel", 20 + 7),
        ("cuStreamEndCapture", 1),
        ("cuGraphInstantiateWithFlags", 3),
    ],
)
def test_a_failed_capture_leaves_no_graph_and_asks_for_a_new_worker(rig: Rig, call: str, after: int) -> None:
    patch, graphs = rig.load(), rig.graphs
    graphs.warm(lambda slots, _: patch.launch(slots))
    rig.stub.fail(call, OUT_OF_MEMORY, after - 20 if call == "cuLaunchKernel" else after)
    with pytest.raises(CaptureFailedError, match=r"cannot be captured.*worker must be restarted") as caught:
        graphs.capture(lambda slots, _: patch.launch(slots), told)
    assert caught.value.exit_code == 89
    assert call in str(caught.value)
    rig.driver.synchronize(rig.stream)  # no capture is open
    for use in (
        lambda: graphs.replay(1, 9), lambda: graphs.warm(told), lambda: graphs.capture(told, told)
    ):  # fmt: skip
        with pytest.raises(CaptureFailedError, match="a capture failed before"):
            use()
    assert rig.stub.faults == []


def test_a_kernel_that_the_module_lacks_is_named(rig: Rig) -> None:
    other = replace(kernel("sample"), entry="sampler")
    with pytest.raises(
        DriverError, match=r"cuModuleGetFunction .*NOT_FOUND \(500\); wanted the kernel sampler"
    ):
        rig.load(kernels={"sample": other})


def test_ptx_is_refused_before_the_driver_sees_it(rig: Rig) -> None:
    digest = kernel("sample").objects[0].cubin.sha256
    with pytest.raises(DriverError, match="kernel sample for sm_80: is no cubin"):
        rig.load(objects={**cuda_stub.objects(), digest: compiled("sample").ptx})
    assert rig.stub.faults == []


def test_code_for_another_architecture_than_the_bundle_says_is_refused(stub: Stub) -> None:
    stub.reset(sm=86)
    rig = cuda_device.rig(stub)
    item = kernel("sample")
    lying = replace(item, objects=(replace(item.objects[0], arch="sm_86"),))
    with pytest.raises(DriverError, match="for sm_86: needs the code of the cubin, found code for sm_80"):
        rig.load(kernels={"sample": lying})


# The stub itself: mistakes that a device would punish, made on purpose


def during_capture(body: Callable[[Rig], Any]) -> Callable[[Rig], None]:
    return lambda rig: rig.ready(lambda _patch, _slots: body(rig))


def _capture_cold(rig: Rig) -> None:
    patch, graphs = rig.load(), rig.graphs
    graphs._warm = True
    graphs.capture(lambda slots, _: patch.launch(slots), told)


def _launch_aside(rig: Rig) -> None:
    aside = rig.stub.stream()

    def model(patch: GpuPatch, slots: int) -> None:
        step = patch._steps[0]
        rig.driver.launch(step.function, 1, 256, step.shared_bytes, aside, step.block(slots))

    rig.ready(model)


def _unload_held(rig: Rig) -> None:
    modules = []
    load = Driver.load
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Driver, "load", lambda *given: modules.append(load(*given)) or modules[-1])
        rig.ready()
    rig.driver.unload(modules[0])


def launched(change: Callable[[list[Any]], None]) -> Callable[[Rig], None]:
    """A launch of `sample`, with one of (function, grid, threads, shared, stream, block) changed."""

    def mistake(rig: Rig) -> None:
        step = rig.load()._steps[1]
        given: list[Any] = [step.function, 1, 256, step.shared_bytes, rig.stream, step.block(1)]
        change(given)
        rig.driver.launch(*given)

    return mistake


def put(place: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda given: given.__setitem__(place, value(given[place]) if callable(value) else value)


MISTAKES: dict[str, tuple[Callable[[Rig], Any], str]] = {
    "cold": (_capture_cold, "a capture before penalize is warm"),
    "cold launch": (_capture_cold, "penalize: first launched in a capture"),
    "load": (during_capture(lambda rig: rig.load()), "cuModuleLoadDataEx during a capture"),
    "wait": (
        during_capture(lambda rig: rig.driver.synchronize(rig.stream)),
        "cuStreamSynchronize during a capture",
    ),
    "other stream": (_launch_aside, "cuLaunchKernel beside the capturing stream"),
    "unload": (_unload_held, "penalize unloaded while a graph holds it"),
    "short": (
        launched(put(5, lambda block: block[:-8])),
        "sample: 192 bytes of parameters, the cubin has 200",
    ),
    "long": (launched(put(5, lambda block: block + bytes(8))), "bytes of parameters, the cubin has"),
    "shifted": (launched(put(5, lambda block: block[4:] + block[:4])), "sample: parameter"),
    "hidden": (launched(put(5, lambda block: block[:-8] + b"\1" * 8)), "holds 0x101010101010101"),
    "threads": (launched(put(2, 128)), "sample: 128 threads, the cubin needs 256"),
    "grid": (launched(put(1, 0)), "sample: an empty grid"),
    "shared": (launched(put(3, 64 << 10)), "65536 bytes of shared memory without leave"),
    "default stream": (launched(put(4, None)), "cuLaunchKernel on no stream of ours"),
    "no function": (launched(put(0, Function(12))), "a launch of what is not loaded"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_stub_catches_what_a_device_would_punish(rig: Rig, mistake: str) -> None:
    make, fault = MISTAKES[mistake]
    with contextlib.suppress(DriverError, CaptureFailedError, RuntimeError):
        make(rig)
    assert any(fault in line for line in rig.stub.faults), rig.stub.faults


def test_the_stub_reads_the_parameter_tables_that_the_builder_read(rig: Rig) -> None:
    warm(rig, rig.load())
    found = [
        re.search(r"(\w+) grid.* params=(\d+) bytes=(\d+)", line) for line in rig.stub.calls("cuLaunchKernel")
    ]
    expected = [
        (item.entry, str(len(item.params)), str(item.params[-1].offset + item.params[-1].size))
        for item in kernels().values()
    ]
    assert [match.groups() for match in found] == expected
