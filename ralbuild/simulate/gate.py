"""Everything a bundle ships, run: every kernel of every architecture, from its own PTX objects."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ralbuild.contract.bans import read_bans
from ralbuild.contract.bundle import Bundle, Kernel, KernelObject
from ralbuild.contract.codec import FormatError, from_plain, parse_json, sha256_hex
from ralbuild.contract.manifest import ModelManifest
from ralbuild.contract.transducer import read_transducer
from ralbuild.contract.vocab import read_vocab
from ralbuild.errors import CacheError, CompileError, UsageError
from ralbuild.simulate.buffer_file import BufferFile
from ralbuild.simulate.buffers import Tables, arguments, slot_buffers, table_buffers
from ralbuild.simulate.cases import COLUMNS, random_cases, random_draws, text_case, user_buffers
from ralbuild.simulate.compare import SLOTS, Case, Comparison, compare_transduce
from ralbuild.simulate.compare_draws import compare_sample
from ralbuild.simulate.compare_feedback import compare_around
from ralbuild.simulate.faults import FaultError
from ralbuild.simulate.profile import Profile, Profiler
from ralbuild.simulate.ptx.model import Module
from ralbuild.simulate.ptx.parser import parse_module
from ralbuild.simulate.session import Argument, Options, Session

_TARGET = re.compile(r"(?m)^\.target sm_\w+$")
USER_SLOTS = 8
DRAWS_SHARE = 4
"""One draw is compared for so many texts."""
AROUND_SHARE = 64
"""One launch of `penalize` (16 slots) and of `feedback` (1,000 slots) for so many texts."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to run.

    Attributes:
        kernels, archs: names; empty for all.
        cases: random texts a kernel and architecture.
        text: one text to push through instead.
        profile: the profile of that text.
        races: watch for races.
        profiled: count memory traffic by line.
        buffers: what the users' kernels are launched over; None for the decode loop's own buffers.
    """

    kernels: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    cases: int = 256
    text: bytes | None = None
    profile: int = 0
    races: bool = False
    profiled: bool = False
    buffers: BufferFile | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One kernel on one architecture: what came of it, and how long it took in seconds.

    ``same_as`` names the architecture whose run this is, when the PTX is the same but for its target.
    """

    kernel: str
    arch: str
    ptx_sha256: str
    comparison: Comparison
    seconds: float
    profile: Profile | None = None
    same_as: str = ""


@dataclass(slots=True)
class _Content:
    """A bundle's objects, checked and read once."""

    bundle: Bundle
    objects: Mapping[str, bytes]
    tables: Tables = field(init=False)

    def __post_init__(self) -> None:
        bundle = self.bundle
        try:
            manifest = from_plain(
                ModelManifest, parse_json(self.read(bundle.manifest.sha256), "manifest"), "manifest"
            )
            self.tables = Tables(
                read_transducer(self.read(bundle.transducer.sha256), "transducer"),
                read_bans(self.read(bundle.bans.sha256), "bans"),
                read_vocab(self.read(bundle.vocab.sha256), "vocab"),
                manifest.eos_token_ids,
            )
        except FormatError as error:
            raise CacheError(str(error), place="bundle") from None

    def read(self, digest: str) -> bytes:
        """Return an object, its digest checked."""
        data = self.objects.get(digest)
        if data is None or sha256_hex(data) != digest:
            found = "none" if data is None else sha256_hex(data)
            raise CacheError(f"needs an object with SHA-256 {digest}, found {found}", place="bundle")
        return data


def simulate_bundle(
    bundle: Bundle,
    objects: Mapping[str, bytes],
    work: Work,
    report: Callable[[KernelRun], None] = lambda run: None,  # noqa: ARG005
) -> list[KernelRun]:
    """Run the kernels of a bundle.

    Args:
        objects: by digest; each is checked against its name.
        report: told of each kernel as it is done.

    Raises:
        UsageError: for a kernel or architecture that the bundle does not have.
        CacheError: for an object that is missing or not what its digest says.
        PtxError: for PTX that is not understood.
    """
    chosen = chosen_objects(bundle, work)
    content = _Content(bundle, objects)
    done: list[KernelRun] = []
    known: dict[tuple[str, str, int], KernelRun] = {}
    for kernel, item in chosen:
        started = time.perf_counter()
        text = content.read(item.ptx.sha256).decode("ascii", "replace")
        key = (kernel.name, _TARGET.sub("", text, count=1), item.shared_bytes)
        if key in known:  # the same instructions over the same cases: the simulator knows no architecture
            same = known[key]
            done.append(
                replace(same, arch=item.arch, ptx_sha256=item.ptx.sha256, seconds=0.0, same_as=same.arch)
            )
            report(done[-1])
            continue
        module = parse_module(text)
        profiler = Profiler() if work.profiled else None
        comparison = _run(content, module, kernel, item, work, profiler)
        seconds = time.perf_counter() - started
        profile = profiler.result(module, kernel.entry, comparison.launches) if profiler else None
        done.append(KernelRun(kernel.name, item.arch, item.ptx.sha256, comparison, seconds, profile))
        known[key] = done[-1]
        report(done[-1])
    return done


