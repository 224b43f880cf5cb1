"""What goes into the engine and what comes out: values that the HTTP layer and the decode loop share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the HTTP layer answers before numpy is there
    from ralbuild.runtime.runtime_rules import RuleSet
    from ralbuild.runtime.sampler import Draw


@dataclass(frozen=True, slots=True)
class Order:
    """What to generate.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: most tokens to draw, at least one.
        draw: how to draw them.
        profile: index of the rules that apply.
        stops: stop strings over the text that the rules give out.
        runtime_rules: rules of the serving side, which follow those of the profile; None for none.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    draw: Draw
    profile: int
    stops: tuple[str, ...] = ()
    runtime_rules: RuleSet | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have come: its bytes and log probability."""

    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token, its log probability, and the likeliest tokens in its place."""

    data: bytes
    logprob: float
    top: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain in one step; ``tokens`` counts all tokens drawn so far.

    The last piece has ``finish`` (``stop`` or ``length``) or ``error``. ``logprobs`` are of the tokens
    drawn since the piece before, when the request asks for them; the end token has none.
    """

    text: str
    tokens: int
    finish: str = ""
    error: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
