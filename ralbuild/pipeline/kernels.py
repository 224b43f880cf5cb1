"""The kernels of a build: built-in and user kernels, linted, compiled or taken from the cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ralbuild.cache import Cache
from ralbuild.compile.aot import compile_kernels
from ralbuild.compile.order import UserStep
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.toolchain import find_toolchain
from ralbuild.config.load import LoadedConfig
from ralbuild.config.model import ARCHITECTURES
from ralbuild.contract import bundle as contract
from ralbuild.errors import CompileError, UsageError
from ralbuild.pins import load_pins
from ralbuild.pipeline.request import BuildRequest
from ralbuild.report import Report, format_bytes
from ralbuild.weights.scan import ScannedModel


def user_steps(loaded: LoadedConfig, model: ScannedModel, max_seq_len: int) -> tuple[UserStep, ...]:
    """Return the user's kernels with their parameters bound, in the config's order.

    Raises:
        ConfigError, CompileError: for a kernel whose signature or settings fit nothing.
    """
    if not loaded.kernels:
        return ()
    from ralbuild.compile.user_source import user_spec
    from ralbuild.weights.tokenizer import text_encoder

    encode = text_encoder(dict(model.files)["tokenizer.json"])
    return tuple(
        UserStep(
            user_spec(
                name=kernel.name,
                source=kernel.source,
                filename=str(kernel.path),
                settings=kernel.settings,
                max_seq_len=max_seq_len,
                encode=encode,
                place=kernel.place,
            ),
            kernel.priority,
            kernel.place,
        )
        for kernel in loaded.kernels
    )


def lint(users: Sequence[UserStep], report: Report, *, strict: bool) -> None:
    """Report what is likely wrong with user kernels.

    Raises:
        CompileError: with every defect, when ``strict``.
    """
    if not users:
        return
    from ralbuild.compile.lint import lint_kernel

    problems = [defect.problem for step in users for defect in lint_kernel(step.spec)]
    if strict and problems:
        raise CompileError.of(problems)
    for problem in problems:
        report.note(f"warning: {problem}. {problem.hint[0].upper()}{problem.hint[1:]}")


def compile_specs(
    request: BuildRequest, specs: tuple[KernelSpec, ...], archs: tuple[str, ...], cache: Cache, report: Report
) -> tuple[contract.Kernel, ...]:
    """Compile ``specs`` for ``archs``, or take them from the cache; nothing for no architecture.

    Raises:
        UsageError: for an architecture that we do not know.
        CompileError, HostError: as `compile_kernels`.
    """
    unknown = sorted(set(archs) - set(ARCHITECTURES))
    if unknown:
        raise UsageError(
            f"unknown architecture {unknown[0]!r}", place="--arch", hint=", ".join(ARCHITECTURES)
        )
    if not archs:
        return ()
    toolchain = find_toolchain(load_pins())
    jobs = len(os.sched_getaffinity(0))
    return compile_kernels(
        specs, archs, toolchain, cache, jobs=jobs, report=report, check_repro=request.check_repro
    )


def with_data(
    kernels: tuple[contract.Kernel, ...], users: Sequence[UserStep], cache: Cache
) -> tuple[contract.Kernel, ...]:
    """Give each user kernel the object of its own config."""
    data = {step.spec.name: step.spec.data for step in users}
    return tuple(
        replace(kernel, data=cache.add(own)) if (own := data.get(kernel.name)) is not None else kernel
        for kernel in kernels
    )


def kernel_summary(kernels: tuple[contract.Kernel, ...]) -> str:
    """Return one line on what was compiled."""
    archs = sorted({item.arch for kernel in kernels for item in kernel.objects})
    interpreted = [kernel.name for kernel in kernels if kernel.source is not None]
    if not archs:
        rest = f"; interpreted on the CPU: {', '.join(interpreted)}" if interpreted else ""
        return f"no GPU architecture asked for, no kernel compiled{rest}"
    size = sum(item.cubin.size + item.ptx.size for kernel in kernels for item in kernel.objects)
    return (
        f"{len(kernels)} kernels for {', '.join(archs)}, {len(kernels)} launches a step, {format_bytes(size)}"
    )
