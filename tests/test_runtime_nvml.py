"""NVML's door against NVIDIA's header and a library built with it. Nothing here ran on a device."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_stub
import pytest

from ralbuild.runtime import nvml
from ralbuild.runtime.cuda.driver import Driver
from ralbuild.runtime.exposition import ServerMetrics
from ralbuild.runtime.gpu_memory import GpuMemory, used_bytes
from ralbuild.runtime.lifecycle import Lifecycle
from ralbuild.runtime.nvml import DeviceMemory, Nvml, NvmlError
from ralbuild.runtime.supervisor import Supervisor
from ralbuild.runtime.wire import pack

UUID = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
GIB = 1 << 30
GPU_IS_LOST, DRIVER_NOT_LOADED = 15, 9
LOADED, RESTING = 9 * GIB, 1 * GIB


def header_folder() -> Path:
    found = importlib.util.find_spec("nvidia.nvml_dev")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(next(iter(found.submodule_search_locations))) / "include"


class Library:
    """The stub, and what it shall say."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)

    def reset(self) -> None:
        self._library.stub_reset()

    def memory(self, total: int, reserved: int, used: int) -> None:
        self._library.stub_memory(*map(ctypes.c_ulonglong, (total, reserved, used)))

    def process(self, pid: int, size: int) -> None:
        self._library.stub_process(pid, ctypes.c_ulonglong(size))

    def hang(self, on: bool) -> None:
        self._library.stub_hang(int(on))

    def idle(self) -> None:
        self._library.stub_idle()

    def grow(self, calls: int) -> None:
        self._library.stub_grow(calls)

    def fail(self, name: str, code: int = GPU_IS_LOST) -> None:
        self._library.stub_fail(name.encode(), code)

    @property
    def initialised(self) -> int:
        return int(self._library.stub_initialised())


def build(folder: Path, *flags: str) -> Path:
    source, out = Path(__file__).with_name("stub_libnvml.c"), folder / "libnvidia-ml.so.1"
    words = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-attributes", *flags]
    subprocess.run([*words, f"-I{header_folder()}", "-o", str(out), str(source)], check=True)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    return {
        "new": Library(build(tmp_path_factory.mktemp("new"))),
        "old": Library(build(tmp_path_factory.mktemp("old"), "-DOLD")),
    }


@pytest.fixture(params=["new", "old"])
def either(request: pytest.FixtureRequest, built: dict[str, Library]) -> Library:
    built[request.param].reset()
    return built[request.param]


