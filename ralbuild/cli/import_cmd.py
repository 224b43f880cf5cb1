"""`ralbuild import`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from ralbuild.cli.options import add_report_options, chosen_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the file to convert")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new model folder")
    add_report_options(parser)


def run(options: argparse.Namespace) -> int:
    """Convert the file, verify the result, and print the folder."""
    from ralbuild.weights.convert import import_gguf

    report = chosen_report(options)
    with report.stage("import") as stage:
        report.step("dequantising to bfloat16 with transformers; about a minute per billion parameters")
        verdict = import_gguf(options.gguf, options.out, partial(report.progress, unit="B"))
        manifest = verdict.model.manifest if verdict.model is not None else None
        stage.summary = f"{manifest.model_type}, {manifest.parameters:,} parameters" if manifest else ""
    for finding in verdict.findings:
        if finding.severity == "warning":
            report.note(str(finding.problem()))
    print(options.out)
    return 0
