"""The patch of a bundle on a device: its cubins loaded and warmed, its steps captured, graphs replayed.

The order is the point. A module loaded, memory allocated or a kernel first launched while a stream
is captured ends the capture, or worse, is not noticed. So `GpuPatch.load` loads everything, `warm`
launches everything once, and only then does `capture` record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ralbuild.contract.bundle import Kernel, KernelObject, PatchStep
from ralbuild.runtime.cuda.arguments import parameter_block
from ralbuild.runtime.cuda.driver import Driver, Function, Graph, GraphExec, Module, Stream
from ralbuild.runtime.errors import (
    BindingError,
    BundleCorruptError,
    CaptureFailedError,
    DriverError,
    HostUnfitError,
)

Values = Mapping[str, int | float]
Forward = Callable[[int, Stream], None]
"""Puts the model's decode step for so many slots on a stream: it leaves logits where the patch reads them."""

SLOTS = "slots"
"""The grid, and the value, that is the number of slots of a graph."""
_ARCH_SPECIFIC = 90
"""From this architecture on Triton compiles for ``sm_90a``, code that runs on no other one."""


@dataclass(frozen=True, slots=True)
class _Step:
    kernel: Kernel
    grid: str
    shared_bytes: int
    function: Function
    values: Values

    def block(self, slots: int) -> bytes:
        """Return the parameters for a graph of ``slots``."""
        return parameter_block(self.kernel, {**self.values, SLOTS: slots})

    def blocks(self, slots: int) -> int:
        return slots if self.grid == SLOTS else int(self.grid)


def buckets(max_slots: int) -> tuple[int, ...]:
    """Return the numbers of slots that graphs are made for, ascending: 1, 2, 4, .. and ``max_slots``."""
    powers = [1 << bit for bit in range(max_slots.bit_length()) if 1 << bit < max_slots]
    return (*powers, max_slots)


