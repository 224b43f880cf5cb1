"""The canary: greedy tokens on the CPU, recorded once and compared later.

Shapes and values cannot show a wrong rotary base, a transposed square matrix or another split of
the heads; the tokens that come out can. A choice that was nearly a tie proves nothing, since another
processor may round it the other way, so each is recorded with its margin.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ralbuild.contract.codec import FormatError, canonical_json, from_plain, parse_json, to_plain
from ralbuild.digests import open_regular
from ralbuild.errors import HostError, WeightsError
from ralbuild.files import write_atomically
from ralbuild.weights.child import run_worker
from ralbuild.weights.findings import Findings

SCHEMA = "ralbuild.canary/1"
STEPS = 16
CLEAR = 0.01
"""Margin in logits below which a choice proves nothing."""
_LIMIT = 1 << 20

QUESTIONS = ("What is the capital of France? Answer in one sentence.", "Count from one to ten.")
TEXTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "In the beginning there was a river, and beside the river a town, and in the town a clock that the baker",
)


@dataclass(frozen=True, slots=True)
class CanaryRun:
    """One prompt: its ids, the greedy ids that follow, and the lead of each over the next best logit."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Canary:
    """What a model gave, and the library versions that it was run with."""

    schema: str
    transformers: str
    torch: str
    runs: tuple[CanaryRun, ...]


def record(folder: Path) -> Canary:
    """Run the model and return its canary.

    Raises:
        HostError: when the extra ``runtime`` is not installed.
        WeightsError: when transformers cannot run the model.
    """
    order: dict[str, Any] = {
        "order": "generate",
        "folder": str(folder.resolve()),
        "questions": list(QUESTIONS),
        "texts": list(TEXTS),
        "steps": STEPS,
    }
    with tempfile.TemporaryDirectory(prefix="ralbuild-worker-") as home:
        return from_plain(Canary, {"schema": SCHEMA, **run_worker(order, "runtime", Path(home))}, "canary")


def write_canary(folder: Path, file: Path) -> Canary:
    """Record a canary and write it to ``file``, whole or not at all.

    Raises:
        HostError: as `record`, or when ``file`` cannot be written; a wrong place is known before a run.
        WeightsError: as `record`.
    """
    check_place(file)
    canary = record(folder)
    try:
        write_atomically(file, canonical_json(to_plain(canary)) + b"\n")
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", place=str(file)) from None
    return canary


def check_place(file: Path) -> None:
    """Refuse a place where no canary can be written.

    Raises:
        HostError: when ``file`` is a folder, or lies in none.
    """
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else "cannot be written: no such folder"
        raise HostError(what, place=str(file), hint="name a file in a folder that is there")


def read_canary(file: Path) -> Canary:
    """Read a canary file.

    Raises:
        WeightsError: when it is not one.
    """
    try:
        with open_regular(file) as handle:
            canary = from_plain(Canary, parse_json(handle.read(_LIMIT), file.name), file.name)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}", place=str(file)) from None
    except FormatError as error:
        raise WeightsError(f"is not a canary file: {error}", place=str(file)) from None
    if canary.schema != SCHEMA or not canary.runs:
        hint = "write it again: ralbuild verify --model DIR --canary write FILE"
        raise WeightsError(
            f"needs the schema {SCHEMA}, found {canary.schema[:40]!r}", place=str(file), hint=hint
        )
    return canary


def compare_canaries(wanted: Canary, found: Canary, findings: Findings) -> None:
    """Report the first clear difference of every prompt."""
    if len(wanted.runs) != len(found.runs):
        what = (
            f"{len(wanted.runs)} prompts were recorded, there are {len(found.runs)} now: the chat template?"
        )
        findings.add("W801", what, found=len(found.runs), needed=len(wanted.runs))
        return
    for number, (old, new) in enumerate(zip(wanted.runs, found.runs, strict=True)):
        if old.prompt != new.prompt:
            findings.add("W801", f"prompt {number} has other ids: the tokenizer or template changed")
            continue
        for step, (a, b, margin) in enumerate(zip(old.tokens, new.tokens, old.margins, strict=False)):
            if a == b:
                continue
            if margin >= CLEAR:
                what = f"prompt {number}, token {step}: recorded {a}, found {b}"
                findings.add("W801", what, found=b, needed=a)
            break
