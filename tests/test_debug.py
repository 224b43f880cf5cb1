"""`ralbuild debug` shows what the executor does, token by token; a kernel runs in the interpreter."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ROOT, ralbuild
from model_factory import write_model

RULES = (
    MINIMAL
    + NO_KERNELS
    + """routing:
  rules:
    - {match: 'finance\\..*', action: careful}
actions:
  careful:
    ban: ["sure thing"]
    redact: [{pattern: 'acct-[0-9]{4,6}', with: '[account]'}]
    append: ' (end)'
postprocessing:
  output_transformers:
    - {name: html_enhancer, config: {bold_terms: ["risk", "風險"]}}
"""
)
TEXT = "A risk, a sure thing: acct-12345 風險"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ral-config.yaml").write_text(RULES, "utf-8")
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    return tmp_path


def steps(folder: Path, *arguments: object) -> list[dict]:
    shown = ralbuild("debug", "--route", "finance.x", "--text", "text.txt", *arguments, cwd=folder)
    assert shown.code == 0, shown.err
    return [json.loads(line) for line in shown.out.splitlines()]


def without_bans(text: str) -> str:
    """The rules of the config written with `re`: an independent whole-text model."""
    text = re.sub(r"acct-[0-9]{4,6}", "[account]", text)
    return re.sub(r"\brisk\b|風險", r"<b>\g<0></b>", text, flags=re.IGNORECASE) + " (end)"


def test_the_steps_of_a_text_add_up_to_the_rewritten_text(folder: Path) -> None:
    found = steps(folder)
    refused = [step for step in found if step["refused"]]
    assert [step["text"] for step in refused] == ["g"]  # the last letter of the banned phrase
    assert [rule["kind"] for rule in refused[0]["rules"]] == ["ban"]
    kept = "".join(step["text"] for step in found if not step["refused"])
    assert kept == TEXT.replace("sure thing", "sure thin")
    emitted = b"".join(bytes.fromhex(step["emitted_bytes"]) for step in found).decode()
    assert emitted == without_bans(kept)
    read = out = b""
    for step in found[:-1]:
        read += b"" if step["refused"] else bytes.fromhex(step["bytes"])
        if not out:
            assert read.endswith(bytes.fromhex(step["held_bytes"]))
    places = {rule["kind"]: rule["place"] for step in found for rule in step["rules"]}
    lines = RULES.splitlines()
    for kind, part in (("redact", "pattern:"), ("bold", "bold_terms"), ("append", "append:")):
        name, line, _ = places[kind].split(":")
        assert name == "ral-config.yaml"
        assert part in lines[int(line) - 1]


@pytest.mark.parametrize("wanted", ["redact", "11:14"])
def test_a_breakpoint_on_a_rule_ends_the_trace_where_it_matched(folder: Path, wanted: str) -> None:
    found = steps(folder, "--break", wanted)
    assert [step["break"] for step in found] == [False] * (len(found) - 1) + [True]
    assert found[-1]["emitted"].startswith("[account]")


def test_an_unknown_breakpoint_lists_the_rules(folder: Path) -> None:
    shown = ralbuild("debug", "--text", "text.txt", "--break", "nothing", cwd=folder)
    assert shown.code == 2
    assert "no rule is named 'nothing'" in shown.err
    assert "bold 'risk'" in shown.err


@pytest.mark.parametrize(
    "arguments", [("--text", "missing.txt"), ("--config", "none.yaml"), ("--model", "none")]
)
def test_what_cannot_be_read_is_one_error(folder: Path, arguments: tuple[str, str]) -> None:
    shown = ralbuild("debug", "--text", "text.txt", *arguments, cwd=folder)
    assert shown.code in (2, 3)
    assert shown.err.startswith("error: ")


def on_a_terminal(folder: Path, typed: str, *arguments: str) -> str:
    """Run `ralbuild debug` on a terminal of 70 columns and return all that it showed."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "70"} | {"XDG_CACHE_HOME": str(folder)}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "ralbuild.cli.main", "debug", "--text", "text.txt", *arguments]
    child = subprocess.Popen(command, cwd=folder, env=environment, stdin=side, stdout=side, stderr=side)
    os.close(side)
    os.write(main, typed.encode())
    shown = b""
    try:
        while part := os.read(main, 65536):
            shown += part
    except OSError:  # the other side is closed
        pass
    os.close(main)
    assert child.wait(timeout=60) == 0, shown
    return shown.decode()


