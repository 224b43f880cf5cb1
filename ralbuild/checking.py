"""Checking a model folder: what `verify` does alone, and every build does first.

A room of its own, so that a check does not wait for the modules that build images.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ralbuild.contract.tarball import WEIGHTS_MTIME
from ralbuild.digests import LayerCopies, default_cache
from ralbuild.report import Report, format_bytes
from ralbuild.weights.findings import FoundError
from ralbuild.weights.memo import Memo
from ralbuild.weights.output import summary
from ralbuild.weights.scan import Order, ScannedModel, Verdict, verify_folder

if TYPE_CHECKING:
    from ralbuild.signing import PublicKey

LAYER_MTIME = WEIGHTS_MTIME
"""Seconds since 1970 of every entry: a commit date here would change every layer's digest."""


@dataclass(frozen=True, slots=True)
class Checks:
    """How strictly a model folder, and a user's kernels, are checked.

    Attributes:
        rehash: read every weight byte, whatever the cache knows.
        strict: a warning is an error.
        ignored: ids of findings that do not count.
        signature_key: PEM file of the publisher's key; None leaves a signature unchecked.
        own_digests: compute the SHA-256 of every weight file, besides that of its layer.
        remember: keep the digests of what was read for the next run.
    """

    rehash: bool = False
    strict: bool = False
    ignored: frozenset[str] = frozenset()
    signature_key: Path | None = None
    own_digests: bool = False
    remember: bool = True


def verify_model(
    folder: Path,
    report: Report,
    checks: Checks,
    memo: Memo | None = None,
    copies: LayerCopies | None = None,
) -> ScannedModel:
    """Check and hash a model folder.

    Args:
        folder: the model.
        report: for progress.
        checks: how strict; ``rehash`` also ignores ``memo``.
        memo: remembers what the same tokenizer came to before.
        copies: takes the weight layers' bytes in the read that hashes them.

    Raises:
        FoundError: with every finding, when there is one that keeps it from being an image. Weights are
            not read once one is known.
    """
    verdict = check_model(folder, report, checks, memo, copies, fail_fast=True)
    if not verdict.passed(strict=checks.strict):
        raise FoundError(verdict.findings, strict=checks.strict)
    if verdict.model is None:  # what was ignored leaves nothing to build from
        raise FoundError(verdict.ignored)
    for finding in verdict.findings:
        if finding.severity == "warning":
            report.note(str(finding.problem()))
    if verdict.model.left_out:
        report.note(f"left out of the image: {', '.join(verdict.model.left_out)}")
    return verdict.model


def check_model(
    folder: Path,
    report: Report,
    checks: Checks,
    memo: Memo | None = None,
    copies: LayerCopies | None = None,
    *,
    fail_fast: bool = False,
) -> Verdict:
    """Run every check of a model folder; ``fail_fast`` stops before weights are read for nothing."""
    order = Order(
        rehash=checks.rehash,
        jobs=len(os.sched_getaffinity(0)),
        fail_fast=fail_fast,
        ignored=checks.ignored,
        key=_signature_key(checks.signature_key),
        memo=None if checks.rehash else memo,
        own_digests=checks.own_digests,
        copies=copies,
    )
    with report.stage("verify") as stage:
        progress = partial(report.progress, unit="B")
        digests = default_cache(writes=checks.remember)
        verdict = verify_folder(folder, digests, LAYER_MTIME, progress, order)
        model = verdict.model
        if model is None:
            stage.summary = summary(verdict)
            return verdict
        known = all(shard.digests.cached for shard in model.shards)
        how = (
            "digests reused, no weight byte read"
            if known
            else f"{format_bytes(model.weight_bytes)} read and hashed"
        )
        stage.summary = f"{model.manifest.model_type}, {model.manifest.tensors} tensors, {how}"
    return verdict


def _signature_key(path: Path | None) -> PublicKey | None:
    if path is None:
        return None
    from ralbuild.signing import load_public_key  # who checks no signature does not wait for cryptography

    return load_public_key(path)
