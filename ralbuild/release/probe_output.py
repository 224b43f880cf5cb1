"""Probe results as text, JSON, a Prometheus textfile and JUnit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from ralbuild.release.probe import ProbeResult
from ralbuild.report import printable

FORMATS = ("text", "json", "prometheus", "junit")


def format_results(results: Sequence[ProbeResult], form: str, url: str) -> str:
    """Return ``results`` in one of `FORMATS`, without a final newline."""
    writers = {"text": _text, "json": _json, "prometheus": _prometheus, "junit": _junit}
    return writers[form](results, url)


def line_of(result: ProbeResult) -> str:
    """Return one result as a line for people."""
    mark = "ok  " if result.ok else "FAIL"
    return printable(f"{mark}  {result.kind:<9}  {result.name:<16}  {result.message}")


def _text(results: Sequence[ProbeResult], url: str) -> str:
    failed = sum(not result.ok for result in results)
    return f"{len(results) - failed} of {len(results)} probes passed against {url}"


def _json(results: Sequence[ProbeResult], url: str) -> str:
    probes = [
        {
            "kind": result.kind,
            "name": result.name,
            "ok": result.ok,
            "seconds": round(result.seconds, 3),
            "message": result.message,
        }
        for result in results
    ]
    return json.dumps({"url": url, "ok": all(r.ok for r in results), "probes": probes}, indent=2)


def _prometheus(results: Sequence[ProbeResult], url: str) -> str:
    """The text format of Prometheus' exposition, for node_exporter's textfile collector."""
    lines = [
        "# HELP ralbuild_probe_success 1 when the probe passed.",
        "# TYPE ralbuild_probe_success gauge",
    ]
    names = [f'{{kind="{result.kind}",name="{result.name}",url="{_label(url)}"}}' for result in results]
    lines += [
        f"ralbuild_probe_success{name} {int(result.ok)}" for name, result in zip(names, results, strict=True)
    ]
    lines += [
        "# HELP ralbuild_probe_duration_seconds How long the probe took.",
        "# TYPE ralbuild_probe_duration_seconds gauge",
    ]
    lines += [
        f"ralbuild_probe_duration_seconds{name} {result.seconds:.3f}"
        for name, result in zip(names, results, strict=True)
    ]
    return "\n".join(lines)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _junit(results: Sequence[ProbeResult], url: str) -> str:
    failed = sum(not result.ok for result in results)
    total = sum(result.seconds for result in results)
    name = quoteattr(f"ralbuild probe {url}")
    counts = f'tests="{len(results)}" failures="{failed}" errors="0" skipped="0" time="{total:.3f}"'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites><testsuite name={name} {counts}>"]
    for result in results:
        kind, case = quoteattr(f"ralbuild.{result.kind}"), quoteattr(result.name)
        lines.append(f'<testcase classname={kind} name={case} time="{result.seconds:.3f}">')
        text = printable(result.message)
        if not result.ok:
            lines.append(f"<failure message={quoteattr(text)}>{escape(text)}</failure>")
        lines.append("</testcase>")
    lines.append("</testsuite></testsuites>")
    return "\n".join(lines)
