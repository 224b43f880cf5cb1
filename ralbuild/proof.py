"""What is proved of a bundle's kernels without a GPU: each PTX is run, and its cubin is of that PTX."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from ralbuild import __version__
from ralbuild.cache import Cache
from ralbuild.compile.pairing import check_pair
from ralbuild.compile.source_lines import SourceLines, source_lines
from ralbuild.compile.spec import KernelSpec
from ralbuild.compile.toolchain import Toolchain, find_toolchain
from ralbuild.contract.bundle import Bundle, Kernel, KernelObject
from ralbuild.errors import CompileError, HostError, Problem
from ralbuild.pins import load_pins
from ralbuild.report import Report
from ralbuild.simulate.compare import Difference
from ralbuild.simulate.gate import KernelRun, Work, chosen_objects, simulate_bundle

GATE_CASES = 256
"""Random texts a kernel and architecture before an image is written."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the source of a bundle's kernels is: by name, and the cache that keeps their line maps."""

    specs: Mapping[str, KernelSpec]
    cache: Cache
    toolchain: Toolchain | None

    def lines(self, run: KernelRun, ptx: bytes) -> SourceLines | None:
        """Return the line map of a kernel that ran; None where its source or compiler is not at hand."""
        spec = self.specs.get(run.kernel)
        if spec is None or self.toolchain is None:
            return None
        try:
            return source_lines(spec, run.arch, ptx, self.toolchain, self.cache)
        except CompileError:
            return None


def sources_of(bundle: Bundle, specs: Iterable[KernelSpec], cache: Cache) -> Sources:
    """Return the sources that are those of the bundle's kernels; a file that has changed is left out."""
    digests = {kernel.name: kernel.source_sha256 for kernel in bundle.kernels}
    same = {spec.name: spec for spec in specs if digests.get(spec.name) == spec.source_sha256}
    try:
        toolchain = find_toolchain(load_pins())
    except HostError:
        toolchain = None
    return Sources(same, cache, toolchain)


Unpaired: TypeAlias = Mapping[tuple[str, str], CompileError]
"""Kernel and architecture to what is wrong with its cubin."""


def find_unpaired(bundle: Bundle, objects: Mapping[str, bytes], work: Work, toolchain: Toolchain) -> Unpaired:
    """Return the chosen kernels whose cubin was not made of the PTX beside it."""

    def check(pair: tuple[Kernel, KernelObject]) -> CompileError | None:
        kernel, item = pair
        ptx, cubin = objects[item.ptx.sha256], objects[item.cubin.sha256]
        try:
            check_pair(ptx, cubin, kernel.name, item.arch, toolchain)
        except CompileError as error:
            return error
        return None

    pairs = chosen_objects(bundle, work)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        errors = list(pool.map(check, pairs))
    return {
        (kernel.name, item.arch): error
        for (kernel, item), error in zip(pairs, errors, strict=True)
        if error is not None
    }


def prove(bundle: Bundle, objects: Mapping[str, bytes], sources: Sources, report: Report) -> str:
    """Run every kernel before an image is written; return what the image's label says.

    Raises:
        CompileError: when a kernel differs, faults, races, or its cubin is of another PTX.
        HostError: without the pinned toolchain.
    """
    work = Work(cases=GATE_CASES, races=True)
    with report.stage("simulate") as stage:
        if not bundle.kernels:
            stage.summary = "no kernel compiled, nothing to run"
            return ""
        toolchain = sources.toolchain or find_toolchain(load_pins())
        runs = simulate_bundle(bundle, objects, work, lambda run: report.step(run_line(run)))
        unpaired = find_unpaired(bundle, objects, work, toolchain)
        raise_problems(runs, unpaired, bundle, objects, sources)
        archs = sorted({run.arch for run in runs})
        stage.summary = f"{len(runs)} kernel objects, {GATE_CASES} cases each, no difference, no race"
    return f"{GATE_CASES} cases, {' '.join(archs)}, ralbuild {__version__}"


def run_line(run: KernelRun) -> str:
    """Return one line on a kernel that ran, for people."""
    done = run.comparison
    state = "equal" if done.ok else "NOT equal"
    took = f"the PTX of {run.same_as}" if run.same_as else f"{run.seconds:.1f} s"
    return f"{run.kernel} for {run.arch}: {done.cases} cases, {done.launches} launches, {state}, {took}"


def rule_text(bundle: Bundle, number: int) -> str:
    """Return what a rule is and where it was written."""
    rule = bundle.rules[number]
    return f"{rule.kind} {rule.text!r} ({rule.source}, {rule.place})"


def raise_problems(
    runs: Sequence[KernelRun],
    unpaired: Unpaired,
    bundle: Bundle,
    objects: Mapping[str, bytes],
    sources: Sources,
) -> None:
    """Raise one error with everything that is wrong, with lines of the source where they are known."""
    problems: list[Problem] = []
    for run in runs:
        if not run.comparison.ok:
            lines = sources.lines(run, objects[run.ptx_sha256])
            problems += _problem(run, bundle, lines).problems
    problems += [problem for error in unpaired.values() for problem in error.problems]
    if problems:
        raise CompileError.of(problems)


def _problem(run: KernelRun, bundle: Bundle, lines: SourceLines | None) -> CompileError:
    done = run.comparison
    where = f"{run.kernel} for {run.arch}"
    if done.fault:
        return CompileError(f"{done.fault}{_source(lines, done.fault.line)}", place=where)
    if done.difference:
        return CompileError(str(done.difference), place=where, hint=_rules(bundle, done.difference))
    first = done.races[0]
    text = f"{len(done.races)} data races, first: {first}"
    sides = {_source(lines, side.line) for side in (first.earlier, first.later)}
    return CompileError(text + "".join(sorted(sides)), place=where)


def _source(lines: SourceLines | None, line: int) -> str:
    place = lines.place(line) if lines else ""
    return f"; {place}: {lines.text(line)}" if lines and place else ""


def _rules(bundle: Bundle, difference: Difference) -> str:
    rules = "; ".join(rule_text(bundle, number) for number in difference.rules)
    return f"rules here: {rules}" if rules else ""
