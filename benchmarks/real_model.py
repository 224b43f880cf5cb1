"""The real model of the benchmarks: SmolLM2-135M-Instruct, fetched once (`ci/fetch_model.py`)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

_FETCH = Path(__file__).resolve().parent.parent / "ci" / "fetch_model.py"


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--model``."""
    text = "a model folder; default: SmolLM2-135M-Instruct, fetched when it is not there"
    parser.add_argument("--model", type=Path, help=text)


def model_folder(chosen: Path | None) -> Path:
    """Return the folder that ``--model`` names, else SmolLM2's."""
    if chosen is not None:
        return chosen
    done = subprocess.run([sys.executable, str(_FETCH)], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())
