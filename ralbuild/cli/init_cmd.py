"""`ralbuild init`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from ralbuild.errors import HostError, UsageError

STARTER = """\
# yaml-language-server: $schema=./ral-config.schema.json
version: "0.3"
model: "{model}"

# Requests whose route matches take an action; the route is the header x-ral-route.
routing:
  rules:
    - {{match: "finance.*", action: "apply_financial_guardrails", priority: 10}}

postprocessing:
  output_transformers:
    - name: "html_enhancer"
      config: {{bold_terms: ["risk", "compliance", "audit"]}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to write; default: here")
    parser.add_argument("--model-name", default="my-model", help="the name to serve the model under")


def run(options: argparse.Namespace) -> int:
    """Write a commented config and its schema; never overwrite a file."""
    import json
    import tempfile

    from ralbuild.config.load import load_config
    from ralbuild.config.schema import config_schema

    config = options.folder / "ral-config.yaml"
    if os.path.lexists(config):
        raise UsageError("is already there", place=str(config), hint="edit it, or name another folder")
    text = STARTER.format(model=options.model_name)
    with tempfile.TemporaryDirectory() as folder:  # a bad name is refused before anything is written
        trial = Path(folder) / config.name
        trial.write_text(text, "utf-8")
        load_config(trial)
    schema = json.dumps(config_schema(), indent=2, sort_keys=True) + "\n"
    written = [options.folder / "ral-config.schema.json", config]
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(written, (schema, text), strict=True):
            path.write_text(content, "utf-8")
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise HostError(f"cannot be written: {error.strerror}", place=str(config)) from None
    print(config)
    print(f"next: ralbuild image --model DIR --config {config}", file=sys.stderr)
    return 0
