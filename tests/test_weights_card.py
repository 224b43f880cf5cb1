"""The licence in a model card's metadata; the expected values are what PyYAML reads there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ralbuild.supply.sbom import license_choice, spdx_name
from ralbuild.weights.card import read_license

CARDS = [
    "---\nlicense: apache-2.0\n---\n# x\n",
    "---\nlanguage:\n- en\nlicense: mit  # ours\ntags: [a]\n---\n",
    '---\nlicense: "llama3.1"\n---\n',
    "---\r\nlicense: gemma\r\n---\r\n",
    "---\nlicense:\n- cc-by-4.0\n---\n",
    "---\nlicense: other\nlicense_name: qwen-research\n---\n",
    "---\nlicense: other\n---\n",
    "---\ntags: [license]\n---\nlicense: mit\n",
]


@pytest.mark.parametrize("card", CARDS)
def test_the_licence_is_the_one_that_yaml_reads(card: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(card.encode())
    value = yaml.safe_load(card.split("---")[1])
    found = value.get("license", "")
    found = found[0] if isinstance(found, list) else found
    assert read_license(tmp_path) == (value.get("license_name", found) if found == "other" else found)


@pytest.mark.parametrize(
    "data", [b"", b"license: mit\n", b"\xff\xfe---\n", b"---\nlicense: <script>\n---\n", b"---\nlicense: mit"]
)
def test_a_card_without_metadata_names_none(data: bytes, tmp_path: Path) -> None:
    assert read_license(tmp_path) == ""
    (tmp_path / "README.md").write_bytes(data)
    assert read_license(tmp_path) == ""


def test_only_spdx_names_become_spdx_ids() -> None:
    assert spdx_name("apache-2.0") == "Apache-2.0"
    assert license_choice(spdx_name("gpl-3.0"))[0]["license"]["id"] == "GPL-3.0-only"
    assert license_choice("llama3.1")[0]["license"]["name"] == "llama3.1"
    assert license_choice("") == []
