"""`ralbuild debug-proxy` before a small server: what clients get, and what the reports say."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import openai
import pytest
from cli_support import MINIMAL, NO_KERNELS, ralbuild
from runtime_fixtures import make_image, make_model, running

CONFIG = (
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
    sampling: {temperature: 0.2}
preprocessing:
  token_filters:
    - {name: replace, config: {rules: [{text: ROI, with: return on investment}]}}
    - {name: max_length, config: {characters: 200}}
postprocessing:
  output_transformers:
    - {name: html_enhancer, config: {bold_terms: ["risk"]}}
"""
)
TEXT = "A risk, a sure thing: acct-12345 風險 risk"
REWRITTEN = "A <b>risk</b>, a sure thing: [account] 風險 <b>risk</b>"


class Upstream(BaseHTTPRequestHandler):
    """Answers every chat with `TEXT`, whole or a character a chunk; ends as the model's name says."""

    seen: ClassVar[list[dict]] = []

    def do_GET(self) -> None:
        self.answer(200, "application/json", b'{"object": "list", "data": []}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if body["model"] == "broken":
            self.answer(503, "application/json", b'{"error": {"message": "busy"}}')
        elif not body.get("stream"):
            message = {"role": "assistant", "content": TEXT}
            choices = [
                {"index": n, "message": message, "finish_reason": "stop"} for n in range(body.get("n", 1))
            ]
            self.answer(200, "application/json", json.dumps(self.shell("") | {"choices": choices}).encode())
        else:
            self.answer(200, "text/event-stream", self.events(body["model"]).encode())

    def shell(self, kind: str) -> dict:
        return {"id": "x", "object": f"chat.completion{kind}", "created": 0, "model": "m"}

    def events(self, model: str) -> str:
        deltas = [{"role": "assistant", "content": ""}, *({"content": char} for char in TEXT)]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if model != "abrupt":
            choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        lines = [f"data: {json.dumps(self.shell('.chunk') | {'choices': [item]})}\n\n" for item in choices]
        return ": comment\n\n" + "".join(lines) + "data: [DONE]\n\n"

    def answer(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Proxy:
    url: str
    config: Path
    process: subprocess.Popen[str]
    reports: list[dict] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.reports.append(json.loads(line))

    def report(self) -> dict:
        """Return the next report."""
        deadline = time.monotonic() + 30
        while not self.reports and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.reports.pop(0)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextmanager
def started(upstream: str, folder: Path, config: str) -> Iterator[Proxy]:
    (folder / "ral-config.yaml").write_text(config, "utf-8")
    port = free_port()
    command = [sys.executable, "-m", "ralbuild.cli.main", "debug-proxy", "--json", "--show-text"]
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [*command, "--upstream", f"{upstream}/v1", "--port", str(port)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    made = Proxy(f"http://127.0.0.1:{port}", folder / "ral-config.yaml", process)
    threading.Thread(target=made.read, daemon=True).start()
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{made.url}/v1/models", timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    yield made
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) in (0, 130), (folder / "errors").read_text()


@pytest.fixture(scope="module")
def proxy(upstream: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with started(upstream, tmp_path_factory.mktemp("proxy"), CONFIG) as made:
        yield made


def ask(proxy: Proxy, model: str = "tiny/finance.retail", **more: object):
    return proxy.client().chat.completions.create(
        model=model, messages=[{"role": "user", "content": "The ROI?"}], temperature=1, **more
    )


def test_a_whole_answer_is_rewritten_and_each_rule_reported(proxy: Proxy) -> None:
    Upstream.seen.clear()
    answer = ask(proxy, n=2)
    assert [item.message.content for item in answer.choices] == [f"{REWRITTEN} (end)"] * 2
    sent = Upstream.seen[-1]
    assert sent["model"] == "tiny"
    assert sent["messages"][0]["content"] == "The return on investment?"
    assert sent["temperature"] == 0.2
    report = proxy.report()
    assert (report["route"], report["profile"]) == ("finance.retail", "careful")
    counts = {(item["kind"], item["text"]): item["count"] for item in report["rules"]}
    assert counts == {
        ("bold", "risk"): 4,
        ("redact", "/acct-[0-9]{4,6}/"): 2,
        ("append", " (end)"): 2,
        ("replace", "ROI"): 1,
    }
    assert all(re.fullmatch(r"ral-config\.yaml:\d+:\d+", item["place"]) for item in report["rules"])
    assert report["bans_that_would_refuse"] == 2
    assert report["request"] == ["input rewritten", "temperature 1 -> 0.2"]
    assert report["choices"][0] == {"index": 0, "before": TEXT, "after": f"{REWRITTEN} (end)"}


@pytest.mark.parametrize("model", ["tiny/finance.retail", "abrupt"])
def test_a_stream_is_rewritten_as_the_whole_is_however_it_ends(proxy: Proxy, model: str) -> None:
    headers = {"x-ral-route": "finance.x"} if model == "abrupt" else {}
    chunks = list(ask(proxy, model=model, stream=True, extra_headers=headers))
    assert "".join(item.choices[0].delta.content or "" for item in chunks) == f"{REWRITTEN} (end)"
    report = proxy.report()
    assert report["choices"][0]["after"] == f"{REWRITTEN} (end)"
    assert report["changed"]


def test_without_a_route_the_default_rules_apply(proxy: Proxy) -> None:
    answer = ask(proxy, model="tiny")
    assert answer.choices[0].message.content == TEXT.replace("risk", "<b>risk</b>")
    assert proxy.report()["profile"] == "default"


def test_what_the_image_would_refuse_is_refused(proxy: Proxy) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="found 201"):
        proxy.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 201}]
        )
    assert "refused" in proxy.report()["request"][0]