def choose_object(kernel: Kernel, capability: tuple[int, int]) -> KernelObject:
    """Return the object that runs on a device: the newest of its major version that is not newer.

    Raises:
        HostUnfitError: when there is none; nothing is compiled here.
    """
    major, minor = capability
    device = 10 * major + minor
    fits = [
        (arch, item)
        for item in kernel.objects
        if (arch := int(item.arch.removeprefix("sm_"))) == device
        or (arch // 10 == major and arch < min(device, _ARCH_SPECIFIC))
    ]
    if not fits:
        found = ", ".join(item.arch for item in kernel.objects) or "none"
        raise HostUnfitError(
            f"needs a cubin that runs on sm_{device}, found {found}",
            place=f"bundle.json: kernel {kernel.name}",
            hint=f"build the image with sm_{device} in build.targets, if the pinned toolchain knows it",
        )
    return max(fits, key=lambda fit: fit[0])[1]


class GpuPatch:
    """The steps of a bundle's patch, ready to be captured; then graphs by bucket, ready to be replayed."""

    def __init__(self, driver: Driver, stream: Stream, steps: Sequence[_Step], max_slots: int) -> None:
        self._driver = driver
        self._stream = stream
        self._steps = tuple(steps)
        self._buckets = buckets(max_slots)
        self._graphs: dict[int, GraphExec] = {}
        self._warm = False
        self._failed = False

    @classmethod
    def load(
        cls,
        driver: Driver,
        stream: Stream,
        kernels: Sequence[Kernel],
        patch: Sequence[PatchStep],
        objects: Mapping[str, bytes],
        values: Values,
        own: Mapping[str, Values] | None = None,
        *,
        max_slots: int,
    ) -> GpuPatch:
        """Load every kernel of a patch.

        Args:
            stream: where everything runs and is captured: the stream that the model uses.
            kernels, patch: of the bundle; the order of ``patch`` is that of the launches.
            objects: bytes by digest, already compared with it.
            values: by buffer name; `SLOTS` is filled in.
            own: by kernel name, what its own config gives it; beats ``values``.
            max_slots: of the largest graph; the buffers have room for it.

        Raises:
            HostUnfitError: when a kernel has no cubin for this device.
            BindingError: when a value is missing or does not fit; before anything is loaded.
            DriverError: when the driver refuses; what was loaded is unloaded.
        """
        named = {kernel.name: kernel for kernel in kernels}
        if unknown := [item.kernel for item in patch if item.kernel not in named]:
            raise BundleCorruptError(f"names no kernel: {unknown[0]!r}", place="bundle.json: patch")
        chosen = {item.kernel: choose_object(named[item.kernel], driver.capability) for item in patch}
        bound = {name: {**values, **(own or {}).get(name, {})} for name in chosen}
        for name in chosen:
            for slots in buckets(max_slots):
                parameter_block(named[name], {**bound[name], SLOTS: slots})
        functions = _load_all(driver, {name: (named[name], item) for name, item in chosen.items()}, objects)
        steps = [
            _Step(
                named[item.kernel],
                item.grid,
                chosen[item.kernel].shared_bytes,
                functions[item.kernel],
                bound[item.kernel],
            )
            for item in patch
        ]
        return cls(driver, stream, steps, max_slots)

    def warm(self) -> None:
        """Launch every step once, eagerly, for the largest bucket, and wait.

        All slots must be idle (``done`` is 1): then the kernels change nothing that matters. What the
        driver does at a kernel's first launch is behind us when a capture begins.
        """
        self._refuse_failed()
        self._launch(self._buckets[-1])
        self._driver.synchronize(self._stream)
        self._warm = True

    def capture(self, forward: Forward) -> None:
        """Record one graph for each bucket, the largest first: the model's step, then the patch.

        Args:
            forward: called while the stream is captured; it must have run before, for every bucket.

        Raises:
            CaptureFailedError: when any bucket fails. No graph is left, and this process cannot try
                again: what the failed capture held (torch's pool, for one) is only freed by its end.
        """
        self._refuse_failed()
        if not self._warm or self._graphs:
            raise BindingError("needs kernels that are warm, and captures them once", place="capture")
        try:
            for slots in reversed(self._buckets):
                self._graphs[slots] = self._record(slots, forward)
        except Exception as error:
            self._failed = True
            while self._graphs:
                with contextlib.suppress(DriverError):
                    self._driver.destroy_exec(self._graphs.popitem()[1])
            raise CaptureFailedError(
                f"the decode graph for {slots} slots cannot be captured: {error}",
                hint="the worker must be restarted: a failed capture keeps memory until the process ends",
            ) from error

    def replay(self, slots: int) -> int:
        """Put one decode step for at least ``slots`` slots on the stream; return its bucket. Does not wait.

        The step reads what the step before it left on the device, so several can be put there ahead.
        """
        self._refuse_failed()
        bucket = next((size for size in self._buckets if size >= slots), 0)
        if slots < 1 or bucket not in self._graphs:
            made = ", ".join(map(str, sorted(self._graphs))) or "none"
            raise BindingError(f"needs a graph for {slots} slots, found {made}", place="replay")
        self._driver.replay(self._graphs[bucket], self._stream)
        return bucket

    def _record(self, slots: int, forward: Forward) -> GraphExec:
        with _captured(self._driver, self._stream) as recording:
            forward(slots, self._stream)
            self._launch(slots)
        graph = recording[0]
        try:
            # A launch that went to another stream would run once, now, and be missing in every step.
            nodes = self._driver.node_count(graph)
            if nodes < len(self._steps):
                raise BindingError(f"needs at least {len(self._steps)} nodes, found {nodes}", place="graph")
            return self._driver.instantiate(graph)
        finally:
            self._driver.destroy(graph)

    def _launch(self, slots: int) -> None:
        for step in self._steps:
            threads = 32 * step.kernel.num_warps
            block = step.block(slots)
            try:
                self._driver.launch(
                    step.function, step.blocks(slots), threads, step.shared_bytes, self._stream, block
                )
            except DriverError as error:
                raise DriverError(error.message, place=f"step {step.kernel.name}", hint=error.hint) from None

    def _refuse_failed(self) -> None:
        if self._failed:
            raise CaptureFailedError("a capture failed before", hint="the worker must be restarted")


def _load_all(
    driver: Driver, chosen: Mapping[str, tuple[Kernel, KernelObject]], objects: Mapping[str, bytes]
) -> dict[str, Function]:
    """Load the chosen objects, all of them or none."""
    modules: list[Module] = []
    functions: dict[str, Function] = {}
    try:
        for name, (kernel, item) in chosen.items():
            label = f"kernel {name} for {item.arch}"
            modules.append(driver.load(objects[item.cubin.sha256], label))
            functions[name] = driver.function(modules[-1], kernel.entry, item.shared_bytes)
            found = driver.binary_version(functions[name])
            if f"sm_{found}" != item.arch:
                raise DriverError(f"needs the code of the cubin, found code for sm_{found}", place=label)
    except BaseException:
        for module in modules:
            with contextlib.suppress(DriverError):
                driver.unload(module)
        raise
    return functions


@contextlib.contextmanager
def _captured(driver: Driver, stream: Stream) -> Iterator[list[Graph]]:
    """Capture what the body puts on ``stream``; the list then holds the graph. No capture is left open."""
    recording: list[Graph] = []
    driver.begin_capture(stream)
    try:
        yield recording
    except BaseException:
        with contextlib.suppress(DriverError):
            driver.destroy(driver.end_capture(stream))
        raise
    recording.append(driver.end_capture(stream))
