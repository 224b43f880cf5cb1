"""What the compile tests share: the toolchain, a silent report, and kernels compiled once a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event

from ralbuild.compile.launch import Compiled, run_worker
from ralbuild.compile.spec import KernelSpec, builtin_specs
from ralbuild.compile.toolchain import Toolchain, find_toolchain
from ralbuild.compile.user_source import user_spec
from ralbuild.pins import CubinPins, load_pins

ARTICLE_KERNEL = Path(__file__).parents[1] / "samples/user_kernel/transformers/html_enhancer.py"
PINS: CubinPins = load_pins().cubin


class Lines:
    """A report that remembers."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.notes: list[str] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Shelf:
    """A cache in memory, so that these tests depend on no folder."""

    def __init__(self) -> None:
        self.kept: dict[str, Mapping[str, bytes]] = {}

    def fetch(
        self,
        key: str,
        miss: Callable[[], Mapping[str, bytes]],
        label: str,
        accept: Callable[[Mapping[str, bytes]], bool],
    ) -> Mapping[str, bytes]:
        if key not in self.kept or not accept(self.kept[key]):
            self.kept[key] = miss()
        return self.kept[key]


@functools.cache
def toolchain() -> Toolchain:
    return find_toolchain(load_pins())


@functools.cache
def specs() -> dict[str, KernelSpec]:
    built_in = {spec.name: spec for spec in builtin_specs()}
    return built_in | {"html_enhancer": article_spec()}


def article_spec() -> KernelSpec:
    return user_spec(
        name="html_enhancer",
        source=ARTICLE_KERNEL.read_bytes(),
        filename="transformers/html_enhancer.py",
        settings={"bold_terms": ["risk", "compliance", "audit"]},
        max_seq_len=2048,
        encode=lambda text: list(text.encode()),
    )


@functools.cache
def compiled(name: str, arch: str = "sm_80") -> Compiled:
    return run_worker(specs()[name], arch, toolchain(), stop=Event())


def kernel_file(body: str, head: str = "") -> KernelSpec:
    """A user kernel ``k``: ``head`` runs when the file is imported, ``body`` is the kernel's."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    text = f'import triton\nimport triton.language as tl\n{head}\n\n@triton.jit\ndef k_kernel(output_ptr: "*i8"):\n{lines}\n'
    return user_spec(
        name="k", source=text.encode(), filename="transformers/k.py", settings={}, max_seq_len=64
    )


HARMLESS = "tl.store(output_ptr, 1)"
