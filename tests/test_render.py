"""Rendered files: hostile values stay values, and independent linters accept the result."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ralbuild.errors import ImageError
from ralbuild.render import DockerfileFacts, entrypoint, render_dockerfile

FACTS = DockerfileFacts(
    version="0.1.0",
    base="ralbuild/base@sha256:" + "a" * 64,
    labels=(("io.ralbuild.model", "m"),),
    env=(("RAL_BUNDLE_SHA256", "b" * 64),),
    shards=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    model_files=("config.json", "tokenizer.json"),
    model_dir="/models",
    ral_dir="/opt/ral",
    entrypoint="/opt/ral/entrypoint.sh",
    user="65532:65532",
    port=8000,
)
INSTRUCTIONS = ["FROM", "LABEL", "ENV", "COPY", "COPY", "COPY", "COPY", "COPY", "COPY",
                "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"]  # fmt: skip


def instructions(data: bytes) -> list[str]:
    return [line.split()[0] for line in data.decode().splitlines() if line and not line.startswith("#")]


def test_the_dockerfile_passes_hadolint_and_has_one_copy_per_weight_file(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_bytes(render_dockerfile(FACTS).data)
    subprocess.run([Path(sys.executable).parent / "hadolint", path], check=True)
    assert instructions(path.read_bytes()) == INSTRUCTIONS


def test_the_entrypoint_is_static_and_passes_shellcheck(tmp_path: Path) -> None:
    path = tmp_path / "entrypoint.sh"
    path.write_bytes(entrypoint().data)
    subprocess.run([Path(sys.executable).parent / "shellcheck", path], check=True)
    assert b"exec " in entrypoint().data


@given(st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_label_value_adds_an_instruction(value: str) -> None:
    try:
        data = render_dockerfile(replace(FACTS, labels=(("io.ralbuild.model", value),))).data
    except ImageError:
        assert any(ord(char) < 32 or ord(char) == 127 for char in value)
        return
    # splitlines() knows more line ends than a Dockerfile does; only "\n" ends an instruction there.
    lines = [line for line in data.decode().split("\n") if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines] == INSTRUCTIONS
    label = next(line for line in lines if line.startswith("LABEL"))
    assert json.loads(label.split("=", 1)[1].replace("\\$", "$")) == value


@pytest.mark.parametrize("base", ["x\nRUN id", "a b", "$(id)", "`id`", "", 'a"b'])
def test_a_base_that_is_no_reference_is_refused(base: str) -> None:
    with pytest.raises(ImageError):
        render_dockerfile(replace(FACTS, base=base))
