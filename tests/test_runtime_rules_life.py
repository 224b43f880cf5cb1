"""Rules of the serving side outlive the process that applies them: a crash, an unload and a wake.

Expected texts come from transformers' `generate` and `str.replace`; signatures are made by `ralbuild rules`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from runtime_fixtures import Runtime, make_image, make_model, running
from supply_cases import make_key, ralbuild
from test_runtime_api import CHAT, ONE_THREAD, greedy, say, words_of
from test_runtime_ops import ADMIN, worker_of
from test_runtime_rules import compile_rules

from ralbuild.contract.bundle import Engine
from ralbuild.release.runtime_rules import publish
from ralbuild.release.site import Deployed, Site, State


class Served:
    """A running server, the folder that it looks at, and the model's own answer."""

    def __init__(self, folder: Path, runtime: Runtime, plain: str, word: str) -> None:
        self.folder, self.runtime, self.plain, self.word = folder, runtime, plain, word

    def publish(self, serial: int, written: str, by: str = "sign") -> None:
        """Put a file where the server looks, by a rename."""
        sign(self.folder.parent, serial, self.word, written, by).rename(self.folder / "rules.json")

    def deployed(self) -> Site:
        """The site as `ralbuild release` sees it: this server is its blue colour."""
        found = Site.open(self.folder.parent)
        port = urlsplit(self.runtime.url).port
        assert port is not None
        site = Site(found.folder, replace(found.settings, blue=port))
        site.save(State("blue", {"blue": Deployed("x", "sha256:x", "sha256:y", "box", 1)}))
        return site

    def expected(self, written: str) -> str:
        return self.plain.replace(self.word, written)

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.runtime.get("/ral/info")[1])["runtime_rules"]
        return found

    def wait(self, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while not found(info := self.info()):
            assert time.monotonic() < deadline, info
            time.sleep(0.05)
        return info

    def wait_refused(self, reason: str) -> dict[str, Any]:
        return self.wait(lambda info: reason in str(info["refused"]))

    def stage(self) -> str:
        return str(json.loads(self.runtime.get("/ready")[1])["stage"])

    def unload(self) -> None:
        assert self.runtime.post("/ral/unload", {}, ADMIN)[0] == 200

    def crash(self) -> None:
        os.kill(worker_of(self.runtime), signal.SIGKILL)
        while self.stage() == "ready":
            time.sleep(0.01)
        self.runtime.wait_ready()

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of one sample name by the values of its labels, in the labels' order."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.runtime.get("/metrics")[1].decode())
            for sample in family.samples
            if sample.name == name
        }


def sign(folder: Path, serial: int, word: str, written: str, by: str = "sign") -> Path:
    """Write a signed file with one redaction beside the site's keys."""
    rule = f"{{text: {json.dumps(word)}, with: {json.dumps(written)}, case_sensitive: true}}"
    text = f"serial: {serial}\nredact: [{rule}]\n"
    assert compile_rules(folder, folder, text, by=by, out="next.json").code == 0
    return folder / "next.json"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = make_model(folder / "model")
    tokens = greedy(model, CHAT["messages"][0]["content"], 60)
    word, plain = words_of(tokens)[1], b"".join(tokens).decode(errors="replace")
    for name in ("sign", "other"):
        make_key(folder, name)
    (folder / "admin").write_text("top secret\n")
    init = ("release", "init", "--site", "site", "--no-start", "--ports", "1025,1026", "--runtime-rules")
    done = ralbuild(*init, sign(folder, 5, word, "<five>"), "--rules-key", "sign.pub", cwd=folder)
    assert done.code == 0, done.err
    for name in ("sign", "other"):
        (folder / f"{name}.key").rename(folder / "site" / f"{name}.key")
    env = ONE_THREAD | {
        "RAL_RUNTIME_RULES": str(folder / "site" / "rules" / "rules.json"),
        "RAL_RUNTIME_RULES_KEY": str(folder / "site" / "rules" / "key.pem"),
        "RAL_ADMIN_TOKEN_FILE": str(folder / "admin"),
    }
    with running(make_image(folder / "root", model, engine=Engine(4, 512, "float32")), env) as runtime:
        yield Served(folder / "site" / "rules", runtime, plain, word)


# Order matters: each test leaves the rules that the next one begins with.


def test_a_crash_beside_a_bad_file_changes_nothing_of_what_is_in_force(site: Served) -> None:
    assert say(site.runtime) == site.expected("<five>")
    per_answer = site.plain.count(site.word)
    before = site.info()
    assert (before["serial"], before["rules"][0]["events"]) == (5, per_answer)
    site.publish(9, "<nine>", by="other")
    refused = site.wait_refused("is not signed")
    site.crash()
    assert site.info() == refused == before | {"refused": refused["refused"]}
    assert say(site.runtime) == site.expected("<five>")
    # Counts go on over workers, as all counters do.
    assert site.info()["rules"][0]["events"] == 2 * per_answer
    assert list(site.samples("ralbuild_runtime_rule_events_total").values()) == [2 * per_answer]


def test_a_wake_beside_a_bad_file_serves_under_what_is_in_force(site: Served) -> None:
    path = site.folder / "rules.json"
    site.unload()

    def older() -> None:
        site.publish(4, "<four>")

    faults: list[tuple[Callable[[], object], str]] = [
        (lambda: path.write_bytes(b"{"), "not JSON"),
        (path.unlink, "No such file"),
        (older, "serial 4"),  # signed by the right key: a worker that remembers nothing would take it
    ]
    for fault, reason in faults:
        fault()
        site.wait_refused(reason)
    assert site.stage() == "unloaded"
    assert site.samples("ralbuild_runtime_rules_stale") == {(): 1}
    assert say(site.runtime) == site.expected("<five>")
    assert site.info()["serial"] == 5


def test_release_rules_reaches_a_server_whose_model_is_unloaded(site: Served) -> None:
    site.publish(5, "<five>")  # what the site has is what is in force
    site.unload()
    found = publish(site.deployed(), sign(site.folder.parent, 6, site.word, "<six>"))
    info = site.info()
    assert site.stage() == "unloaded"
    assert (info["sha256"], info["serial"], info["refused"]) == (found.sha256, 6, None)
    assert info["rules"][0]["events"] == 0
    assert site.samples("ralbuild_runtime_rules_in_force") == {("6", f"sha256:{found.sha256}"): 1}
    assert site.samples("ralbuild_runtime_rules_stale") == {(): 0}
    # The request that wakes the model is under them. What the file before counted stays that file's.
    assert say(site.runtime) == site.expected("<six>")
    assert site.info()["rules"][0]["events"] == site.plain.count(site.word)


def test_a_file_published_while_a_worker_starts_is_in_force_for_its_first_request(site: Served) -> None:
    site.unload()
    site.publish(7, "<seven>")
    site.wait(lambda info: info["serial"] == 7)
    site.publish(8, "<eight>")
    site.runtime.post("/ral/load", {}, ADMIN)
    site.wait(lambda info: info["serial"] == 8)
    assert say(site.runtime) == site.expected("<eight>")
