"""What can be wrong: PTX that is not understood, and what a run of it does that it must not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ralbuild.errors import CompileError

FaultKind = Literal[
    "out of bounds",
    "misaligned",
    "deadlock",
    "divergent barrier",
    "inactive lane",
    "branch index",
    "trap",
    "assertion failed",
    "bad format",
    "copy not waited for",
    "step limit",
]


class PtxError(CompileError):
    """PTX that the simulator does not know, with its line; nothing is guessed."""

    def __init__(self, message: str, line: int, text: str = "") -> None:
        super().__init__(f"{message}: {text}" if text else message, place=f"line {line}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Fault:
    """What a thread did.

    Attributes:
        kind: the rule that was broken.
        detail: addresses, sizes and buffers, for people.
        line, text: the instruction.
        cta: linear number of the block in its grid.
        thread: linear number in the block; -1 when no single thread is at fault.
    """

    kind: FaultKind
    detail: str
    line: int
    text: str
    cta: int
    thread: int

    def __str__(self) -> str:
        who = f"block {self.cta}" + (f" thread {self.thread}" if self.thread >= 0 else "")
        return f"{self.kind}: {self.detail}; {who}, line {self.line}: {self.text}"


class FaultError(CompileError):
    """A run that had to stop; ``fault`` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.kind}: {fault.detail}", place=f"line {fault.line}: {fault.text}")
        self.fault = fault

    def __str__(self) -> str:
        return str(self.fault)
