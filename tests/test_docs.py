"""The documents name files, tests, commands and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ralbuild.cli.main import VERBS
from ralbuild.config.load import load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_exists(page: Path) -> None:
    names = re.findall(r"`((?:ralbuild|tests|samples|templates|ci|docs)/[A-Za-z0-9_./-]+)`", page.read_text())
    missing = [name for name in names if not (ROOT / name).exists()]
    assert missing == []


def test_the_readme_names_real_commands_and_a_config_that_loads(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    for verb in re.findall(r"^\$ ralbuild (\w+)", text, re.MULTILINE):
        assert verb in VERBS
    config = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    assert yaml.safe_load(config)["version"] == "0.3"
    (tmp_path / "ral-config.yaml").write_text(config)
    load_config(tmp_path / "ral-config.yaml")
    for target in re.findall(r"^\$ make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_runs_what_the_readme_says() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