def test_on_a_terminal_it_is_coloured_and_stops_where_asked(folder: Path) -> None:
    shown = on_a_terminal(folder, "c\nq\n", "--route", "finance.x", "--break", "bold")
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert len(re.findall("^breakpoint", plain, re.MULTILINE)) == 2
    assert "rule bold" in plain
    assert "└" in plain
    shown = on_a_terminal(folder, "\n\nq\n", "--step")
    assert len(re.findall("debug> ", shown)) == 3


KERNEL = """import triton
import triton.language as tl


@triton.jit
def shout_kernel(token_ptr, # *int32
                 output_ptr, # *uint8
                 output_len_ptr, # *int32
                 limit, # int32
                 BLOCK: tl.constexpr = 64):
    slot = tl.program_id(0)
    print("token", tl.load(token_ptr + slot))
    at = tl.arange(0, BLOCK)
    size = tl.load(output_len_ptr + slot)
    text = tl.load(output_ptr + at, mask=at < size, other=0)
    upper = tl.where((text >= 97) & (text <= 122), text - 32, text)
    HERE
    tl.store(output_ptr + at, upper, mask=(at < size) & (at < limit))
"""


@pytest.fixture(scope="module")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    write_model(folder / "model")
    (folder / "transformers").mkdir()
    (folder / "ral-config.yaml").write_text(
        MINIMAL + "postprocessing: {output_transformers: [{name: shout, config: {limit: 2}}]}\n"
    )
    (folder / "text.txt").write_text("abc risk")
    (folder / "transformers/shout.py").write_text(KERNEL)
    return folder


def run_kernel(folder: Path, here: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "transformers/shout.py").write_text(KERNEL.replace("HERE", here))
    command = [sys.executable, "-m", "ralbuild.cli.main", "debug", "--kernel", "shout", "--model", "model"]
    return subprocess.run(
        [*command, "--text", "text.txt"], cwd=folder, input=typed, capture_output=True, text=True, check=False
    )


def test_a_kernel_runs_in_the_interpreter_with_print_and_pdb(kernel_folder: Path) -> None:
    typed = "p 'si' + 'ze', BLOCK\nc\n" + "c\n" * 20
    done = run_kernel(kernel_folder, "import pdb; pdb.set_trace()", typed)
    assert done.returncode == 0, done.stderr
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert "".join(item["text"] for item in launches) == "abc risk"
    for item in launches:
        text = item["text"].encode()
        wanted = text[:2].upper() + text[2:]
        changed = {
            at: after for at, (before, after) in enumerate(zip(text, wanted, strict=True)) if before != after
        }
        assert {change["at"]: change["after"] for change in item["changes"].get("output_ptr", [])} == changed
    assert done.stderr.count("token") == len(launches)
    assert "('size', 64)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_kernel_that_fails_is_one_error_with_its_line(kernel_folder: Path) -> None:
    done = run_kernel(kernel_folder, "upper = upper + undefined")
    assert done.returncode == 4
    assert re.search(r"error: transformers/shout\.py:17: fails in the interpreter: NameError", done.stderr)


def test_the_checked_sample_wraps_the_text_of_its_terms(kernel_folder: Path, tmp_path: Path) -> None:
    sample = ROOT / "samples/user_kernel_checked"
    (tmp_path / "text.txt").write_text("a risk risky audit")
    arguments = ("--config", sample / "ral-config.yaml", "--kernel", "bold_tokens", "--text", "text.txt")
    config = (sample / "ral-config.yaml").read_text().replace('" risk", " audit"', '"a"')
    (tmp_path / "ral-config.yaml").write_text(config)
    (tmp_path / "transformers").symlink_to(sample / "transformers")
    shown = ralbuild("debug", *arguments[2:], "--model", kernel_folder / "model", cwd=tmp_path)
    assert shown.code == 0, shown.err
    for item in map(json.loads, shown.out.splitlines()):
        if item["text"] != "a":
            assert item["changes"] == {}
            continue
        after = {change["at"]: change["after"] for change in item["changes"]["output_ptr"]}
        assert bytes(after.get(at, 97) for at in range(8)) == b"<b>a</b>"
        assert [change["after"] for change in item["changes"]["output_len_ptr"]] == [8]


def test_an_unknown_kernel_lists_those_there_are(kernel_folder: Path) -> None:
    shown = ralbuild("debug", "--kernel", "shut", "--model", "model", "--text", "text.txt", cwd=kernel_folder)
    assert shown.code == 2
    assert "user kernels of this config: shout" in shown.err
