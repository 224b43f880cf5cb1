"""The config: each scenario file carries its own expected errors, as line:column and wording."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ralbuild.config.load import load_config
from ralbuild.config.model import Config
from ralbuild.config.schema import config_reference, config_schema
from ralbuild.config.strict_yaml import read_yaml
from ralbuild.errors import ConfigError

ROOT = Path(__file__).parent.parent
SCENARIOS = sorted((ROOT / "tests" / "scenarios" / "config").glob("*.yaml"))
SAMPLES = sorted((ROOT / "samples").glob("*/ral-config.yaml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_mistake_is_reported_in_one_run_at_its_place(path: Path) -> None:
    expected = re.findall(r"^# error (\d+:\d+) (.+)$", path.read_text(), re.MULTILINE)
    assert expected, "the scenario names no expected error"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = [(item.place.removeprefix(f"{path.name}:"), item.message) for item in caught.value.problems]
    for place, wording in expected:
        assert any(place == at and wording in message for at, message in found), (place, wording, found)
    assert len(found) == len(expected), found
    assert not [item for item in caught.value.problems if not item.hint], "what to do about it is missing"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_samples_load_and_satisfy_the_schema_by_an_independent_validator(path: Path) -> None:
    load_config(path)
    jsonschema.Draft7Validator.check_schema(config_schema())
    jsonschema.validate(yaml.safe_load(path.read_text()), config_schema(), jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 8000},
        {"version": "1"},
        {"max_batch_size": 0},
        {"routing": {"rules": [{"match": "a"}]}},
        {"postprocessing": {"output_transformers": [{"name": "html_enhancer", "config": {"bold": []}}]}},
    ],
)
def test_schema_refuses_what_the_loader_refuses(change: dict[str, object], tmp_path: Path) -> None:
    config = {"version": "0.3", "model": "m"} | change
    path = tmp_path / "ral-config.yaml"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load_config(path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, config_schema(), jsonschema.Draft7Validator)


def test_tags_run_nothing() -> None:
    canary = Path("/tmp/ralbuild-canary")
    canary.unlink(missing_ok=True)
    with pytest.raises(ConfigError):
        load_config(ROOT / "tests" / "scenarios" / "config" / "tag.yaml")
    assert not canary.exists()


def test_the_articles_config_is_valid_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "samples" / "finance" / "ral-config.yaml").read_text()
    path = tmp_path / "ral-config.yaml"
    path.write_text(text.replace("smollm2-135m-instruct", "claude-3-5-sonnet-20241022"))
    config = load_config(path).config
    assert config.model == "claude-3-5-sonnet-20241022"
    assert config.routing.rules[0].priority == 10


def test_a_users_action_replaces_the_built_in_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        'version: "0.3"\nmodel: m\nrouting: {rules: [{match: a, action: apply_financial_guardrails}]}\n'
        "actions: {apply_financial_guardrails: {ban: [only this]}}\n"
    )
    assert load_config(path).actions["apply_financial_guardrails"].ban == ["only this"]


def test_a_user_kernel_wins_over_the_built_in_only_when_its_file_defines_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        'version: "0.3"\nmodel: m\npostprocessing: {output_transformers: [{name: html_enhancer}]}\n'
    )
    kernel = tmp_path / "transformers" / "html_enhancer.py"
    kernel.parent.mkdir()
    kernel.write_text("# no kernel here\n")
    assert not load_config(path).kernels
    kernel.write_text("def html_enhancer_kernel(\n  a):\n  pass\n")
    loaded = load_config(path)
    assert [kernel.name for kernel in loaded.kernels] == ["html_enhancer"]
    assert not loaded.enhancers


def test_missing_file_and_folder_are_config_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=r"no such file|is not a file"):
            load_config(path)


@pytest.mark.parametrize(
    ("data", "wording"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"", "empty"),
        (b"# nothing\n", "empty"),
        (b"a: [" * 40, "nested"),
        (b"x" * (1 << 20) + b"y", "bytes"),
        (b"a: \x00", "not YAML"),
        (b"%YAML 9.9\n---\na: b", "not YAML"),
        (b"a: 1e999\n", "too large"),
    ],
)
def test_text_that_is_not_a_config_is_one_clear_problem(data: bytes, wording: str) -> None:
    document = read_yaml(data, "f.yaml")
    assert [wording in item.message for item in document.problems] == [True], document.problems


@given(st.binary(max_size=200) | st.text("{}[]:,-&*!|>'\"%@` \n\t#abc019.", max_size=120).map(str.encode))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_input_gives_anything_but_a_config_or_a_config_error(data: bytes) -> None:
    path = Path("/dev/shm/ralbuild-fuzz.yaml")
    path.write_bytes(data)
    try:
        load_config(path)
    except ConfigError as error:
        assert error.problems
    finally:
        path.unlink()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*Config.model_fields, "rules", "name", "config", "ban"]), inner, max_size=4), max_leaves=12))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_no_shape_of_values_gives_a_traceback(value: object) -> None:
    path = Path("/dev/shm/ralbuild-fuzz-shape.yaml")
    path.write_text(json.dumps(value))
    try:
        load_config(path)
    except ConfigError as error:
        assert all(item.message for item in error.problems)
    finally:
        path.unlink()


def test_reference_page_is_current() -> None:
    page = ROOT / "docs" / "config.md"
    assert page.read_text() == config_reference(), "run: ralbuild schema --markdown > docs/config.md"
