"""`ralbuild verify` from the outside: formats, exit codes, options."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import jsonschema
import pytest
from cli_support import MINIMAL, NO_KERNELS, write_fake_base
from model_factory import edit_json, edit_tensors, read_tensors, write_model

from ralbuild.cli.main import main
from ralbuild.digests import DigestCache
from ralbuild.weights import output
from ralbuild.weights.findings import Findings
from ralbuild.weights.rules import reference, rule_families, rules_by_id
from ralbuild.weights.scan import verify_folder

pytestmark = pytest.mark.usefixtures("one_worker_a_request")

ROOT = Path(__file__).parent.parent

SARIF = {  # the part of the SARIF 2.1.0 schema that our log uses, by its text
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {"required": ["id"]},
                                    }
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message"],
                            "properties": {
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": {"type": "object", "required": ["text"]},
                                "ruleIndex": {"type": "integer", "minimum": -1},
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return write_model(tmp_path / "model")


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["verify", "--quiet", *map(str, words)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_healthy_folder_ends_with_0(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--model", model, "--strict")
    assert code == 0
    assert "0 errors, 0 warnings" in out
    assert "LlamaForCausalLM" in out


def test_errors_end_with_3_and_are_all_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda c: c.update(num_hidden_layers=3, rms_norm_eps=0.5))
    code, out, err = run(capsys, "--model", model)
    assert code == 3
    assert "Traceback" not in err
    assert [rule for rule in re.findall(r"W\d{3}", out) if rule in ("W311", "W321")] == ["W311", "W321"]


def test_a_warning_is_an_error_only_when_strict(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    assert run(capsys, "--model", model)[0] == 0
    assert run(capsys, "--model", model, "--strict")[0] == 3
    assert run(capsys, "--model", model, "--strict", "--ignore", "W321")[0] == 0
    assert run(capsys, "--model", model, "--strict", "--ignore", "odd-epsilon")[0] == 0


def test_json_holds_the_manifest_and_every_finding(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    code, out, _ = run(capsys, "--model", model, "--format", "json")
    answer = json.loads(out)
    assert code == 0
    assert answer["passed"] is True
    assert answer["manifest"]["model_type"] == "llama"
    finding = next(item for item in answer["findings"] if item["id"] == "W321")
    assert finding["severity"] == "warning"
    assert finding["file"] == "config.json"
    assert finding["found"] == "0.5"


def test_sarif_and_github_name_the_rule_and_the_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda c: c.update(rms_norm_eps=0.5, tie_word_embeddings=False))
    code, out, _ = run(capsys, "--model", model, "--format", "sarif")
    log = json.loads(out)
    assert code == 3
    jsonschema.validate(log, SARIF)
    results = log["runs"][0]["results"]
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    assert all(rules[item["ruleIndex"]]["id"] == item["ruleId"] for item in results)
    head = next(item for item in results if item["ruleId"] == "W314")
    assert head["locations"][0]["logicalLocations"][0]["name"] == "lm_head.weight"
    code, out, _ = run(capsys, "--model", model, "--format", "github")
    assert code == 3
    assert re.search(r"^::error file=model.safetensors,title=W314 no-head::lm_head.weight", out, re.MULTILINE)
    assert re.search(r"^::warning file=config.json,title=W321 odd-epsilon::", out, re.MULTILINE)


def test_every_result_of_sarif_has_a_file_or_the_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "model", shards=2)
    (tmp_path / "model" / "config.json").unlink()
    findings = Findings()
    findings.add("W226", "too many")
    for item in (
        *verify_folder(tmp_path / "model", DigestCache(None), 0, lambda *_: None).findings,
        *findings.sorted(),
    ):
        log = json.loads(output.as_sarif([item]))
        place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert place == (item.file or ".")


def test_a_finding_about_a_tensor_names_the_shard_that_holds_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", shards=2)
    edit_json(folder / "config.json", lambda c: c.update(intermediate_size=8, num_hidden_layers=1))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = verify_folder(folder, DigestCache(None), 0, lambda *_: None).findings
    named = {(item.tensor, item.file) for item in found if item.rule.id == "W310"}
    assert named
    assert named <= set(index.items())


@pytest.mark.parametrize("form", ["text", "json", "sarif", "github"])
def test_output_of_any_encoding_holds_every_name(form: str, model: Path) -> None:
    edit_json(model / "config.json", lambda c: c.update(hidden_act="☃"))
    command = [sys.executable, "-m", "ralbuild.cli.main", "verify", "--model", str(model), "--format", form]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "☃" in (done.stdout.decode("unicode_escape"))


def test_every_finding_above_a_note_says_what_to_do() -> None:
    assert [rule.id for rule in rules_by_id().values() if not rule.hint and rule.severity != "info"] == []


def test_names_from_the_file_cannot_write_to_the_terminal_or_the_log(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(model / "config.json", lambda c: c.update(hidden_act="\x1b[2J\n::error::forged"))
    for form in ("text", "github"):
        _, out, _ = run(capsys, "--model", model, "--format", form)
        assert "\x1b" not in out
        assert not re.search(r"^::error::forged", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--model", "nowhere"), 3),
        ((), 2),
        (("--model", "model", "--ignore", "W999"), 2),
        (("--model", "model/config.json"), 3),
        (("--model", "model", "--config", "nowhere.yaml"), 2),
    ],
)
def test_a_wrong_call_is_one_error(
    words: tuple[str, ...],
    code: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(model.parent)
    got, out, err = run(capsys, *words)
    assert got == code
    assert out == ""
    assert err.count("error:") == 1


def test_the_config_is_checked_with_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model.parent / "c.yaml"
    config.write_text('version: "0.3"\nmodel: m\nmax_seq_len: 100000\n')
    code, _, err = run(capsys, "--model", model, "--config", config)
    assert code == 2
    assert "512 positions" in err


def test_the_reference_page_is_the_one_in_docs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--reference")
    assert code == 0
    assert out == reference() == (ROOT / "docs" / "verify.md").read_text()


def test_every_rule_has_its_own_id_and_name_and_lies_in_its_family() -> None:
    rules = [rule for family in rule_families() for rule in family.rules]
    assert len(rules) == len(rules_by_id()) == len({rule.name for rule in rules})
    for family in rule_families():
        numbers = [rule.id for rule in family.rules]
        assert all(re.fullmatch(rf"{family.id}\d\d", number) for number in numbers)
        assert numbers == sorted(numbers)


def test_every_rule_that_the_code_names_exists_and_the_other_way_round() -> None:
    done = subprocess.run(
        ["grep", "-rhoE", '"W[0-9]{3}"', str(ROOT / "ralbuild" / "weights"), str(ROOT / "ralbuild" / "cli")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    named = {word.strip('"') for word in done.stdout.split()}
    assert named == set(rules_by_id())


def build(model: Path, *words: object) -> int:
    """Run `image` up to the point where layers would be written."""
    base, config = model.parent / "base", model.parent / "ral-config.yaml"
    if not base.exists():
        write_fake_base(base)
        config.write_text(MINIMAL + NO_KERNELS)
    fixed = [
        "--config",
        config,
        "--cache",
        model.parent / "cache",
        "--base",
        f"oci:{base}",
        "--dry-run",
        "--quiet",
    ]
    return main(["image", "--model", *map(str, (model, *fixed, *words))])


def test_image_ignores_and_is_strict_as_verify_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    assert build(model) == 0
    assert build(model, "--strict") == 3
    assert "W321 odd-epsilon" in capsys.readouterr().err
    assert build(model, "--strict", "--ignore", "odd-epsilon") == 0
    assert build(model, "--ignore", "W999") == 2
    (model / "modeling.py").write_text("x")
    assert build(model) == 3
    assert build(model, "--ignore", "W701") == 0


def test_an_ignored_error_that_leaves_no_model_stops_the_image_all_the_same(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "tokenizer.json").unlink()
    words = ["--ignore", "no-tokenizer"]
    assert run(capsys, "--model", model, *words)[0] == 0
    assert build(model, *words) == 3
    assert "W204 no-tokenizer" in capsys.readouterr().err
    edit_json(model / "config.json", lambda c: c.pop("architectures"))
    assert build(model, *words, "--ignore", "W302") == 3


def test_what_is_ignored_is_counted_and_listed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    _, out, _ = run(capsys, "--model", model, "--ignore", "W321")
    assert "0 errors, 0 warnings" in out
    assert out.rstrip().endswith("1 ignored")
    _, out, _ = run(capsys, "--model", model, "--ignore", "W321", "--json")
    assert [item["id"] for item in json.loads(out)["ignored"]] == ["W321"]


def test_a_quantised_model_passes_verify_and_is_no_image(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            outputs, inputs = tensors[name][1]
            tensors[name] = ("F8_E4M3", [outputs, inputs], bytes(range(1, 65)) * (outputs * inputs // 64))
            tensors[f"{name}_scale"] = ("F32", [], b"\0\0\0\x3f")

    edit_tensors(model / "model.safetensors", change)
    edit_json(model / "config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    assert run(capsys, "--model", model)[0] == 0
    assert build(model) == 3
    assert "the engine serves unquantised weights only; these are FP8, 8 bits" in capsys.readouterr().err


def on_terminal(width: int, *words: str) -> tuple[int, str]:
    """Run a command whose standard output is a terminal of ``width`` columns; return status and output."""
    main_end, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    command = [sys.executable, "-m", "ralbuild.cli.main", *words]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width)}
    child = subprocess.Popen(command, stdout=child_end, stderr=subprocess.PIPE, env=environment)
    os.close(child_end)
    parts: list[bytes] = []
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while part := os.read(main_end, 1 << 16):
            parts.append(part)
    os.close(main_end)
    child.communicate()
    return child.returncode, b"".join(parts).decode()


@pytest.mark.parametrize("width", [60, 140])
def test_a_terminal_gets_a_table_that_fits_worst_first(width: int, model: Path) -> None:
    edit_json(model / "config.json", lambda c: c.update(num_hidden_layers=3, rms_norm_eps=0.5))
    edit_json(model / "config.json", lambda c: c.update(hidden_act="[bold]\x1b[2J[/]"))
    code, text = on_terminal(width, "verify", "--quiet", "--model", str(model))
    assert code == 3, text
    assert "\x1b[2J" not in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(len(line) <= width for line in plain.splitlines())
    assert re.findall(r"W\d{3}", plain) == ["W311", "W321", "W322", "W517", "W518"]
    assert "'[bold]" in plain, "what the folder says is no markup"
    assert "3 errors" not in plain
    assert "1 error, 2 warnings, 2 notes" in plain


def test_an_interrupt_ends_the_read_of_a_large_file(model: Path) -> None:
    size = 200 << 30
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    header = json.dumps({name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    big = model / "big.safetensors"
    with big.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    (model / "model.safetensors").rename(model / "small.safetensors")
    names = [*read_tensors(model / "small.safetensors")]
    index = {"weight_map": {**dict.fromkeys(names, "small.safetensors"), name: big.name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    command = [
        sys.executable,
        "-m",
        "ralbuild.cli.main",
        "verify",
        "--model",
        str(model),
        "--progress",
        "json",
    ]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stderr is not None
    while '"progress"' not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGTERM)  # SIGINT may be ignored where tests run in the background
    out, err = child.communicate(timeout=120)  # hashing 200 GB takes longer than that
    assert child.returncode == 130
    assert out == ""
    assert "Traceback" not in err
