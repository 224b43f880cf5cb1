"""`ralbuild probe` against stand-in servers with one fault each; formats are read back by their own parsers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from release_support import ProcessHost, free_ports

from ralbuild.cli.main import main
from ralbuild.config.probes import load_probes
from ralbuild.engine import Launch
from ralbuild.errors import ConfigError
from ralbuild.release.service_client import ServiceClient

PROBES = """
golden:
  - {name: hello, prompt: "Say hello.", max_tokens: 8, text: "You said: Say hello."}
guardrails:
  - {name: project, prompt: "Tell me of Bluebird", absent: ["bluebird"], present: ["[project]"]}
"""


@contextlib.contextmanager
def server(folder: Path, **env: str) -> Iterator[str]:
    host = ProcessHost(folder)
    found = host.add_image("a", LOAD_SECONDS="0", **env)
    (port,) = free_ports(1)
    host.start(Launch("s", found.image, port, {}, 5))
    client = ServiceClient("127.0.0.1", port, timeout=5)
    deadline = time.monotonic() + 30
    while not client.ready()[0] and env.get("FAULT") != "never-ready":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        host.stop_all()


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    path = tmp_path / "probes.yaml"
    path.write_text(PROBES)
    return path


def probed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["probe", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_a_healthy_server_passes_every_kind(tmp_path: Path, probes: Path, capsys) -> None:
    with server(tmp_path / "h") as url:
        code, out = probed(
            capsys, "--url", url, "--probes", probes, "--bundle", "sha256:a", "--format", "json"
        )
    answer = json.loads(out)
    assert (code, answer["ok"]) == (0, True)
    kinds = {probe["kind"] for probe in answer["probes"]}
    assert kinds == {"smoke", "identity", "golden", "guardrail", "streaming", "limits"}


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("tokens", {"golden hello"}),
        ("leak", {"guardrail project"}),
        ("bundle", {"identity bundle"}),
        ("no-done", {"guardrail project", "streaming stream"}),
    ],
)
def test_each_fault_fails_its_own_probe(
    tmp_path: Path, probes: Path, capsys, fault: str, failing: set[str]
) -> None:
    with server(tmp_path / "h", FAULT=fault) as url:
        code, out = probed(
            capsys, "--url", url, "--probes", probes, "--bundle", "sha256:a", "--format", "json"
        )
    assert code == 8
    found = {f"{p['kind']} {p['name']}" for p in json.loads(out)["probes"] if not p["ok"]}
    assert found == failing


def test_what_must_not_be_seen_is_not_in_the_report(tmp_path: Path, probes: Path, capsys) -> None:
    with server(tmp_path / "h", FAULT="leak") as url:
        _, out = probed(capsys, "--url", url, "--probes", probes)
    assert "FAIL  guardrail" in out
    assert "bluebird" not in out.lower()


def test_a_server_that_is_gone_fails_and_does_not_hang(capsys) -> None:
    (port,) = free_ports(1)
    code, out = probed(capsys, "--url", f"http://127.0.0.1:{port}", "--timeout", "2")
    assert code == 8
    assert "refused" in out


def test_prometheus_and_junit_read_what_is_written(tmp_path: Path, probes: Path, capsys) -> None:
    textfile, junit = tmp_path / "p.prom", tmp_path / "j.xml"
    with server(tmp_path / "h", FAULT="tokens") as url:
        probed(capsys, "--url", url, "--probes", probes, "--format", "prometheus", "--out", textfile)
        probed(capsys, "--url", url, "--probes", probes, "--format", "junit", "--out", junit)
    families = {family.name: family for family in text_string_to_metric_families(textfile.read_text())}
    success = {sample.labels["name"]: sample.value for sample in families["ralbuild_probe_success"].samples}
    assert success["hello"] == 0
    assert success["stream"] == 1
    assert len(families["ralbuild_probe_duration_seconds"].samples) == len(success)
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == (str(len(success)), "1")
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["hello"]


def test_recorded_answers_pass_against_the_server_that_gave_them_and_fail_against_another(
    tmp_path: Path, capsys
) -> None:
    path = tmp_path / "golden.yaml"
    with server(tmp_path / "h") as url:
        assert probed(capsys, "--url", url, "--record", path, "--prompt", 'Say "a: b" # é')[0] == 0
        assert probed(capsys, "--url", url, "--probes", path)[0] == 0
    assert load_probes(path).golden[0].text == 'You said: Say "a: b" # é'
    with server(tmp_path / "other", FAULT="tokens") as url:
        assert probed(capsys, "--url", url, "--probes", path, "--kind", "golden")[0] == 8


def test_watch_probes_again_and_again(tmp_path: Path) -> None:
    with server(tmp_path / "h") as url:
        command = [
            sys.executable,
            "-m",
            "ralbuild.cli.main",
            "probe",
            "--url",
            url,
            "--watch",
            "0.1",
            "--kind",
            "smoke",
        ]
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        rounds = 0
        for line in watcher.stdout:
            rounds += "probes passed" in line
            if rounds == 2:
                break
        watcher.terminate()
        assert watcher.wait(30) == 130


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("golden: [{name: a, prompt: x}]", "p.yaml:1:10"),
        ("goldn: []", "p.yaml:1:1"),
        ("guardrails: [{name: a, prompt: x}]", "p.yaml:1:14"),
        ("latency: {first_text: -1}", "p.yaml:1:23"),
    ],
)
def test_a_wrong_probe_file_is_an_error_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_probes(path)
    assert caught.value.problems[0].place == place


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://a:b", "http://u@h:1/"])
def test_an_address_that_is_none_is_refused(url: str, capsys) -> None:
    assert main(["probe", "--url", url]) == 2
    assert "is no HTTP address" in capsys.readouterr().err
