"""Findings as text, JSON, SARIF 2.1 and GitHub annotations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ralbuild import __version__
from ralbuild.contract.codec import to_plain
from ralbuild.contract.manifest import ModelFile
from ralbuild.weights.findings import Finding, printable
from ralbuild.weights.rules import Severity, rules_by_id
from ralbuild.weights.scan import ScannedModel, Verdict

_SARIF_LEVEL: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}
_GITHUB: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(verdict: Verdict) -> str:
    """Return one block a finding, then what the folder is: for logs and pipes."""
    lines: list[str] = []
    for item in verdict.findings:
        lines.append(f"{item.severity:<7} {item.rule.id} {item.rule.name}: {item.message}")
        if item.place:
            lines.append(f"             in {item.place}")
        if item.hint and item.severity != "info":
            lines.append(f"             {item.hint}")
    return "\n".join([*lines, footer(verdict)])


def footer(verdict: Verdict) -> str:
    """Return what the folder is and its files' digests, then the counts."""
    lines = []
    if verdict.model is not None:
        manifest = verdict.model.manifest
        size = f"{manifest.parameters:,} parameters in {manifest.tensors} tensors"
        lines.append(f"{manifest.architecture}, {size}, {verdict.model.quantised or manifest.dtype}")
        lines += [
            f"  sha256:{entry.sha256}  {entry.size:>14,}  {entry.path}"
            for entry in (*_weights(verdict.model), *manifest.files)
        ]
        root = verdict.model.root_sha256
        lines.append(f"  sha256:{root}                  root of these files (OpenSSF model signing)")
    return "\n".join([*lines, summary(verdict)])


def _weights(model: ScannedModel) -> list[ModelFile]:
    """Return the weight files by their own digests, which verify asks for: what others compare with."""
    return [ModelFile(shard.name, shard.size, shard.digests.sha256) for shard in model.shards]


def _manifest(model: ScannedModel) -> Any:
    """Return the manifest with every weight file by its own digest and that of its layer in an image."""
    layers = {shard.name: shard.digests.layer_sha256 for shard in model.shards}
    files = [{**to_plain(item), "layer_sha256": layers[item.path]} for item in _weights(model)]
    return {**to_plain(model.manifest), "weights": files}


def summary(verdict: Verdict) -> str:
    """Return ``2 errors, 1 warning, 0 notes``, and how many were ignored."""
    found = verdict.findings
    counts = {kind: sum(item.severity == kind for item in found) for kind in ("error", "warning", "info")}
    text = ", ".join(
        f"{counts[kind]} {word}{'' if counts[kind] == 1 else 's'}"
        for kind, word in (("error", "error"), ("warning", "warning"), ("info", "note"))
    )
    return f"{text}, {len(verdict.ignored)} ignored" if verdict.ignored else text


def as_json(verdict: Verdict, *, passed: bool) -> str:
    """Return one object: whether it passed, the findings, and the manifest when there is one."""
    model = verdict.model
    answer = {
        "passed": passed,
        "findings": [_plain(item) for item in verdict.findings],
        "ignored": [_plain(item) for item in verdict.ignored],
        "manifest": _manifest(model) if model is not None else None,
        "root_sha256": model.root_sha256 if model is not None else None,
        "left_out": [printable(name) for name in model.left_out] if model is not None else [],
    }
    return json.dumps(answer, indent=2)  # ASCII: a pipe may have any encoding


def _plain(item: Finding) -> dict[str, str]:
    return {
        "id": item.rule.id,
        "name": item.rule.name,
        "severity": item.severity,
        "message": item.message,
        "file": item.file,
        "tensor": item.tensor,
        "found": item.found,
        "needed": item.needed,
        "hint": item.hint,
    }


def as_sarif(findings: Sequence[Finding]) -> str:
    """Return a SARIF 2.1.0 log; file names are relative to the model folder."""
    used = sorted({item.rule.id for item in findings})
    rules = [
        {
            "id": rule.id,
            "name": rule.name,
            "shortDescription": {"text": rule.meaning},
            "help": {"text": rule.hint or rule.meaning},
            "defaultConfiguration": {"level": _SARIF_LEVEL[rule.severity]},
        }
        for rule in (rules_by_id()[rule_id] for rule_id in used)
    ]
    results = []
    for item in findings:
        text = item.message if not item.hint else f"{item.message}. {item.hint}"
        result: dict[str, Any] = {
            "ruleId": item.rule.id,
            "ruleIndex": used.index(item.rule.id),
            "level": _SARIF_LEVEL[item.severity],
            "message": {"text": text},
        }
        # GitHub refuses a result without a file: one about the whole folder has the folder.
        location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(item.file or ".")}}}
        if item.tensor:
            location["logicalLocations"] = [{"name": item.tensor, "kind": "member"}]
        results.append(result | {"locations": [location]})
    driver = {"name": "ralbuild", "semanticVersion": __version__, "rules": rules}
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}],
    }
    return json.dumps(log, indent=2)


def _uri(name: str) -> str:
    from urllib.parse import quote

    return quote(name)


def as_github(findings: Sequence[Finding]) -> str:
    """Return one workflow command a finding."""
    lines = []
    for item in findings:
        parts = [f"title={_property(f'{item.rule.id} {item.rule.name}')}"]
        if item.file:
            parts.insert(0, f"file={_property(item.file)}")
        place = f"{item.tensor}: " if item.tensor else ""
        text = f"{place}{item.message}" + (f". {item.hint}" if item.hint else "")
        lines.append(f"::{_GITHUB[item.severity]} {','.join(parts)}::{_data(text)}")
    return "\n".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