def test_other_requests_and_errors_pass_as_they_are(proxy: Proxy) -> None:
    assert proxy.client().models.list().data == []
    with pytest.raises(openai.InternalServerError, match="busy"):
        ask(proxy, model="broken")
    request = urllib.request.Request(f"{proxy.url}/v1/chat/completions", b"not JSON", method="POST")
    with pytest.raises((urllib.error.HTTPError, OSError)):
        urllib.request.urlopen(request, timeout=30)


def test_a_changed_config_is_used_at_once_and_a_broken_one_never(proxy: Proxy) -> None:
    try:
        proxy.config.write_text(CONFIG.replace('bold_terms: ["risk"]', 'bold_terms: ["sure"]'))
        assert "<b>sure</b>" in (ask(proxy, model="tiny").choices[0].message.content or "")
        proxy.config.write_text("nonsense: [")
        assert "<b>sure</b>" in (ask(proxy, model="tiny").choices[0].message.content or "")
    finally:
        proxy.config.write_text(CONFIG)
        proxy.reports.clear()


def test_a_wrong_start_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "ral-config.yaml").write_text(CONFIG)
    shown = ralbuild("debug-proxy", "--upstream", "ftp://x", cwd=tmp_path)
    assert (shown.code, "needs a URL such as" in shown.err) == (2, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = ralbuild(
            "debug-proxy",
            "--upstream",
            "http://127.0.0.1:9",
            "--port",
            port,
            cwd=tmp_path,
            env=dict(os.environ),
        )
    assert (shown.code, "the port cannot be opened" in shown.err) == (7, True)


def test_before_our_own_server_a_stream_is_its_text_rewritten(tmp_path: Path) -> None:
    """The server's own text, rewritten by `re`, is what a client of the proxy gets."""
    image = make_image(tmp_path / "root", make_model(tmp_path / "model"))

    def text(url: str, *, stream: bool) -> str:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chat = client.completions.create(
            model="tiny", prompt="a b", max_tokens=60, temperature=0, stream=stream
        )
        return "".join(item.choices[0].text for item in (chat if stream else [chat]))

    with running(image, {"RAL_THREADS": "1"}) as runtime:
        plain = text(runtime.url, stream=False)
        pattern = "[A-Za-z]{2}"
        rules = "rules: [{match: '', action: hide}]\n"
        config = f"{MINIMAL}{NO_KERNELS}routing:\n  {rules}actions: {{hide: {{redact: [{{pattern: '{pattern}', with: '[x]'}}]}}}}\n"
        wanted = re.sub(pattern, "[x]", plain)
        assert wanted != plain
        with started(runtime.url, tmp_path, config) as proxy:
            assert text(proxy.url, stream=False) == wanted
            assert text(proxy.url, stream=True) == wanted
