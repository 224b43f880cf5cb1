"""The folded step on the CPU: one implementation for each kernel that the builder can put in a patch.

These run in the decode loop of the CPU target. On a GPU the compiled kernels take their place and
must give the same tokens and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ralbuild.contract.bans import BanSlot, BanTable, read_bans
from ralbuild.contract.bundle import Bundle, Kernel
from ralbuild.contract.codec import FormatError
from ralbuild.contract.manifest import ModelManifest
from ralbuild.contract.routes import RouteTable, read_routes
from ralbuild.contract.transducer import Slot, Transducer, read_transducer
from ralbuild.contract.vocab import TokenBytes, read_vocab
from ralbuild.runtime.errors import BundleCorruptError, PatchUnsupportedError
from ralbuild.runtime.interpreted import UserStep
from ralbuild.runtime.legal import LegalTokens
from ralbuild.runtime.logprobs import token_logprob
from ralbuild.runtime.orders import TokenLogprob
from ralbuild.runtime.sampler import (
    GROUP,
    Counts,
    Draw,
    Logits,
    Sampler,
    count_token,
    cut,
    masked,
    no_logits,
)

IDLE = -1
"""Token of a slot that has not been given one."""
UNLIMITED = (1 << 31) - 1
CANDIDATES = 16
"""Candidates that bans may refuse before all tokens are looked at."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The bundle's tables, parsed: rules, bans, the bytes of every token, and routes."""

    machine: Transducer
    bans: BanTable
    vocab: TokenBytes
    routes: RouteTable


@dataclass(slots=True)
class PatchSlot:
    """What the folded step keeps for one text.

    Attributes:
        draw: how tokens are drawn.
        limit: most tokens to draw.
        ban: state of the ban automaton.
        text: state of the transducer.
        step: tokens drawn so far.
        token: the last token; also the model's next input.
        output: bytes that the last step decided.
        begun: a token that has bytes was read.
        counts: what occurred before, when penalties ask for it.
        value: the logits to draw from, between `penalize` and `sample`.
        refused: candidates refused by a ban; the reader may clear it.
        masked: times that all tokens were looked at; the reader may clear it.
        exhausted: True when no token was legal and the text was ended for it.
        logprob: the last token's log probability, when the request asks for it.
    """

    draw: Draw
    ban: BanSlot
    text: Slot
    limit: int = UNLIMITED
    step: int = 0
    token: int = IDLE
    begun: bool = False
    output: bytes = b""
    counts: Counts | None = None
    value: Logits | None = None
    refused: int = 0
    masked: int = 0
    exhausted: bool = False
    logprob: TokenLogprob | None = None

    @property
    def events(self) -> list[int]:
        """Ids of the rules that matched; the reader may clear it."""
        return self.text.events

    @property
    def held(self) -> int:
        """Bytes that are read and not decided."""
        return len(self.text.pending)

    @property
    def stopped(self) -> bool:
        """True when a rule has ended the text."""
        return self.text.stopped


