"""`compile_kernels`: specs to objects in the cache and `Kernel` records for the bundle.

A full cache hit starts no process and imports no Triton; what comes out of the cache passes the
same gate as what comes out of the compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from threading import Event
from typing import Protocol

from ralbuild.compile.gate import MAX_SHARED_BYTES, Inspected, inspect
from ralbuild.compile.launch import run_worker
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.toolchain import Toolchain
from ralbuild.contract.bundle import Kernel, KernelObject, ObjectRef
from ralbuild.contract.codec import FormatError, canonical_json, parse_json, sha256_hex
from ralbuild.errors import CompileError
from ralbuild.pins import CubinPins, load_pins

SCHEMA = "ralbuild.kernel/1"
"""Part of every key: raise it when the worker's options or the outputs change."""
CUBIN, PTX, ABOUT = "kernel.cubin", "kernel.ptx", "about.json"
"""Names of a task's outputs."""


class Report(Protocol):
    """Where progress goes."""

    def step(self, text: str) -> None:
        """Say what was done."""

    def note(self, text: str) -> None:
        """Say what the user should know."""


class Store(Protocol):
    """The cache, as far as compiling needs it."""

    def fetch(
        self,
        key: str,
        miss: Callable[[], Mapping[str, bytes]],
        label: str,
        accept: Callable[[Mapping[str, bytes]], bool],
    ) -> Mapping[str, bytes]:
        """Return the stored outputs of ``key`` if ``accept`` takes them, else those that ``miss`` makes."""


def kernel_key(spec: KernelSpec, arch: str, toolchain: Toolchain) -> str:
    """Return the cache key: a digest of everything that can change the compiled bytes."""
    return sha256_hex(
        canonical_json(
            {
                "schema": SCHEMA,
                "spec": spec.identity().decode(),
                "arch": arch,
                "triton": [toolchain.triton_version, toolchain.triton_record],
                "ptxas": toolchain.ptxas_sha256,
                "python": toolchain.python_version,
            }
        )
    )


def compile_kernels(
    specs: Sequence[KernelSpec],
    archs: Sequence[str],
    toolchain: Toolchain,
    cache: Store,
    *,
    jobs: int,
    report: Report,
    check_repro: bool = False,
) -> tuple[Kernel, ...]:
    """Compile every kernel for every architecture, ``jobs`` at a time.

    Args:
        specs: of distinct names.
        archs: such as ``sm_80``; each must be pinned. None of them gives no kernels.
        cache: holds the objects afterwards, under their digests.
        check_repro: compile each once more, in another folder, and compare.

    Returns:
        One record a spec, in the order of ``specs``.

    Raises:
        CompileError: one problem for every kernel that cannot be compiled.
    """
    pins = load_pins().cubin
    unknown = sorted(set(archs) - set(pins.archs))
    if unknown:
        raise CompileError(f"needs architectures out of {', '.join(pins.archs)}, found {', '.join(unknown)}")
    build = _Build(toolchain, cache, pins, check_repro)
    tasks = [_Task(spec, arch) for spec in specs for arch in sorted(set(archs))]
    done = build.run(tasks, jobs, report)
    by_spec = [[item for item in done if item.task.spec is spec] for spec in specs]
    return tuple(_kernel(items) for items in by_spec if items)


@dataclass(frozen=True, slots=True)
class _Task:
    spec: KernelSpec
    arch: str

    @property
    def label(self) -> str:
        return f"{self.spec.name} for {self.arch}"


@dataclass(frozen=True, slots=True)
class _Done:
    """One kernel for one architecture, checked; ``seconds`` is None when the cache had it."""

    task: _Task
    inspected: Inspected
    record: KernelObject
    seconds: float | None


