"""What the decode loop asks of a decode graph; `model.graph` gives it on a CPU, `cuda.decode` on a GPU.

A lane is one text in a graph: it is opened for a prompt, has its prompt read in parts, steps with the
others until its text ends, and is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:  # `/metrics` names these types before numpy is there
    from ralbuild.runtime.orders import TokenLogprob
    from ralbuild.runtime.sampler import Draw


class TextState(Protocol):
    """What is known of a text after its latest token; `steps.PatchSlot` has the meanings."""

    refused: int
    masked: int
    exhausted: bool

    @property
    def step(self) -> int:
        """Tokens drawn so far."""

    @property
    def token(self) -> int:
        """The latest one."""

    @property
    def limit(self) -> int:
        """Most tokens to draw."""

    @property
    def output(self) -> bytes:
        """Bytes that the latest token decided."""

    @property
    def held(self) -> int:
        """Bytes that are read and not decided."""

    @property
    def stopped(self) -> bool:
        """True when a rule has ended the text."""

    @property
    def events(self) -> list[int]:
        """Ids of the rules that matched; the reader clears it."""

    @property
    def logprob(self) -> TokenLogprob | None:
        """The latest token's log probability, when the request asks for it."""


S = TypeVar("S", bound=TextState)


class Place(Protocol):
    """A lane's place in the cache."""

    length: int
    """Positions of the prompt that are read."""


class Lane(Protocol):
    """One text in a graph."""

    @property
    def seat(self) -> Place:
        """Its place in the cache."""

    @property
    def slot(self) -> TextState:
        """Its state in the folded step."""


L = TypeVar("L", bound=Lane)


@dataclass(frozen=True, slots=True)
class Read(Generic[L]):
    """The next tokens of a lane's prompt; after the ``last`` ones it steps with the others."""

    lane: L
    tokens: Sequence[int]
    last: bool = True


class FoldedStep(Protocol[S]):
    """The folded step, as far as the loop knows it."""

    def open(self, profile: int, draw: Draw, prompt: Sequence[int] = ..., limit: int = ...) -> S:
        """Return the state of a text that begins."""

    def finish(self, slot: S, *, cut: bool) -> tuple[bytes, bytes]:
        """End a text; return what was undecided (nothing with ``cut``) and what the rules append to any."""


class Memory(Protocol):
    """What the cache takes."""

    def cost(self, positions: int) -> int:
        """Return the most bytes that a text of so many positions makes it hold."""

    def held_bytes(self) -> int:
        """Return the bytes that it holds for texts now."""


class Graph(Protocol[S, L]):
    """Everything that one decode step runs. Only the loop's thread calls it."""

    @property
    def patch(self) -> FoldedStep[S]:
        """The folded step."""

    @property
    def cache(self) -> Memory:
        """Keys and values."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that `keep` holds beside the cache."""

    def keep(self, prefix: Sequence[int]) -> None:
        """Read what many prompts begin with, once: `open` gives it to those that do."""

    def open(self, slot: S, prompt: Sequence[int]) -> L:
        """Return a lane; its prompt is to be read from ``seat.length`` on."""

    def advance(self, reads: Sequence[Read[L]], lanes: Sequence[L]) -> Sequence[L]:
        """Run one step for ``lanes`` and for the reads' last ones.

        Return the lanes whose slots have a new token: those of this step, or of the step before where steps
        are launched ahead.
        """

    def close(self, lane: L) -> None:
        """Free a lane's place."""

    def reset(self) -> None:
        """Forget all lanes, after a step that failed half-way."""