def chosen_objects(bundle: Bundle, work: Work) -> list[tuple[Kernel, KernelObject]]:
    """Return the kernels and architectures to run.

    Raises:
        UsageError: for a kernel or architecture that the bundle does not have.
    """
    names = {kernel.name for kernel in bundle.kernels}
    archs = {item.arch for kernel in bundle.kernels for item in kernel.objects}
    if not names:
        raise UsageError(
            "the bundle has no kernels", hint="compile for a GPU: `ralbuild compile --arch sm_80`"
        )
    for what, wanted, known in (("kernel", work.kernels, names), ("architecture", work.archs, archs)):
        unknown = sorted(set(wanted) - known)
        if unknown:
            raise UsageError(f"the bundle has no {what} {unknown[0]!r}", hint=", ".join(sorted(known)))
    chosen = [
        (kernel, item)
        for kernel in bundle.kernels
        for item in kernel.objects
        if (not work.kernels or kernel.name in work.kernels) and (not work.archs or item.arch in work.archs)
    ]
    if work.buffers and {kernel.user for kernel, _ in chosen} != {True}:
        users = ", ".join(kernel.name for kernel in bundle.kernels if kernel.user)
        hint = f"name it: --kernel {users}" if users else "this bundle has none"
        raise UsageError("buffers are given to a user's kernel alone", place="--buffers", hint=hint)
    return chosen


def _run(
    content: _Content,
    module: Module,
    kernel: Kernel,
    item: KernelObject,
    work: Work,
    profiler: Profiler | None,
) -> Comparison:
    options = Options(shared=item.shared_bytes, races=work.races)
    observers = [profiler] if profiler else []
    tables = content.tables
    if kernel.user:
        return _run_user(module, kernel, tables, options, observers, work.buffers)
    if kernel.name == "transduce":
        cases = _texts(content, work)
        return compare_transduce(module, kernel, tables, cases, options, min(SLOTS, len(cases)), observers)
    if kernel.name == "sample":
        draws = random_draws(tables, max(1, work.cases // DRAWS_SHARE), work.seed)
        return compare_sample(module, kernel, tables, draws, options, observers=observers)
    if kernel.name in ("penalize", "feedback"):
        launches = max(1, work.cases // AROUND_SHARE)
        return compare_around(module, kernel, tables, launches, work.seed, options, observers)
    raise CompileError(f"there is no executor for the kernel {kernel.name!r}", place="bundle")


def _texts(content: _Content, work: Work) -> list[Case]:
    if work.text is not None:
        return [text_case(content.tables, work.text, work.profile)]
    return random_cases(content.tables, content.bundle.rules, max(1, work.cases), work.seed)


def _run_user(
    module: Module,
    kernel: Kernel,
    tables: Tables,
    options: Options,
    observers: Sequence[Profiler],
    given: BufferFile | None,
) -> Comparison:
    """Run a user's kernel over a file's buffers or the decode loop's own; nothing is compared."""
    buffers: dict[str, Argument] = table_buffers(tables) | slot_buffers(tables, USER_SLOTS, COLUMNS)
    buffers |= {"terms": np.zeros(3, np.int32), "term_count": 3}
    user_buffers(buffers, seed=1)
    bound = arguments(kernel, buffers)
    blocks, launches = USER_SLOTS, 1
    if given is not None:
        bound, launches = given.arguments(kernel, bound), given.launches
        blocks = given.blocks or USER_SLOTS
    result = Comparison()
    session = Session(module, kernel.entry, (blocks, 1, 1), bound, options, observers)
    try:
        for _ in range(launches):
            session.launch()
            result.launches += 1
    except FaultError as error:
        result.fault = error.fault
    result.finish(session)
    return result