class _Build:
    """One call's shared state. Tasks run on threads that mostly wait for worker processes."""

    def __init__(self, toolchain: Toolchain, cache: Store, pins: CubinPins, check_repro: bool) -> None:
        self.toolchain = toolchain
        self.cache = cache
        self.pins = pins
        self.check_repro = check_repro
        self.stop = Event()
        self.broken: dict[str, CompileError] = {}
        self.missing: set[str] = set()

    def run(self, tasks: Sequence[_Task], jobs: int, report: Report) -> list[_Done]:
        """Run all tasks; results in the order of ``tasks``."""
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            futures = [pool.submit(self._one, task) for task in tasks]
            try:
                for future in as_completed(futures):
                    item = future.result()
                    if item is not None and item.seconds is not None:
                        report.step(f"compiled {item.task.label} in {item.seconds:.1f} s")
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        if self.missing:
            names = ", ".join(sorted(self.missing))
            report.note(f"kernel files were compiled without these protections of this host: {names}")
        if self.broken:
            order = dict.fromkeys(task.spec.name for task in tasks)
            raise CompileError.of([self.broken[name].problems[0] for name in order if name in self.broken])
        done = [item for item in (future.result() for future in futures) if item is not None]
        cached = sum(item.seconds is None for item in done)
        if cached:
            report.step(f"{cached} of {len(done)} kernel objects were in the cache")
        return done

    def _one(self, task: _Task) -> _Done | None:
        """Do one task; None when it failed, or when its kernel already failed for another architecture."""
        if task.spec.name in self.broken:
            return None
        seconds: list[float] = []

        def miss() -> Mapping[str, bytes]:
            started = time.monotonic()
            outputs = self._compile(task)
            seconds.append(time.monotonic() - started)
            return outputs

        key = kernel_key(task.spec, task.arch, self.toolchain)
        try:
            outputs = self.cache.fetch(key, miss, task.label, self._accepts(task))
            if self.check_repro:
                self._compare(task, outputs)
            return self._checked(task, outputs, seconds[0] if seconds else None)
        except CompileError as error:
            self.broken.setdefault(task.spec.name, error)
            return None

    def _compile(self, task: _Task) -> dict[str, bytes]:
        compiled = run_worker(task.spec, task.arch, self.toolchain, stop=self.stop)
        self.missing.update(compiled.missing)
        _check_launch(task, compiled.launch)
        inspect(task.spec, task.arch, compiled.cubin, compiled.ptx, self.pins)
        about = {
            "shared": compiled.launch["shared"],
            "triton": self.toolchain.triton_version,
            "ptxas": self.toolchain.ptxas_version,
        }
        return {CUBIN: compiled.cubin, PTX: compiled.ptx, ABOUT: canonical_json(about)}

    def _accepts(self, task: _Task) -> Callable[[Mapping[str, bytes]], bool]:
        """Return the test that a cached object must pass: the gate, once more."""

        def accept(outputs: Mapping[str, bytes]) -> bool:
            try:
                self._checked(task, outputs, None)
            except (CompileError, FormatError, KeyError, TypeError):
                return False
            return True

        return accept

    def _checked(self, task: _Task, outputs: Mapping[str, bytes], seconds: float | None) -> _Done:
        cubin, ptx = outputs[CUBIN], outputs[PTX]
        inspected = inspect(task.spec, task.arch, cubin, ptx, self.pins)
        shared = parse_json(outputs[ABOUT], ABOUT)["shared"]
        record = KernelObject(
            arch=task.arch,
            cubin=ObjectRef(sha256_hex(cubin), len(cubin)),
            ptx=ObjectRef(sha256_hex(ptx), len(ptx)),
            registers=inspected.registers,
            spill_bytes=inspected.spill_bytes,
            shared_bytes=shared,
            symbols=inspected.symbols,
        )
        return _Done(task, inspected, record, seconds)

    def _compare(self, task: _Task, outputs: Mapping[str, bytes]) -> None:
        again = self._compile(task)
        for name in (CUBIN, PTX):
            if again[name] != outputs[name]:
                raise CompileError(
                    f"{task.label}: compiling again gave another {name}: needs SHA-256 "
                    f"{sha256_hex(outputs[name])}, found {sha256_hex(again[name])}",
                    place=task.spec.filename,
                    hint="the file must not depend on time, environment or folder",
                )


def _check_launch(task: _Task, launch: Mapping[str, int]) -> None:
    """Refuse what the launcher has no means to launch: clusters, scratch memory, too much shared memory."""
    wanted = {"num_ctas": 1, "num_warps": task.spec.num_warps}
    wanted |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    for name, value in wanted.items():
        if launch[name] != value:
            raise CompileError(
                f"{task.label}: needs {name} {value}, found {launch[name]}", place=task.spec.filename
            )
    shared = launch["shared"]
    if not 0 <= shared <= MAX_SHARED_BYTES:
        raise CompileError(
            f"{task.label}: needs at most {MAX_SHARED_BYTES} bytes of shared memory, found {shared}",
            place=task.spec.filename,
        )


def _kernel(items: Sequence[_Done]) -> Kernel:
    spec = items[0].task.spec
    return Kernel(
        name=spec.name,
        entry=spec.entry,
        source_sha256=spec.source_sha256,
        user=spec.user,
        num_warps=spec.num_warps,
        constants=dict(spec.constants),
        params=items[0].inspected.params,
        objects=tuple(item.record for item in items),
    )
