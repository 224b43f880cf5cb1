"""The folded step on the CPU: one implementation for each kernel that the builder can put in a patch.

These run in the decode loop of the CPU target. On a GPU the compiled kernels take their place and
must give the same tokens and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ralbuild.contract.bans import BanSlot, BanTable, read_bans
from ralbuild.contract.bundle import Bundle, Kernel
from ralbuild.contract.codec import FormatError
from ralbuild.contract.manifest import ModelManifest
from ralbuild.contract.transducer import Slot, Transducer, read_transducer
from ralbuild.contract.vocab import TokenBytes, read_vocab
from ralbuild.runtime.errors import BundleCorruptError, PatchUnsupportedError
from ralbuild.runtime.sampler import GROUP, Draw, Logits, Sampler, no_logits

IDLE = -1
"""Token of a slot that has not been given one."""
CANDIDATES = 256
"""Candidates that bans may refuse before the text is ended."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The bundle's tables, parsed: rules, bans and the bytes of every token."""

    machine: Transducer
    bans: BanTable
    vocab: TokenBytes


@dataclass(slots=True)
class PatchSlot:
    """What the folded step keeps for one text.

    Attributes:
        draw: how tokens are drawn.
        ban: state of the ban automaton.
        text: state of the transducer.
        step: tokens drawn so far.
        token: the last token; also the model's next input.
        output: bytes that the last step decided.
        begun: a token that has bytes was read.
        refused: candidates refused by a ban; the reader may clear it, as it may ``text.events``.
        exhausted: True when every candidate was banned and the text was ended for it.
    """

    draw: Draw
    ban: BanSlot
    text: Slot
    step: int = 0
    token: int = IDLE
    begun: bool = False
    output: bytes = b""
    refused: int = 0
    exhausted: bool = False


class Step(Protocol):
    """One node of the patch: reads this step's logits, changes the slots in place."""

    def run(self, logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Do the work of one decode step; row i of ``logits`` belongs to ``slots[i]``."""


class SampleStep:
    """Draws a token per slot; the first candidate that no ban refuses is the token."""

    def __init__(self, tables: Tables, sampler: Sampler, candidates: int, eos_id: int) -> None:
        self._vocab = tables.vocab
        self._sampler = sampler
        self._candidates = candidates
        self._eos_id = eos_id

    def run(self, logits: Logits, slots: Sequence[PatchSlot]) -> None:
        """Set ``token`` and move the ban automaton of every slot."""
        for row, slot in enumerate(slots):
            slot.token = self._choose(logits, row, slot)
            slot.step += 1

    def _choose(self, logits: Logits, row: int, slot: PatchSlot) -> int:
        refused = 0
        for token in self._sampler.ranked(logits[row], slot.draw, slot.step):
            data = self._vocab[token]
            if slot.ban.allows(data):
                slot.ban.advance(data)
                slot.refused += refused
                return token
            refused += 1
            if refused == self._candidates:
                break
        slot.refused += refused
        slot.exhausted = True
        return self._eos_id


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


class Patch:
    """The steps of a bundle in order, and the tables they share."""

    def __init__(self, tables: Tables, steps: tuple[Step, ...]) -> None:
        self.tables = tables
        self.steps = steps

    def open(self, profile: int, draw: Draw) -> PatchSlot:
        """Return a fresh slot in the start states of ``profile``."""
        return PatchSlot(draw, BanSlot(self.tables.bans, profile), self.tables.machine.start(profile))

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
        """Push ``tokens`` through the steps that follow sampling; return all bytes that come out."""
        slot = self.open(profile, Draw())
        out = bytearray()
        for token in tokens:
            slot.token = token
            for step in self.steps:
                if not isinstance(step, SampleStep):
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
        vocab = read_vocab(objects[bundle.vocab.sha256], "vocab")
    except FormatError as error:
        raise BundleCorruptError(error.message, place=error.where) from None
    if min(len(table.starts), len(bans.starts)) < len(bundle.profiles) or table.rules > len(bundle.rules):
        raise BundleCorruptError("the tables were not made for these profiles and rules", place="bundle.json")
    return Tables(Transducer(table), bans, vocab)


def link_patch(bundle: Bundle, manifest: ModelManifest, tables: Tables) -> Patch:
    """Turn the bundle's ordered steps into runnable ones.

    Raises:
        PatchUnsupportedError: for a step without an implementation here: a user's kernel exists only as
            GPU code, and anything else comes from a newer builder.
        BundleCorruptError: when vocabulary and model disagree, or no step draws a token.
    """
    if len(tables.vocab) < manifest.tokenizer_size or not manifest.eos_token_ids:
        raise BundleCorruptError(
            "the vocabulary lacks tokens, or the model has no end token", place="bundle.json"
        )
    kernels = {kernel.name: kernel for kernel in bundle.kernels}
    steps = tuple(
        _make_step(item.kernel, kernels.get(item.kernel), manifest, tables) for item in bundle.patch
    )
    if [type(step) for step in steps] != [SampleStep, TransduceStep]:
        found = ", ".join(item.kernel for item in bundle.patch) or "nothing"
        raise PatchUnsupportedError(
            f"needs sample, then transduce; found {found}", place="bundle.json: patch"
        )
    return Patch(tables, steps)


def _make_step(name: str, kernel: Kernel | None, manifest: ModelManifest, tables: Tables) -> Step:
    if kernel is not None and kernel.user:
        raise PatchUnsupportedError(
            f"step {name!r} is a user kernel; it is machine code for GPUs and the CPU target has none",
            place="bundle.json: patch",
            hint="build with --target cuda, or remove the transformer",
        )
    if name == "sample" and kernel is not None and kernel.constants.get("BLOCK", GROUP) != GROUP:
        message = f"step 'sample' was compiled for blocks of {kernel.constants['BLOCK']} ids, not {GROUP}"
        raise PatchUnsupportedError(
            message, place="bundle.json: kernels", hint="its noise would differ from ours"
        )
    if name == "sample":
        most = kernel.constants.get("CANDIDATES", CANDIDATES) if kernel is not None else CANDIDATES
        return SampleStep(tables, Sampler(manifest.tokenizer_size), most, min(manifest.eos_token_ids))
    if name == "transduce":
        return TransduceStep(tables)
    raise PatchUnsupportedError(
        f"step {name!r} has no CPU implementation in this runtime",
        place="bundle.json: patch",
        hint="use a base of the same ralbuild version as the bundle",
    )
