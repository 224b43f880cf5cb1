"""A release on a real docker engine with the real model: up, a changed rule, a bad image, back again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import openai
import pytest
from cli_support import ROOT
from release_support import free_ports

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ralbuild"
MODEL = CACHE / "models" / "smollm2-135m-instruct"
RALBUILD = [sys.executable, "-m", "ralbuild.cli.main"]
CONFIG = ROOT / "tests" / "e2e" / "guardrails.yaml"
QUESTION = "What does a compliance audit check? Answer in one sentence."

pytestmark = [pytest.mark.real_model, pytest.mark.docker]


def ralbuild(folder: Path, *arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [*RALBUILD, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout.strip() if code == 0 else done.stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images that differ in one bold term, in one layout, so that layers are shared."""
    folder = tmp_path_factory.mktemp("images")
    changed = folder / "changed.yaml"
    changed.write_text(CONFIG.read_text().replace('"audit"]', '"audit", "company"]'))
    for name, config in (("one", CONFIG), ("two", changed)):
        ralbuild(
            folder,
            "image",
            "--model",
            MODEL,
            "--config",
            config,
            "--output",
            f"oci:{name}",
            "--tag",
            "m:1",
            "--quiet",
        )
    return folder


@pytest.fixture
def site(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("s")
    listen, blue, green = free_ports(3)
    ralbuild(
        images, "release", "init", "--site", folder, "--listen", f"127.0.0.1:{listen}",
        "--ports", f"{blue},{green}", "--drain", 60, "--watch", 2,
    )  # fmt: skip
    yield folder, listen
    pid = int((folder / "haproxy.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    engine = docker.from_env()
    for box in engine.containers.list(all=True, filters={"label": f"io.ralbuild.release.site={folder}"}):
        image = box.image.id
        box.remove(force=True)
        engine.images.remove(image, force=True)


class Clients:
    """The real openai client, streaming and not, one request after the other until told to stop."""

    def __init__(self, port: int) -> None:
        self.failures: list[str] = []
        self.texts: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._port = port
        self._threads = [threading.Thread(target=self._run, args=(stream,)) for stream in (True, False)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, stream: bool) -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none", max_retries=0)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                text = self._ask(client, stream)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.texts.append((began, text))
            time.sleep(0.3)  # the release under test has the same two cores

    @staticmethod
    def _ask(client: openai.OpenAI, stream: bool) -> str:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=24,
            stream=stream,
        )
        if not stream:
            return answer.choices[0].message.content
        chunks = list(answer)
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_changed_rule_is_released_and_taken_back_without_a_failed_request(images: Path, site) -> None:
    folder, port = site
    plan = json.loads(ralbuild(images, "release", "up", "oci:one", "--site", folder, "--dry-run", "--json"))
    assert (plan["colour"], plan["old"], plan["mode"]) == ("blue", "", "blue-green")
    assert ralbuild(images, "release", "up", "oci:one", "--site", folder, "--quiet") == "blue serves"
    golden = images / "golden.yaml"
    golden.unlink(missing_ok=True)
    ralbuild(images, "probe", "--url", f"http://127.0.0.1:{port}", "--record", golden, "--prompt", QUESTION)
    with Clients(port) as clients:
        # The recorded answer is the old rule's: with it as gate, the changed rule may not pass.
        said = ralbuild(images, "release", "up", "oci:two", "--site", folder, "--probes", golden, code=8)
        assert "golden golden-1" in said
        assert ralbuild(images, "release", "up", "oci:two", "--site", folder) == "green serves"
        switched = time.monotonic()
        deadline = switched + 60
        while not any(began > switched for began, _ in clients.texts):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert ralbuild(images, "release", "rollback", "--site", folder, "--probes", golden) == "blue serves"
        back = time.monotonic()
        while not any(began > back for began, _ in clients.texts):
            assert time.monotonic() < back + 60
            time.sleep(0.1)
    assert clients.failures == []
    new = {text for began, text in clients.texts if switched < began < switched + 0.5}
    assert all("<b>company</b>" in text for text in new)
    assert all("<b>company</b>" not in text for began, text in clients.texts if began > back)
    status = json.loads(ralbuild(images, "release", "status", "--site", folder, "--json"))
    assert status["active"] == status["proxy"]["sends_to"] == "blue"
    assert [row["status"] for row in status["colours"]] == ["running", "exited"]
    print(f"{len(clients.texts)} requests, 0 failed")
