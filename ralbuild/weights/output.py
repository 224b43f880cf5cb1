"""Findings as text, JSON, SARIF 2.1 and GitHub annotations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ralbuild import __version__
from ralbuild.contract.codec import to_plain
from ralbuild.weights.findings import Finding
from ralbuild.weights.rules import RULES, Severity
from ralbuild.weights.scan import Verdict

FORMATS = ("text", "json", "sarif", "github")
_COLORS: dict[Severity, str] = {"error": "1;31", "warning": "33", "info": "2"}
_SARIF_LEVEL: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}
_GITHUB: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(findings: Sequence[Finding], verdict: Verdict, *, color: bool) -> str:
    """Return one block a finding, then what the folder is."""
    lines: list[str] = []
    for item in findings:
        mark = f"{item.severity:<7} {item.rule.id}"
        mark = f"\x1b[{_COLORS[item.severity]}m{mark}\x1b[0m" if color else mark
        lines.append(f"{mark} {item.rule.name}: {item.message}")
        if item.place:
            lines.append(f"             in {item.place}")
        if item.hint and item.severity != "info":
            lines.append(f"             {item.hint}")
    if verdict.model is not None:
        manifest = verdict.model.manifest
        size = f"{manifest.parameters:,} parameters in {manifest.tensors} tensors"
        lines.append(f"{manifest.architecture}, {size}, {manifest.dtype}")
        lines += [
            f"  sha256:{entry.sha256}  {entry.size:>14,}  {entry.path}"
            for entry in (*manifest.weights, *manifest.files)
        ]
    lines.append(summary(findings))
    return "\n".join(lines)


def summary(findings: Sequence[Finding]) -> str:
    """Return ``2 errors, 1 warning, 0 notes``."""
    counts: dict[str, int] = {kind: sum(item.severity == kind for item in findings) for kind in _COLORS}
    return ", ".join(
        f"{counts[kind]} {word}{'' if counts[kind] == 1 else 's'}"
        for kind, word in (("error", "error"), ("warning", "warning"), ("info", "note"))
    )


def as_json(findings: Sequence[Finding], verdict: Verdict, *, passed: bool) -> str:
    """Return one object: whether it passed, the findings, and the manifest when there is one."""
    answer = {
        "passed": passed,
        "findings": [_plain(item) for item in findings],
        "manifest": to_plain(verdict.model.manifest) if verdict.model is not None else None,
        "left_out": list(verdict.model.left_out) if verdict.model is not None else [],
    }
    return json.dumps(answer, indent=2, ensure_ascii=False)


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
        for rule in (RULES[rule_id] for rule_id in used)
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
        location: dict[str, Any] = {}
        if item.file:
            location["physicalLocation"] = {"artifactLocation": {"uri": _uri(item.file)}}
        if item.tensor:
            location["logicalLocations"] = [{"name": item.tensor, "kind": "member"}]
        if location:
            result["locations"] = [location]
        results.append(result)
    driver = {"name": "ralbuild", "semanticVersion": __version__, "rules": rules}
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}],
    }
    return json.dumps(log, indent=2, ensure_ascii=False)


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
