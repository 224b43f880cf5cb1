"""Where user kernels stand among the built-in steps of the decode graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ralbuild.compile.spec import KernelSpec
from ralbuild.errors import CompileError

DEFAULT_PRIORITY = 100
MADE_BY_TRANSDUCE = ("output", "output_len")


@dataclass(frozen=True, slots=True)
class UserStep:
    """A user kernel with its priority; ``place`` is file:line:column of the transformer in the config."""

    spec: KernelSpec
    priority: int
    place: str


def step_order(kernels: Sequence[UserStep], declarative: Sequence[int]) -> tuple[str, ...]:
    """Return the names of all steps in launch order.

    A kernel that takes `logits` runs before `penalize`, and `feedback` is last. All declarative transformers
    are one step, `transduce`, at the lowest of their priorities. A kernel of a smaller priority runs between
    `sample` and `transduce`; the others after it. Among themselves kernels run by ascending priority, ties by
    file order.

    Args:
        kernels: in file order.
        declarative: priorities of the declarative transformers; none counts as the default one.

    Raises:
        CompileError: when a priority asks for a place that does not exist.
    """
    folded = tuple(declarative) or (DEFAULT_PRIORITY,)
    before: list[str] = []
    middle: list[str] = []
    after: list[str] = []
    for step in sorted(kernels, key=lambda item: item.priority):
        buffers = set(step.spec.buffers.values())
        if "logits" in buffers:
            before.append(step.spec.name)
        elif step.priority >= max(folded):
            after.append(step.spec.name)
        elif step.priority >= min(folded):
            raise CompileError(
                f"{step.spec.name!r} has priority {step.priority}, between declarative transformers "
                f"({min(folded)} to {max(folded)}); those are one step",
                place=step.place,
                hint=f"use less than {min(folded)}, or {max(folded)} or more",
            )
        elif early := sorted(buffers & set(MADE_BY_TRANSDUCE)):
            raise CompileError(
                f"{step.spec.name!r} takes {early[0]!r}, which the declarative transformers make after it "
                f"(priority {step.priority}, theirs {min(folded)})",
                place=step.place,
                hint=f"give it a priority of {max(folded)} or more",
            )
        else:
            middle.append(step.spec.name)
    return (*before, "penalize", "sample", *middle, "transduce", *after, "feedback")
