"""The command line with a tiny model: outputs, exit codes, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_support import MINIMAL, NO_KERNELS, ROOT, listing, ralbuild, write_fake_base
from model_factory import write_model

from ralbuild.cli.main import VERBS

CUDA_BASE = {"io.ralbuild.base.target": "cuda", "io.ralbuild.base.cuda": "12.2.2"}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", shards=2)
    write_fake_base(tmp_path / "base")
    (tmp_path / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS)
    return tmp_path


def image(work: Path, *more: object, **options: object):
    return ralbuild("image", "--model", "model", "--base", f"oci:{work / 'base'}", *more, cwd=work, **options)


def skopeo(path: str) -> dict:
    done = subprocess.run(["skopeo", "inspect", "--raw", path], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_image_prints_the_digest_and_nothing_else_and_skopeo_reads_it(work: Path) -> None:
    done = image(work)
    assert done.code == 0, done.err
    assert done.out.startswith("sha256:")
    assert done.out.count("\n") == 1
    digest = subprocess.run(
        ["skopeo", "inspect", "--format", "{{.Digest}}", f"oci:{work / 'ral-image'}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert digest.stdout.strip() == done.out.strip()
    sizes = [layer["size"] for layer in skopeo(f"oci:{work / 'ral-image'}")["layers"]]
    assert len(sizes) == 1 + 2 + 4, "base, two shards, tokenizer, launcher, kernels, rules"


def test_same_inputs_give_the_same_digest_whatever_surrounds_them(work: Path, tmp_path: Path) -> None:
    first = image(work).out
    other = tmp_path / "deep" / "er"
    other.mkdir(parents=True)
    write_model(other / "weights", shards=2)
    for number, path in enumerate(sorted((other / "weights").iterdir())):
        os.utime(path, (1_700_000_000 + number, 1_600_000_000 - number))
        path.chmod(0o600)
    (other / "c.yaml").write_text(MINIMAL + NO_KERNELS)
    env = {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "4711", "LANG": "C", "LC_ALL": "C", "HOME": str(other)}
    done = ralbuild(
        "image", "--model", other / "weights", "--config", "c.yaml", "--base", f"oci:{work / 'base'}",
        "--output", f"archive:{other / 'a.tar'}", "--output", f"oci:{other / 'layout'}",
        cwd=other, env=env, umask=0o077,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.out == first
    for source in (f"oci:{other / 'layout'}", f"oci-archive:{other / 'a.tar'}"):
        digest = subprocess.run(
            ["skopeo", "inspect", "--format", "{{.Digest}}", source],
            capture_output=True,
            text=True,
            check=True,
        )
        assert digest.stdout == first


def test_a_changed_rule_changes_the_last_layer_only(work: Path) -> None:
    image(work)
    before = skopeo(f"oci:{work / 'ral-image'}")["layers"]
    term = "postprocessing: {output_transformers: [{name: html_enhancer, config: {bold_terms: [risk]}}]}\n"
    (work / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS + term)
    done = image(work, "--json")
    assert done.code == 0, done.err
    after = skopeo(f"oci:{work / 'ral-image'}")["layers"]
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
    assert [layer["reused"] for layer in json.loads(done.out)["layers"]] == [True] * 6 + [False]


def test_dry_run_writes_no_image(work: Path) -> None:
    done = image(work, "--dry-run")
    assert done.code == 0, done.err
    assert "weights model-00001-of-00002.safetensors" in done.out
    assert not (work / "ral-image").exists()
    assert image(work).out.strip() == done.out.split()[0]


def test_a_dry_run_writes_nothing_anywhere(work: Path) -> None:
    before = everything(work)
    done = image(work, "--dry-run")
    assert done.code == 0, done.err
    assert everything(work) == before, "neither caches nor folders for them"
    image(work)
    before = everything(work)
    assert image(work, "--dry-run", "--rehash").out == done.out
    assert everything(work) == before


@pytest.mark.parametrize(("target", "more"), [("cpu", []), ("cuda", ["--arch", "sm_90"])])
def test_a_dry_run_makes_no_base_and_says_what_making_it_takes(
    work: Path, target: str, more: list[str]
) -> None:
    lock = (ROOT / "ralbuild/data" / f"base-{target}.lock").read_text()
    count = len(re.findall("^[a-z].*==", lock, re.MULTILINE))
    size = sum(int(text.replace(",", "")) for text in re.findall("^# ([0-9,]+) bytes", lock, re.MULTILINE))
    words = ["image", "--model", "model", "--target", target, *more, "--dry-run"]
    before = everything(work)
    done = ralbuild(*words, cwd=work, env={"https_proxy": "http://127.0.0.1:9"})
    assert done.code == 0, done.err
    assert everything(work) == before
    assert done.out.startswith("no digest yet: ")
    said = re.search(f"the base for {target}: {count} locked packages, ([0-9.]+) (MB|GB)", done.out)
    assert said is not None, done.out
    assert float(said[1]) * {"MB": 10**6, "GB": 10**9}[said[2]] == pytest.approx(size, rel=0.01)
    assert "weights model-00001-of-00002.safetensors" in done.out
    answer = json.loads(ralbuild(*words, "--json", cwd=work).out)
    assert (answer["manifest"], answer["config"], len(answer["would_make"])) == (None, None, 1)
    assert len(answer["layers"]) == 2 + 4


def test_what_a_second_build_is_compared_with_needs_a_base(work: Path) -> None:
    done = ralbuild("image", "--model", "model", "--dry-run", "--check-repro", cwd=work)
    assert (done.code, "--check-repro" in done.err, "ralbuild base" in done.err) == (2, True, True)


def everything(work: Path) -> list[str]:
    return sorted(str(path) for path in work.rglob("*"))


def test_source_date_epoch_is_the_images_date(work: Path) -> None:
    image(work, env={"SOURCE_DATE_EPOCH": "1700000000"})
    done = subprocess.run(
        ["skopeo", "inspect", "--config", f"oci:{work / 'ral-image'}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["created"] == "2023-11-14T22:13:20Z"
    bad = image(work, env={"SOURCE_DATE_EPOCH": "yesterday"})
    assert (bad.code, "SOURCE_DATE_EPOCH" in bad.err) == (2, True)


def test_inspect_shows_rules_layers_and_labels(work: Path) -> None:
    (work / "ral-config.yaml").write_text(
        MINIMAL
        + NO_KERNELS
        + "routing: {rules: [{match: 'finance.*', action: apply_financial_guardrails}]}\n"
    )
    digest = image(work).out.strip()
    text = ralbuild("inspect", "ral-image", cwd=work)
    assert digest[:19] in text.out
    assert "'finance.*' -> apply_financial_guardrails" in text.out
    answer = json.loads(ralbuild("inspect", "oci:ral-image", "--json", cwd=work).out)
    assert answer["manifest"] == digest
    assert answer["user"] == "65532:65532"
    assert answer["labels"]["io.ralbuild.model"] == "tiny"
    assert {rule["kind"] for rule in answer["rules"]} == {"ban", "redact"}


def break_shard(work: Path) -> None:
    path = work / "model" / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 7)


def add_kernel(work: Path) -> None:
    (work / "transformers").mkdir()
    (work / "transformers" / "mine.py").write_text("def mine_kernel(x):\n  pass\n")
    (work / "ral-config.yaml").write_text(
        MINIMAL + NO_KERNELS + "postprocessing: {output_transformers: [{name: mine}]}\n"
    )


@pytest.mark.parametrize(
    ("change", "arguments", "code", "wording"),
    [
        (lambda w: (w / "ral-config.yaml").write_text(MINIMAL + "mode: x\n"), [], 2, "ral-config.yaml:4:1: unknown key 'mode' (did you mean 'model'?)"),
        (lambda w: (w / "ral-config.yaml").write_text(MINIMAL + "port: 1\n"), [], 2, "rules listen on nothing"),
        (lambda w: (w / "ral-config.yaml").unlink(), [], 2, "no such file"),
        (lambda w: (w / "ral-config.yaml").write_text(MINIMAL.replace("512", "513") + NO_KERNELS), [], 2, "ral-config.yaml:3:14: max_seq_len is 513"),
        (add_kernel, [], 2, "'mine' is a user kernel"),
        (lambda w: None, ["--output", "ftp:x"], 2, "--output"),
        (lambda w: None, ["--output", "registry:team/demo"], 2, "the host must be written out"),
        (lambda w: None, ["--target", "cuda"], 6, "is a base for 'cpu'; the image is for 'cuda'"),
        (lambda w: write_fake_base(w / "base2", **CUDA_BASE), ["--target", "cuda", "--base", "oci:base2"], 2, "needs an architecture, found none"),
        (lambda w: None, ["--targt", "cpu"], 2, "unrecognized arguments"),
        (lambda w: None, ["--arch", "sm_10"], 2, "unknown architecture 'sm_10'"),
        (lambda w: None, ["--tag", "Bad Tag"], 2, "--tag"),
        (break_shard, [], 3, "7 bytes too short"),
        (lambda w: (w / "model" / "config.json").unlink(), [], 3, "the model folder lacks it [W203 no-config]"),
        (lambda w: None, ["--model", "nowhere"], 3, "no such folder"),
        (lambda w: (w / ".ral_cache").write_text("x"), [], 5, ".ral_cache"),
        (lambda w: (w / "ral-image").mkdir() or (w / "ral-image" / "keep.txt").write_text("x"), [], 6, "ral-image"),
        (lambda w: write_fake_base(w / "base2", **{"io.ralbuild.base.contract": "9"}), ["--base", "oci:base2"], 6, "no runtime base"),
        (lambda w: write_fake_base(w / "base2", **{"io.ralbuild.base.target": "cuda"}), ["--base", "oci:base2"], 6, "is a base for 'cuda'"),
        (lambda w: None, ["--base", "oci:nowhere"], 6, "nowhere"),
        (lambda w: None, ["--base", "r.example.test/python:3.11"], 2, "needs a digest"),
        (lambda w: None, ["--output", "oci:/proc/nope/x"], 7, "/proc/nope"),
    ],
)  # fmt: skip
def test_each_failure_has_its_one_error_its_code_and_leaves_nothing(
    change, arguments, code, wording, work: Path
) -> None:
    change(work)
    before = listing(work)
    done = image(work, *arguments)
    assert (done.code, done.out) == (code, ""), done.err
    assert wording in done.err
    assert "error: " in done.err
    left = [path for path in listing(work) if path not in before and not path.startswith(".ral_cache")]
    assert left == []


def test_errors_are_json_on_request(work: Path) -> None:
    (work / "ral-config.yaml").write_text(MINIMAL + "mode: x\n")
    done = image(work, "--json", "--quiet")
    answer = json.loads(done.err)
    assert answer["exit_code"] == 2
    assert answer["error"][0]["place"] == "ral-config.yaml:4:1"


def test_no_command_is_help_and_every_verb_has_help(tmp_path: Path) -> None:
    assert "usage: ralbuild" in ralbuild(cwd=tmp_path).out
    for verb in VERBS:
        done = ralbuild(verb, "--help", cwd=tmp_path)
        assert (done.code, "usage: ralbuild " + verb in done.out) == (0, True)


def test_init_writes_a_config_that_loads_and_never_overwrites(tmp_path: Path) -> None:
    done = ralbuild("init", "new", "--model-name", "m", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (
        ralbuild("explain", "--config", "new/ral-config.yaml", "--route", "finance.a", cwd=tmp_path).code == 0
    )
    again = ralbuild("init", "new", cwd=tmp_path)
    assert (again.code, "already there" in again.err) == (2, True)
    bad = ralbuild("init", "other", "--model-name", "a b", cwd=tmp_path)
    assert bad.code == 2
    assert not (tmp_path / "other" / "ral-config.yaml").exists()


def test_init_refuses_a_bad_model_name_without_traceback(tmp_path: Path) -> None:
    assert ralbuild("init", "--model-name", 'x"\nport: 1', cwd=tmp_path).code == 2
    assert listing(tmp_path) == []


def test_explain_names_the_route_that_wins_and_those_that_come_later(tmp_path: Path) -> None:
    path = ROOT / "samples" / "routing" / "ral-config.yaml"
    done = ralbuild("explain", "--config", path, "--route", "finance.retail", "--json", cwd=tmp_path)
    answer = json.loads(done.out)
    assert [route["action"] for route in answer["matches"]] == ["careful", "apply_financial_guardrails"]
    assert answer["profile"]["sampling"]["temperature"] == {"least": 0, "most": 0}


def test_verify_prints_digests_that_sha256sum_gives(work: Path) -> None:
    done = ralbuild("verify", "--model", "model", cwd=work)
    for path in sorted((work / "model").glob("*.safetensors")):
        digest = subprocess.run(
            ["sha256sum", path], capture_output=True, text=True, check=True
        ).stdout.split()[0]
        assert digest in done.out


def test_render_gives_a_context_whose_weights_are_links_and_whose_dockerfile_passes_hadolint(
    work: Path,
) -> None:
    done = ralbuild("render", "--model", "model", "--base", f"oci:{work / 'base'}", "--out", "ctx", cwd=work)
    assert done.code == 0, done.err
    context = work / "ctx"
    name = "model-00001-of-00002.safetensors"
    assert (context / "models" / name).samefile(work / "model" / name)
    dockerfile = (context / "Dockerfile").read_text()
    assert dockerfile.count("FROM ") == 1
    assert "@sha256:" in dockerfile
    subprocess.run([Path(sys.executable).parent / "hadolint", context / "Dockerfile"], check=True)
    subprocess.run([Path(sys.executable).parent / "shellcheck", context / "entrypoint.sh"], check=True)
    copied = [line for line in dockerfile.splitlines() if line.startswith("COPY")]
    for line in copied:
        for source in json.loads(line.split(" ", 2)[2])[:-1]:
            assert (context / source).exists(), source


def test_two_builds_at_once_share_cache_and_output(work: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ralbuild.cli.main",
        "image",
        "--model",
        "model",
        "--base",
        f"oci:{work / 'base'}",
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(work / "xdg")}
    jobs = [subprocess.Popen(command, cwd=work, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {job.communicate(timeout=120)[0] for job in jobs}
    assert len(outputs) == 1
    assert [job.returncode for job in jobs] == [0, 0, 0]
    subprocess.run(["skopeo", "inspect", f"oci:{work / 'ral-image'}"], check=True, capture_output=True)


def test_a_build_killed_at_any_moment_leaves_the_old_image_and_the_next_succeeds(work: Path) -> None:
    old = image(work).out.strip()
    command = [
        sys.executable,
        "-m",
        "ralbuild.cli.main",
        "image",
        "--model",
        "model",
        "--base",
        f"oci:{work / 'base'}",
        "--rehash",
    ]
    env = {**os.environ, "XDG_CACHE_HOME": str(work / "xdg")}
    for number in range(8):
        (work / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS + f"# {number}\n")
        job = subprocess.Popen(
            command, cwd=work, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(0.15 + 0.12 * number)
        job.send_signal(signal.SIGKILL)
        job.wait()
        done = subprocess.run(
            ["skopeo", "inspect", "--format", "{{.Digest}}", f"oci:{work / 'ral-image'}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert old
    (work / "ral-config.yaml").write_text(MINIMAL + NO_KERNELS)
    assert image(work).out.strip() == old
    leftovers = [path for path in listing(work) if "partial" in path or ".tmp" in path]
    assert leftovers == []


def test_interrupt_is_exit_130_and_leaves_nothing(work: Path) -> None:
    os.truncate(work / "model" / "model-00001-of-00002.safetensors", 0)
    (work / "model" / "model-00001-of-00002.safetensors").unlink()
    write_model(work / "model", shards=2)
    command = [
        sys.executable,
        "-m",
        "ralbuild.cli.main",
        "image",
        "--model",
        "model",
        "--base",
        f"oci:{work / 'base'}",
    ]
    job = subprocess.Popen(
        command,
        cwd=work,
        env={**os.environ, "XDG_CACHE_HOME": str(work / "xdg")},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr.readline()  # it is up and reads the model
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode in (130, 0), err
    assert "Traceback" not in err
    if job.returncode == 130:
        assert not (work / "ral-image").exists()


@pytest.mark.parametrize(
    ("text", "wording"),
    [
        ('match: "a{99999999999999999999}"', "not a regular expression"),
        (f"match: {'(' * 3000}", "at most 1000 characters"),
        (f"match: {'(' * 900}", "not a regular expression"),
        ('match: "\\ud800"', "not YAML"),
        ('match: "\\UFFFFFFFF"', "not YAML"),
        ('"\\ud800": 1', "not YAML"),
    ],
)
def test_text_that_breaks_parsers_is_a_config_error(text: str, wording: str, tmp_path: Path) -> None:
    (tmp_path / "ral-config.yaml").write_text(
        MINIMAL + "routing:\n  rules:\n    - action: apply_financial_guardrails\n      " + text + "\n"
    )
    done = ralbuild("explain", cwd=tmp_path)
    assert (done.code, wording in done.err) == (2, True), done.err


def test_a_config_of_any_size_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    with (tmp_path / "ral-config.yaml").open("wb") as file:
        file.truncate(200 << 30)
    done = ralbuild("explain", cwd=tmp_path)
    assert (done.code, "more than" in done.err) == (2, True), done.err


def test_names_from_files_cannot_move_the_cursor(work: Path) -> None:
    (work / "model" / "x\nsha256:dead\x1b[31m").write_text("")
    done = image(work)
    assert done.code == 0, done.err
    assert "\x1b" not in done.err
    assert "\nsha256:dead" not in done.err


def test_a_full_standard_output_is_a_host_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m ralbuild.cli.main schema > /dev/full"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (7, False), done.stderr


def test_an_action_may_have_any_name_and_keeps_its_rules(tmp_path: Path) -> None:
    names = ["default", "input", "html_enhancer"]
    rules = "".join(f"    - {{match: {name}, action: {name}}}\n" for name in names)
    actions = "".join(f"  {name}: {{ban: [secret {name}], append: END}}\n" for name in names)
    text = f"{MINIMAL}routing:\n  rules:\n{rules}actions:\n{actions}"
    text += "postprocessing: {output_transformers: [{name: html_enhancer, config: {bold_terms: [risk]}}]}\n"
    (tmp_path / "ral-config.yaml").write_text(text)
    for name in names:
        answer = json.loads(ralbuild("explain", "--route", name, "--json", cwd=tmp_path).out)
        assert [rule["text"] for rule in answer["rules"]] == [f"secret {name}", "END", "risk"]
        assert answer["matches"][0]["profile"] == 1 + sorted(names).index(name)