@pytest.fixture
def library(built: dict[str, Library]) -> Iterator[Library]:
    built["new"].reset()
    built["new"].memory(80 * GIB, GIB // 2, RESTING)
    yield built["new"]
    built["new"].reset()


# The door and the header


def test_every_function_has_the_types_of_nvidia_s_header() -> None:
    text = (header_folder() / "nvml.h").read_text()
    kinds: dict[str, Any] = {
        "nvmlDevice_t": ctypes.c_void_p,
        "nvmlReturn_t": ctypes.c_int,
        "const char *": ctypes.c_char_p,
        "nvmlDevice_t *": ctypes.POINTER(ctypes.c_void_p),
        "unsigned int *": ctypes.POINTER(ctypes.c_uint),
        "nvmlMemory_t *": ctypes.POINTER(nvml.MemoryV1),
        "nvmlMemory_v2_t *": ctypes.POINTER(nvml.MemoryV2),
        "nvmlProcessInfo_v1_t *": ctypes.POINTER(nvml.ProcessV1),
        "nvmlProcessInfo_v2_t *": ctypes.POINTER(nvml.ProcessV2),
        "nvmlProcessInfo_t *": ctypes.POINTER(nvml.ProcessV2),
    }
    for name, types in nvml.SIGNATURES.items():
        declared = re.search(rf"DECLDIR (?:char\* )?{name}\(([^)]*)\);", text)
        assert declared is not None, name
        words = [re.sub(r"\w+$", "", item.strip()).strip() for item in declared[1].split(",")]
        assert [kinds[word] for word in words if word] == list(types), name


def test_every_structure_and_number_is_the_one_of_nvidia_s_header(tmp_path: Path) -> None:
    structures = {
        "nvmlMemory_t": nvml.MemoryV1,
        "nvmlMemory_v2_t": nvml.MemoryV2,
        "nvmlProcessInfo_v1_t": nvml.ProcessV1,
        "nvmlProcessInfo_v2_t": nvml.ProcessV2,
        "nvmlProcessInfo_t": nvml.ProcessV2,
    }
    facts = {
        "NVML_SUCCESS": nvml.SUCCESS,
        "NVML_ERROR_INSUFFICIENT_SIZE": nvml.INSUFFICIENT_SIZE,
        "nvmlMemory_v2": nvml.MEMORY_V2,
        "(unsigned long long)NVML_VALUE_NOT_AVAILABLE": f"{nvml.NOT_AVAILABLE}ull",
    }
    for name, kind in structures.items():
        facts[f"sizeof({name})"] = ctypes.sizeof(kind)
        for field, _ in kind._fields_:
            facts[f"offsetof({name}, {field})"] = getattr(kind, field).offset
    cuda_stub.require_facts(tmp_path, header_folder(), "nvml.h", facts)


def test_the_driver_s_uuid_is_what_nvml_finds_and_comes_before_the_context(
    library: Library, tmp_path: Path
) -> None:
    stub = cuda_stub.Stub(cuda_stub.build_stub(tmp_path))
    met: list[tuple[str, list[str]]] = []
    driver = Driver(library=stub.path, meet=lambda uuid: met.append((uuid, stub.log)))
    driver.release()
    [(uuid, calls)] = met
    assert uuid == UUID
    assert not any("CtxRetain" in call for call in calls)
    assert used_bytes(uuid, library.path) == RESTING


# What it says


def test_a_device_s_memory_is_read_by_new_and_old_drivers(either: Library) -> None:
    either.memory(80 * GIB, 3, 5 * GIB)
    door = Nvml(either.path)
    found = door.memory(UUID)
    reserved = 3 if "new" in either.path else 0
    used = 5 * GIB + (0 if reserved else 3)
    assert found == DeviceMemory(80 * GIB, reserved, 75 * GIB - 3, used)
    door.close()
    assert either.initialised == 0


def test_processes_are_read_by_new_and_old_drivers_however_many(either: Library) -> None:
    door = Nvml(either.path)
    assert door.processes(UUID) == {}
    expected = {}
    for number in range(40):
        either.process(1000 + number, number * GIB)
        expected[1000 + number] = number * GIB
    either.process(7, nvml.NOT_AVAILABLE)
    assert door.processes(UUID) == expected
    either.grow(3)
    assert door.processes(UUID) == expected
    door.close()


def test_processes_that_come_without_end_are_an_error(library: Library) -> None:
    library.grow(1000)
    with pytest.raises(NvmlError, match="asked for more room 5 times"):
        Nvml(library.path).processes(UUID)


@pytest.mark.parametrize("name", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo_v2", "nvmlShutdown"])
def test_a_refused_call_is_named_with_the_driver_s_words(library: Library, name: str) -> None:
    door = Nvml(library.path)
    library.fail(name)
    call = door.close if name == "nvmlShutdown" else lambda: door.memory(UUID)
    with pytest.raises(NvmlError, match=rf"{name}.* failed: GPU is lost \(15\)"):
        call()


def test_an_unknown_device_a_missing_library_and_a_missing_driver_are_errors(
    library: Library, tmp_path: Path
) -> None:
    with pytest.raises(NvmlError, match=r"for GPU-0 failed: Not Found \(6\)"):
        Nvml(library.path).memory("GPU-0")
    with pytest.raises(NvmlError, match=r"libnvidia-ml\.so\.9"):
        Nvml("libnvidia-ml.so.9")
    lacking = tmp_path / "liblacking.so"
    subprocess.run(["cc", "-shared", "-o", str(lacking), "-x", "c", "/dev/null"], check=True)
    with pytest.raises(NvmlError, match="needs an NVIDIA driver with nvmlInit_v2"):
        Nvml(str(lacking))
    library.fail("nvmlInit_v2", DRIVER_NOT_LOADED)
    with pytest.raises(NvmlError, match=r"nvmlInit_v2 failed: Driver Not Loaded \(9\)"):
        Nvml(library.path)
    library.fail("nvmlInit_v2", 999)
    with pytest.raises(NvmlError, match=r"unknown error \(999\)"):
        Nvml(library.path)


def test_a_worker_s_bytes_are_told_where_its_number_is_known(library: Library) -> None:
    library.process(41, 3 * GIB)
    memory = GpuMemory(UUID, RESTING, library.path)
    plain = {"total": 80 * GIB, "reserved": GIB // 2, "free": 80 * GIB - GIB // 2 - RESTING, "used": RESTING}
    assert memory.read(None) == plain
    assert memory.read(40) == plain
    assert memory.read(41) == plain | {"worker": 3 * GIB}
    assert library.initialised == 1  # once, whatever is read


def test_what_cannot_be_read_is_empty_and_said_once_a_reason(
    library: Library, capfd: pytest.CaptureFixture[str]
) -> None:
    memory = GpuMemory(UUID, RESTING, library.path)
    library.fail("nvmlDeviceGetMemoryInfo_v2")
    assert memory.read(None) == memory.read(None) == {}
    assert capfd.readouterr().err.count("gpu memory unknown") == 1
    library.fail("")
    assert memory.read(None)["used"] == RESTING
    library.fail("nvmlDeviceGetMemoryInfo_v2")
    assert memory.read(None) == {}
    assert capfd.readouterr().err.count("GPU is lost") == 1
    assert used_bytes(UUID, "libnvidia-ml.so.9") == -1
    assert "gpu memory unknown" in capfd.readouterr().err


# The supervisor


@pytest.fixture
def supervised(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library that a supervisor opens."""
    monkeypatch.setattr(
        "ralbuild.runtime.gpu_memory.GpuMemory",
        lambda uuid, before: GpuMemory(uuid, before, library.path),
    )
    return library


class Worker:
    """A worker that is there, says what it is told to, and ends when its line does."""

    pid = 41

    def __init__(self, release: Callable[[], None]) -> None:
        self.connection, self.line = socket.socketpair()
        self._release = release

    def say(self, **message: Any) -> None:
        self.line.sendall(pack(message))

    def ready(self) -> None:
        self.say(say="ready", info={}, idle_unload=0)

    def resident(self) -> dict[str, int]:
        return {"anonymous": 1000, "file": 0, "shared": 0}

    def wait(self, _seconds: float) -> int:
        """A process's memory is gone when it has ended, and not when its line is closed."""
        self.line.close()
        self._release()
        return 0

    def end(self) -> None:
        self.line.close()


def gauges(metrics: ServerMetrics) -> dict[str, float]:
    found = {}
    for line in metrics.text().decode().splitlines():
        if line.startswith("ralbuild_gpu_memory_bytes{"):
            found[line.partition('kind="')[2].partition('"')[0]] = float(line.split()[-1])
            assert f'uuid="{UUID}"' in line
    return found


def zeroed(metrics: ServerMetrics) -> float | None:
    return metrics.registry.get_sample_value("container_cuda_mem_advise_zeroed_bytes")


async def until(what: Any) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.01)


def test_an_unload_tells_what_it_released_on_the_device_until_a_worker_is_back(
    supervised: Library, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = supervised
    made: list[Worker] = []

    def release() -> None:
        library.idle()
        library.memory(80 * GIB, GIB // 2, RESTING)

    def make() -> Worker:
        made.append(Worker(release))
        return made[-1]

    monkeypatch.setattr("ralbuild.runtime.supervisor.WorkerProcess", make)
    lifecycle, metrics = Lifecycle(), ServerMetrics()

    async def live() -> None:
        supervisor = Supervisor(make(), lifecycle, metrics, None)  # type: ignore[arg-type]
        supervisor.begin()
        await supervisor.refresh()
        assert gauges(metrics) == {}
        made[0].say(say="device", uuid=UUID, used=RESTING)
        made[0].ready()
        await until(lambda: lifecycle.ready)
        library.memory(80 * GIB, GIB // 2, LOADED)
        library.process(41, LOADED - RESTING)
        await supervisor.refresh()
        assert (gauges(metrics)["used"], gauges(metrics)["worker"]) == (LOADED, LOADED - RESTING)
        assert zeroed(metrics) == 0

        assert await supervisor.unload() == 1000 + LOADED - RESTING
        await supervisor.refresh()
        assert gauges(metrics)["used"] == RESTING
        assert "worker" not in gauges(metrics)
        assert zeroed(metrics) == 1000 + LOADED - RESTING
        library.memory(80 * GIB, GIB // 2, RESTING + GIB)  # somebody else takes some of it
        await supervisor.refresh()
        assert zeroed(metrics) == 1000 + LOADED - RESTING - GIB

        load = asyncio.ensure_future(supervisor.load())
        await until(lambda: len(made) == 2)
        made[1].say(say="device", uuid=UUID, used=RESTING + GIB)
        made[1].ready()
        await load
        await supervisor.refresh()
        assert zeroed(metrics) == 0
        library.fail("nvmlDeviceGetMemoryInfo_v2")
        await supervisor.refresh()
        assert gauges(metrics) == {}
        supervisor.close()

    asyncio.run(live())
    said = next(line for line in capfd.readouterr().err.splitlines() if "gpu released" in line)
    assert f"before={RESTING} loaded={LOADED} now={RESTING}" in said


def test_a_driver_that_hangs_holds_up_neither_metrics_nor_the_end(supervised: Library) -> None:
    library = supervised
    lifecycle, metrics = Lifecycle(), ServerMetrics()

    async def live() -> None:
        worker = Worker(lambda: None)
        supervisor = Supervisor(worker, lifecycle, metrics, None)  # type: ignore[arg-type]
        supervisor.begin()
        worker.say(say="device", uuid=UUID, used=RESTING)
        worker.ready()
        await until(lambda: lifecycle.ready)
        await supervisor.refresh()
        assert gauges(metrics)["used"] == RESTING
        library.hang(True)
        for _ in range(2):
            await supervisor.refresh()
            assert gauges(metrics) == {}
        assert sum(thread.name == "nvml" for thread in threading.enumerate()) == 1
        supervisor.close()

    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(asyncio.run(live()) is None), daemon=True)
    thread.start()
    thread.join(30)
    library.hang(False)
    for left in threading.enumerate():
        if left.name == "nvml":
            left.join(30)
    assert ended == [True]
