"""User kernels of a CPU image: their source goes along, and Triton's interpreter runs it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ralbuild.compile.order import UserStep
from ralbuild.contract.bundle import Kernel, ObjectRef, Param
from ralbuild.contract.interpreted import READ, WRITTEN, is_interpreted
from ralbuild.errors import CompileError, Problem


def with_sources(
    kernels: tuple[Kernel, ...], users: Sequence[UserStep], keep: Callable[[bytes], ObjectRef]
) -> tuple[Kernel, ...]:
    """Return ``kernels`` with the source of each user kernel; one that was compiled for no GPU is added.

    ``keep`` stores an object.

    Raises:
        CompileError: for every parameter bound to a buffer that the CPU target does not keep.
    """
    problems = [problem for step in users for problem in _unsupported(step)]
    if problems:
        raise CompileError.of(problems)
    compiled = {kernel.name: kernel for kernel in kernels}
    fresh = [
        replace(compiled.get(step.spec.name) or _uncompiled(step), source=keep(step.spec.source))
        for step in users
    ]
    names = {kernel.name for kernel in fresh}
    return (*(kernel for kernel in kernels if kernel.name not in names), *fresh)


def _unsupported(step: UserStep) -> list[Problem]:
    known = ", ".join(sorted(WRITTEN | READ))
    return [
        Problem(
            f"{step.spec.name!r} takes {name!r}, the buffer {buffer!r}, which the CPU target does not keep",
            step.place,
            f"on the CPU a kernel can take {known}, and values of its config",
        )
        for name, buffer in step.spec.buffers.items()
        if not is_interpreted(buffer)
    ]


def _uncompiled(step: UserStep) -> Kernel:
    spec = step.spec
    return Kernel(
        name=spec.name,
        entry=spec.entry,
        source_sha256=spec.source_sha256,
        user=True,
        num_warps=spec.num_warps,
        constants=dict(spec.constants),
        params=tuple(
            Param(name, kind, spec.buffers[name], offset=0, size=0, align=1, hidden=False)
            for name, kind in spec.signature.items()
        ),
        objects=(),
    )