class Step(Protocol):
    """One node of the patch: reads this step's logits, changes the slots in place."""

    def run(self, logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Do the work of one decode step; row i of ``logits`` belongs to ``slots[i]``."""


class PenalizeStep:
    """Adds biases and takes penalties: gives every slot the logits to draw from."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def run(self, logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Set ``value`` of every slot."""
        for row, slot in enumerate(slots):
            slot.value = self._sampler.adjusted(logits[row], slot.draw, slot.counts)


class SampleStep:
    """Draws a token per slot; the first candidate that the rules allow is the token."""

    def __init__(
        self, tables: Tables, sampler: Sampler, legal: LegalTokens, candidates: int, eos_ids: tuple[int, ...]
    ) -> None:
        self._vocab = tables.vocab
        self._sampler = sampler
        self._legal = legal
        self._candidates = candidates
        self._eos_ids = eos_ids

    def run(self, _logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Set ``token`` and move the ban automaton of every slot."""
        for slot in slots:
            value = slot.value
            assert value is not None  # set by the step before
            slot.value = None
            if slot.ban.strict:
                value = masked(value, self._legal.mask(slot.ban))
            chosen = self._choose(value, slot)
            if slot.draw.logprobs is not None and chosen is not None:
                if slot.ban.active:
                    value = masked(value, self._legal.mask(slot.ban))
                slot.logprob = token_logprob(value, chosen, slot.draw.logprobs, self._vocab)
            slot.exhausted = chosen is None
            slot.token = min(self._eos_ids) if chosen is None else chosen
            if chosen is not None and chosen not in self._eos_ids:
                slot.ban.advance(self._vocab[chosen])
            slot.step += 1

    def _choose(self, value: Logits, slot: PatchSlot) -> int | None:
        """Return the token, or None when no token is legal. The logits of an `allow` are masked already."""
        draw, step = slot.draw, slot.step
        floor = cut(value, draw)
        if slot.ban.strict or not slot.ban.active:
            slot.masked += slot.ban.strict
            return next(self._sampler.ranked(value, draw, step, floor), None)
        for token in self._sampler.ranked(value, draw, step, floor, self._candidates):
            if token in self._eos_ids or slot.ban.allows(self._vocab[token]):
                return token
            slot.refused += 1
        slot.masked += 1
        left = masked(value, self._legal.mask(slot.ban))
        # What the cut kept is used up first; then the cut is made anew among what is legal.
        first = next(self._sampler.ranked(left, draw, step, floor), None)
        return (
            first
            if first is not None
            else next(self._sampler.ranked(left, draw, step, cut(left, draw)), None)
        )


class TransduceStep:
    """Feeds the drawn token's bytes to the rules; what they decide is the slot's output."""

    def __init__(self, tables: Tables) -> None:
        self._vocab = tables.vocab

    def run(self, _logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Set ``output`` of every slot."""
        for slot in slots:
            data = self._vocab.at(slot.token, first=not slot.begun)
            slot.begun = slot.begun or bool(self._vocab[slot.token])
            slot.output = slot.text.feed(data)


class FeedbackStep:
    """Counts the drawn token for the penalties of the steps to come."""

    def run(self, _logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Change ``counts`` of every slot that has any."""
        for slot in slots:
            if slot.counts is not None:
                count_token(slot.counts, slot.token)


class Patch:
    """The steps of a bundle in order, and the tables they share."""

    def __init__(self, tables: Tables, steps: tuple[Step, ...], sampler: Sampler) -> None:
        self.tables = tables
        self.steps = steps
        self.sampler = sampler

    def open(self, profile: int, draw: Draw, prompt: Sequence[int] = (), limit: int = UNLIMITED) -> PatchSlot:
        """Return a fresh slot in the start states of ``profile``; penalties look at ``prompt``."""
        ban = BanSlot(self.tables.bans, profile)
        counts = self.sampler.counts(prompt) if draw.penalises else None
        return PatchSlot(draw, ban, self.tables.machine.start(profile), limit, counts=counts)

    def run(self, logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Run every step on ``logits`` [slots, V]."""
        for step in self.steps:
            step.run(logits, slots)

    def finish(self, slot: PatchSlot, *, cut: bool) -> tuple[bytes, bytes]:
        """End a slot's text; return what was still undecided and what the rules append to any text.

        With ``cut`` the text ended earlier than what the slot has read: what is undecided is dropped.
        """
        if cut:
            return b"", slot.text.abandon()
        return slot.text.close()

    def replay(self, profile: int, tokens: Sequence[int]) -> bytes:
        """Push ``tokens`` through our steps that follow sampling; return all bytes that come out.

        The oracle of the bundle's self-tests knows no user kernel.
        """
        slot = self.open(profile, Draw())
        out = bytearray()
        for token in tokens:
            slot.token = token
            for step in self.steps:
                if not isinstance(step, PenalizeStep | SampleStep | UserStep):
                    step.run(no_logits(), [slot])
            out += slot.output
        return bytes(out) + slot.text.finish()


def read_tables(bundle: Bundle, objects: dict[str, bytes]) -> Tables:
    """Parse the tables that ``bundle`` names.

    Raises:
        BundleCorruptError: when one is not a table of its kind or does not know every profile.
    """
    try:
        table = read_transducer(objects[bundle.transducer.sha256], "transducer")
        bans = read_bans(objects[bundle.bans.sha256], "bans")
        routes = read_routes(objects[bundle.route_table.sha256], "routes", len(bundle.routes))
        vocab = read_vocab(objects[bundle.vocab.sha256], "vocab")
    except FormatError as error:
        raise BundleCorruptError(error.message, place=error.where) from None
    if min(len(table.starts), len(bans.starts)) < len(bundle.profiles) or table.rules > len(bundle.rules):
        raise BundleCorruptError("the tables were not made for these profiles and rules", place="bundle.json")
    return Tables(Transducer(table), bans, vocab, routes)


def link_patch(
    bundle: Bundle, manifest: ModelManifest, tables: Tables, objects: Mapping[str, bytes]
) -> Patch:
    """Turn the bundle's ordered steps into runnable ones; ``objects`` hold the source of user kernels.

    Raises:
        PatchUnsupportedError: for a step without an implementation here: a user's kernel that exists only
            as GPU code or does not load, and anything else, which comes from a newer builder.
        BundleCorruptError: when vocabulary and model disagree, or no step draws a token.
    """
    if len(tables.vocab) < manifest.tokenizer_size or not manifest.eos_token_ids:
        raise BundleCorruptError(
            "the vocabulary lacks tokens, or the model has no end token", place="bundle.json"
        )
    kernels = {kernel.name: kernel for kernel in bundle.kernels}
    sampler = Sampler(manifest.tokenizer_size)
    steps = tuple(
        _make_step(item.kernel, kernels.get(item.kernel), manifest, tables, sampler, objects)
        for item in bundle.patch
    )
    ours = [type(step) for step in steps if not isinstance(step, UserStep)]
    if ours != [PenalizeStep, SampleStep, TransduceStep, FeedbackStep]:
        found = ", ".join(item.kernel for item in bundle.patch) or "nothing"
        raise PatchUnsupportedError(
            f"needs penalize, sample, transduce, feedback; found {found}", place="bundle.json: patch"
        )
    return Patch(tables, steps, sampler)


def _make_step(
    name: str,
    kernel: Kernel | None,
    manifest: ModelManifest,
    tables: Tables,
    sampler: Sampler,
    objects: Mapping[str, bytes],
) -> Step:
    if kernel is not None and kernel.user:
        return UserStep(kernel, objects, manifest, tables.vocab)
    if name == "sample":
        return _sample_step(kernel, manifest, tables, sampler)
    if name == "penalize":
        return PenalizeStep(sampler)
    if name == "transduce":
        return TransduceStep(tables)
    if name == "feedback":
        return FeedbackStep()
    raise PatchUnsupportedError(
        f"step {name!r} has no CPU implementation in this runtime",
        place="bundle.json: patch",
        hint="use a base of the same ralbuild version as the bundle",
    )


def _sample_step(
    kernel: Kernel | None, manifest: ModelManifest, tables: Tables, sampler: Sampler
) -> SampleStep:
    constants = kernel.constants if kernel is not None else {}
    if constants.get("BLOCK", GROUP) != GROUP:
        message = f"step 'sample' was compiled for blocks of {constants['BLOCK']} ids, not {GROUP}"
        raise PatchUnsupportedError(
            message, place="bundle.json: kernels", hint="its noise would differ from ours"
        )
    legal = LegalTokens(tables.bans, tables.vocab, manifest.tokenizer_size, manifest.eos_token_ids)
    most = constants.get("CANDIDATES", CANDIDATES)
    return SampleStep(tables, sampler, legal, most, manifest.eos_token_ids)
