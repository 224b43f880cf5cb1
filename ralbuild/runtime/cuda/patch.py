"""The patch of a bundle on a device: its cubins loaded, its steps launched by the driver alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ralbuild.contract.archs import runs_on
from ralbuild.contract.bundle import Kernel, KernelObject, PatchStep
from ralbuild.runtime.cuda.arguments import parameter_block
from ralbuild.runtime.cuda.driver import Driver, Function, Module, Stream
from ralbuild.runtime.errors import BundleCorruptError, DriverError, HostUnfitError

Values = Mapping[str, int | float]

SLOTS = "slots"
"""The grid, and the value, that is the number of slots of a graph."""


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
    fits = [item for item in kernel.objects if runs_on(item.arch, capability)]
    if not fits:
        device = "".join(map(str, capability))
        found = ", ".join(item.arch for item in kernel.objects) or "none"
        raise HostUnfitError(
            f"needs a cubin that runs on sm_{device}, found {found}",
            place=f"bundle.json: kernel {kernel.name}",
            hint=f"build the image with sm_{device} in build.targets, if the pinned toolchain knows it",
        )
    return max(fits, key=lambda item: int(item.arch.removeprefix("sm_")))


def choose_objects(
    kernels: Sequence[Kernel], patch: Sequence[PatchStep], capability: tuple[int, int]
) -> dict[str, KernelObject]:
    """Return the object of every step, by kernel name; raises as `choose_object`."""
    named = {kernel.name: kernel for kernel in kernels}
    if unknown := [item.kernel for item in patch if item.kernel not in named]:
        raise BundleCorruptError(f"names no kernel: {unknown[0]!r}", place="bundle.json: patch")
    return {item.kernel: choose_object(named[item.kernel], capability) for item in patch}


class GpuPatch:
    """The steps of a bundle's patch, loaded and ready to be launched."""

    def __init__(self, driver: Driver, stream: Stream, steps: Sequence[_Step]) -> None:
        self._driver = driver
        self._stream = stream
        self._steps = tuple(steps)

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
        chosen = choose_objects(kernels, patch, driver.capability)
        named = {kernel.name: kernel for kernel in kernels}
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
        return cls(driver, stream, steps)

    def launch(self, slots: int) -> None:
        """Put all steps on the stream, in order, for the first ``slots`` slots."""
        for step in self._steps:
            self._launch(step, slots)

    def launch_step(self, name: str, slots: int) -> None:
        """Put one step on the stream."""
        self._launch(next(step for step in self._steps if step.kernel.name == name), slots)

    def _launch(self, step: _Step, slots: int) -> None:
        threads, block = 32 * step.kernel.num_warps, step.block(slots)
        try:
            self._driver.launch(
                step.function, step.blocks(slots), threads, step.shared_bytes, self._stream, block
            )
        except DriverError as error:
            raise DriverError(error.message, place=f"step {step.kernel.name}", hint=error.hint) from None


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
